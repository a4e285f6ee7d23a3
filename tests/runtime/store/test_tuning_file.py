"""Tuning files: what is read, what is ignored and why, what is refused, and that a file is whole at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tilewright.errors import InputError
from tilewright.options import Options
from tilewright.runtime.store import tuned
from tilewright.runtime.store.tuned import TuningSession, tuned_for, tuning
from tilewright.runtime.store.tuning_file import (
    KINDS,
    TuningFile,
    Unusable,
    as_entry,
    entry_name,
    parse,
    read,
    version_here,
)

KEY = "0123456789abcdef" * 4
PRODUCT = entry_name("product", KEY)
ENTRIES: Mapping[str, Mapping[str, object]] = {
    "product": {
        "what": "linear + gelu: f16[16, 512] -> f16[16, 32]",
        "schedule": "c3:grid/64x64 c4:grid/128x128 c5:streamedx64 lane=c5 warps=4 stages=2",
        "parts": 2, "operands": "as they lie", "seconds": 1.5e-5, "library_seconds": 2e-5,
    },
    "attention": {"kernels": False, "parts": 4, "seconds": 3e-5, "library_seconds": 2e-5},
    "way": {"schedule": "", "seconds": 1e-3, "usual_seconds": 1e-3},
    "front": {"joined": False, "seconds": None, "apart_seconds": 2e-5},
    "cover": {"seconds": [1e-3, 2e-3]},
    "call": {"fastest": "own", "seconds": {"own": 1e-3, "plain": 2e-3}},
    "convolution": {"seconds": None},
    "fused_convolution": {"right": True},
}  # fmt: skip
Change = Callable[[dict[str, Any]], object]


def facts(**devices: Mapping[str, object]) -> dict[str, Any]:
    entries = {entry_name(kind, KEY): dict(entry) for kind, entry in ENTRIES.items()}
    return {"schema": 3, "version": version_here(), "devices": devices or {"here": entries}}


def entry(given: dict[str, Any], kind: str = "product") -> dict[str, Any]:
    return given["devices"]["here"][entry_name(kind, KEY)]


def test_text_and_back() -> None:
    assert ENTRIES.keys() == KINDS.keys() and all(as_entry(k, dict(e)) for k, e in ENTRIES.items())
    made = parse(json.dumps(facts()), "t.json")
    assert isinstance(made, TuningFile) and parse(made.text(), "t.json") == made
    assert made.text() == TuningFile(dict(list(made.devices.items())[::-1])).text()


def test_files_of_several_devices_and_models_are_one() -> None:
    first = TuningFile({"a": {"x": {"seconds": 1}, "y": {"seconds": 1}}})
    both = first.merged(TuningFile({"a": {"y": {"seconds": 2}}, "b": {}}))
    assert both.devices == {"a": {"x": {"seconds": 1}, "y": {"seconds": 2}}, "b": {}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.update(tiles=3), "unknown key 'tiles'.*at t.json"),
        (lambda f: f.pop("devices"), "'devices' is missing"),
        (lambda f: f.update(devices=[]), r"at t.json: devices\)"),
        (lambda f: f["devices"].update(there=3), r"at t.json: there\)"),
        (lambda f: f["devices"]["here"].update({"loop " + 32 * "0": {}}), "unknown key 'loop 0"),
        (lambda f: f["devices"]["here"].update({"product 12": {}}), "unknown key 'product 12'"),
        (lambda f: entry(f).update(tile=64), f"unknown key 'tile'.*at t.json: here: {PRODUCT}"),
        (lambda f: entry(f).pop("parts"), f"'parts' is missing.*at t.json: here: {PRODUCT}"),
        (lambda f: entry(f).update(what=3), "what cannot be 3"),
        (lambda f: entry(f).update(parts=-2), "parts cannot be -2"),
        (lambda f: entry(f).update(parts=True), "parts cannot be True"),
        (lambda f: entry(f).update(seconds=-1), "seconds cannot be -1"),
        (lambda f: entry(f).update(seconds=10**400), "seconds cannot be 1000"),
        (lambda f: entry(f).update(schedule=f"c3:gridx4 past_caches=[1 if {'(' * 999}]"), "do not match"),
        (
            lambda f: entry(f).update(schedule=f"c3:gridx4 past_caches=[1 if {'+'.join('1' * 9999)}]"),
            "no condition",
        ),
        (lambda f: entry(f).update(schedule=5), "schedule cannot be 5"),
        (lambda f: entry(f).update(schedule="c3:gridx-64"), "tiles are at least 1"),
        (lambda f: entry(f).update(schedule="c3:grid/-64x64"), f"tiles are at least 1.*: {PRODUCT}"),
        (lambda f: entry(f).update(schedule="c3:gridx64 warps=-4"), "'-4' is no number"),
        (lambda f: entry(f).update(schedule="c3:gridx64 import=os"), "no field 'import'"),
        (lambda f: entry(f, "attention").update(kernels="yes"), "kernels cannot be 'yes'"),
        (lambda f: entry(f, "cover").update(seconds=[]), r"seconds cannot be \[\]"),
        (lambda f: entry(f, "call").update(fastest=""), "fastest cannot be ''"),
        (lambda f: entry(f, "call").update(seconds={"own": "x"}), "seconds by name"),
        (lambda f: entry(f, "convolution").update(seconds="x"), "seconds cannot be 'x'"),
        (lambda f: entry(f, "fused_convolution").update(right=None), "right cannot be None"),
    ],
)
def test_what_no_tuning_file_says_is_refused_with_its_place(change: Change, words: str) -> None:
    given = facts()
    change(given)
    with pytest.raises(InputError, match=words):
        parse(json.dumps(given), "t.json")


def test_a_key_that_a_merge_left_twice_is_refused() -> None:
    text = json.dumps(facts()).replace('"parts"', '"seconds": 1, "parts"')
    with pytest.raises(InputError, match="'seconds' stands there twice"):
        parse(text, "t.json")


@pytest.mark.parametrize(
    ("text", "reason", "other"),
    [
        ("", "damaged", False),
        ("[" * 100_000, "damaged", False),
        ('{"schema": 3, "version": "x", "devices": NaN}', "damaged", False),
        ("[1, 2]", "no schema", False),
        ('{"tiles": -3}', "no schema", False),
        ('{"schema": 4, "version": "x", "tiles": -3}', "schema 4, here 3", True),
        ('{"schema": true, "version": "x"}', "schema True", True),
        ('{"schema": 3, "version": "0.0.1", "tiles": -3}', "version '0.0.1', this is", True),
    ],
)
def test_what_is_damaged_or_of_others_is_ignored(text: str, reason: str, other: bool) -> None:
    """Whatever else stands in it."""
    found = parse(text, "t.json")
    assert isinstance(found, Unusable) and reason in found.reason and found.other == other


def test_what_cannot_be_read_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = json.dumps(facts()), tmp_path / "cut.json"
    cut.write_text(whole[: len(whole) // 2])
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.json", tmp_path, cut, tmp_path / "bytes.json"):
        assert isinstance(read(path), Unusable)
    (tmp_path / "whole.json").write_text(whole)
    assert isinstance(read(tmp_path / "whole.json"), TuningFile)
    monkeypatch.setattr("tilewright.runtime.store.tuning_file.TUNING_FILES", mock.Mock(max_bytes=10))
    assert "more than 10" in str(read(tmp_path / "whole.json"))


def test_one_warning_names_the_file_and_why(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(facts(there={})))
    options = Options(tuning_file=str(path))
    with pytest.warns(RuntimeWarning, match=r"t\.json is ignored for 'here': it is of 'there'") as said:
        assert not tuned_for(options, "here").entries
        assert not tuned_for(options, "here").entries
    assert len(said) == 1
    path.write_text("{")
    with pytest.warns(RuntimeWarning, match=r"t\.json is ignored: it is damaged"):
        assert not tuned_for(options, "here").entries


def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    options = Options(tuning_file=str(path))
    parsed = mock.Mock(side_effect=tuned.read)
    with mock.patch.object(tuned, "read", parsed):
        path.write_text(json.dumps(facts()))
        first = tuned_for(options, "here")
        assert tuned_for(options, "here").get("call", KEY) == first.get("call", KEY) is not None
        TuningFile({"here": {}}).write(path)
        assert tuned_for(options, "here").get("call", KEY) is None
    assert parsed.call_count == 2


@pytest.mark.parametrize("broken", ["fsync", "replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_the_last_complete_file_stays(
    broken: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json"
    TuningFile({"old": {}}).write(path)
    before = path.read_text()
    with monkeypatch.context() as patched:
        patched.setattr(os, broken, mock.Mock(side_effect=error))
        with pytest.raises(error):
            TuningFile({"new": {}}).write(path)
    assert path.read_text() == before and os.listdir(tmp_path) == ["t.json"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "t.json")
    TuningFile({"new": {}}).write(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink() and '"new"' in (tmp_path / "t.json").read_text()


def test_a_session_ends_by_its_clock_and_knows_what_is_unsettled() -> None:
    now, told = [0.0], list[int]()
    session = TuningSession(10, lambda: told.append(len(session.found.devices)), lambda: now[0])
    with tuning(session):
        here = tuned_for(Options(), "here")
        assert here.seconds(60) == 10 and here.seconds(3) == 3
        here.note("call", KEY, ENTRIES["call"], final=False)
        here.leave("product", KEY)
        assert session.unsettled == {entry_name("call", KEY), PRODUCT} and told == [1]
        here.note("call", KEY, ENTRIES["call"])
        assert session.unsettled == {PRODUCT}
        now[0] = 11.0
        assert here.seconds() == session.left == 0
    assert not tuned_for(Options(), "here") and tuned_for(Options(), "here").seconds(60) == 60
    assert session.found.devices == {"here": {entry_name("call", KEY): ENTRIES["call"]}}
