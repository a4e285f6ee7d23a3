"""300 files that are damaged, foreign or hostile: each is refused in words, and nothing in it runs."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.artifacts import (
    PREFIX,
    Parts,
    Saved,
    canonical,
    mutated,
    put_together,
    same_results,
    taken_apart,
    with_header,
)

import tilewright
from tilewright.errors import ArtifactError, TilewrightError

Case = tuple[str, bytes]


def _flips(data: bytes) -> Iterator[Case]:
    """One bit anywhere: in the prefix, in the header, in each section, between them."""
    draw = random.Random(0)
    places = [*range(PREFIX.size), *(draw.randrange(len(data)) for _ in range(100))]
    for at in places:
        changed = bytearray(data)
        changed[at] ^= 1 << draw.randrange(8)
        yield f"bit {at}", bytes(changed)


def _cuts(data: bytes) -> Iterator[Case]:
    """Truncated, extended, doubled, shifted."""
    for size in (
        0,
        1,
        7,
        8,
        PREFIX.size - 1,
        PREFIX.size,
        PREFIX.size + 1,
        *range(100, len(data), len(data) // 20),
    ):
        yield f"cut at {size}", data[:size]
    yield "one byte more", data + b"\0"
    yield "a page more", data + bytes(4096)
    yield "twice", data + data
    yield "shifted", b"\0" + data
    yield "cut by one", data[:-1]


def _foreign() -> Iterator[Case]:
    """Files of other kinds."""
    yield "empty", b""
    yield "zeros", bytes(1000)
    yield "text", b"hello\n" * 50
    yield "ELF", b"\x7fELF" + bytes(500)
    yield "pickle", b"\x80\x04\x95cposix\nsystem\n(S'touch ran'\ntR."
    yield "safetensors", struct.pack("<Q", 2) + b"{}"
    yield "onnx", b"\x08\x07\x12\x04test" * 20
    yield "script", b"#!/bin/sh\ntouch ran\n"
    yield "gzip", b"\x1f\x8b\x08" + bytes(100)


def _headers(parts: Parts, mine: bytes) -> Iterator[Case]:
    """Headers in other forms, with a right hash."""
    good = json.loads(mine)
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    texts: dict[str, bytes] = {
        "deep": b"[" * 100000,
        "deep and closed": b"[" * 3000 + b"]" * 3000,
        "twice a key": mine.replace(b'{"facts":', b'{"facts":{},"facts":', 1),
        "NaN": mine.replace(b'"sections":', b'"x":NaN,"sections":', 1),
        "Infinity": b'{"facts":Infinity,"sections":[]}',
        "spaces": mine.replace(b",", b", "),
        "number": b"1",
        "huge number": b"1" * 6000,
        "text": b'"' + b"a" * 100 + b'"',
        "no JSON": b"os.system",
        "UTF-8": '{"facts":"ä"}'.encode(),
        "null": b"null",
        "list": b"[]",
        "object": b"{}",
        "code": b"__import__('os').system('touch ran')",
    }
    for name, text in texts.items():
        yield f"header {name}", with_header(text, parts.bodies)
    for name, facts in {
        "no facts": {}, "graphs": {**good["facts"], "graphs": []}, "no targets": {**good["facts"], "targets": []},
        "title": {**good["facts"], "title": 5}, "target": {**good["facts"], "targets": [5]},
        "options": {**good["facts"], "options": [1]}, "beside": {**good["facts"], "beside": 7},
        "beside me": {**good["facts"], "beside": "weights.safetensors"},
        "many graphs": {**good["facts"], "graphs": ["g0"] * 100},
    }.items():  # fmt: skip
        yield (
            f"facts {name}",
            with_header(canonical({"facts": facts, "sections": good["sections"]}), parts.bodies),
        )


def _tables(data: bytes) -> Iterator[Case]:
    """Tables of sections that lie."""
    numbers = (-1, -(1 << 63), 1 << 62, 1 << 70, 1, 63, True, None, 1.5, "0", [], 10**400)
    for column in (2, 3):
        for number in numbers:
            parts = taken_apart(data)
            parts.rows[1][column] = number
            yield f"column {column} is {str(number)[:20]}", put_together(parts, laid=False)
    changes: dict[str, Callable[[list[list[Any]]], object]] = {
        "swapped": lambda rows: rows.reverse(),
        "overlapping": lambda rows: rows[2].__setitem__(2, rows[1][2]),
        "left out": lambda rows: rows.pop(1),
        "doubled": lambda rows: rows.append(rows[-1]),
        "one name": lambda rows: rows[1].__setitem__(1, rows[0][1]),
        "kind": lambda rows: rows[0].__setitem__(0, "pickle"),
        "kind number": lambda rows: rows[0].__setitem__(0, 4),
        "name path": lambda rows: rows[0].__setitem__(1, "../../etc/passwd"),
        "name empty": lambda rows: rows[0].__setitem__(1, ""),
        "name long": lambda rows: rows[0].__setitem__(1, "a" * 5000),
        "hash short": lambda rows: rows[0].__setitem__(4, "00"),
        "hash other": lambda rows: rows[0].__setitem__(4, "0" * 64),
        "hash number": lambda rows: rows[0].__setitem__(4, 5),
        "beside": lambda rows: rows[0].__setitem__(5, True),
        "beside number": lambda rows: rows[0].__setitem__(5, 1),
        "short row": lambda rows: rows[0].pop(),
        "long row": lambda rows: rows[0].append(1),
        "empty": lambda rows: rows.clear(),
    }
    for name, change in changes.items():
        parts = taken_apart(data)
        change(parts.rows)
        yield f"table {name}", put_together(parts, laid=False)


def _beside(data: bytes) -> Iterator[Case]:
    """Weights by reference to places that are not beside the file."""
    for name in (
        "/etc/passwd", "../up.safetensors", "a/b.safetensors", "..", "", ".hidden.safetensors", "x.tw",
        "link.safetensors", "folder.safetensors", "absent.safetensors", "pipe.safetensors", "short.safetensors",
        "x\0.safetensors",
    ):  # fmt: skip
        parts = taken_apart(data)
        parts.facts["beside"] = name
        at = next(k for k, row in enumerate(parts.rows) if row[0] == "tensor")
        parts.rows[at][5] = True
        row, body = parts.rows.pop(at), parts.bodies.pop(at)
        made = put_together(parts)
        *_, length, _, _ = PREFIX.unpack(made[: PREFIX.size])
        told = json.loads(made[PREFIX.size : PREFIX.size + length])
        told["sections"].append([*row[:2], 0, len(body), row[4], True])
        yield f"beside {name!r}", with_header(canonical(told), parts.bodies)


def cases(data: bytes) -> list[Case]:
    """All of them."""
    parts = taken_apart(data)
    *_, length, _, _ = PREFIX.unpack(data[: PREFIX.size])
    mine = data[PREFIX.size : PREFIX.size + length]
    return [
        *_flips(data), *_cuts(data), *_foreign(), *_headers(parts, mine), *_tables(data), *_beside(data),
    ]  # fmt: skip


def test_files_are_refused_in_words(small: Saved, tmp_path: Path) -> None:
    found = cases(small.data)
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "short.safetensors").write_bytes(b"short")
    (tmp_path / "link.safetensors").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe.safetensors")
    with zipfile.ZipFile(tmp_path / "zip", "w") as file:
        file.writestr("data.pkl", "x")
    found += [("zip", (tmp_path / "zip").read_bytes())]
    path = tmp_path / "case.tw"
    for name, data in found:
        path.write_bytes(data)
        sealed = (
            data[: PREFIX.size - 32] == small.data[: PREFIX.size - 32]
        )  # of what the seal covers, all is as it was
        try:
            tilewright.load(
                path, trust=not sealed, rebuild=False
            )  # not even trust lets a changed file through
        except ArtifactError as caught:
            error = caught
        else:
            pytest.fail(name)
        assert error.phase == "load" and error.hint and error.place and "\n" not in str(error), name
    assert len(found) >= 300
    assert not Path("ran").exists() and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("what", ["folder", "pipe", "absent", "link to nothing", "device"])
def test_paths_that_are_no_files_are_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x.tw"
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "link to nothing":
        path.symlink_to(tmp_path / "nothing")
    elif what == "device":
        path = Path("/dev/zero")
    with pytest.raises(ArtifactError):
        tilewright.load(path)


@pytest.mark.parametrize("section", ["g0.call", "tensors", "g0.plan", "facts"])
def test_sections_that_say_something_else_are_refused_in_words(
    section: str, small: Saved, tmp_path: Path
) -> None:
    """With right hashes and a right seal, as only this user could make them: nothing is believed that was not looked
    at. Not run: what a user seals, runs."""
    draw, path, refused = random.Random(1), tmp_path / "case.tw", 0
    whole = (
        next(n for n in taken_apart(small.data).names() if n.startswith(section))
        if section != "facts"
        else ""
    )
    for _ in range(40):
        parts = taken_apart(small.data)
        if whole:
            parts.change_text(whole, mutated(parts.text(whole), draw))
        else:
            parts.facts = mutated(parts.facts, draw)
        path.write_bytes(put_together(parts, sealed=True))
        try:
            tilewright.load(path, rebuild=False)
        except ArtifactError:
            refused += 1
    assert refused >= 10


def test_a_plan_cannot_name_functions(small: Saved, tmp_path: Path) -> None:
    path = tmp_path / "case.tw"
    name = next(n for n in taken_apart(small.data).names() if n.startswith("g0.plan"))
    for told in (
        {"op": "os.system"}, {"op": "aten.add"}, {"op": "load_library.__func__.x"}, {"operator": "os.system"},
        {"operator": "call"}, {"operator": "attrgetter"}, {"routine": "os:system", "fields": {"list": []}},
        {"routine": "tilewright.errors:warn", "fields": {"list": ["message", "x"]}}, {"op": ["os", "system"]},
        "os.system",
    ):  # fmt: skip
        parts = taken_apart(small.data)
        plan = parts.text(name)
        step = {
            "is": "CallStep", "inputs": {"tuple": []}, "outputs": {"tuple": []}, "guarded": False, "core_ns": None,
            "place": "", "call": {"is": "LibraryCall", "calls": told, "name": "x", "args": {"tuple": ["touch ran"]}},
        }  # fmt: skip
        plan["plan"]["segments"]["tuple"][0]["steps"]["tuple"].insert(0, step)
        parts.change_text(name, plan)
        path.write_bytes(put_together(parts, sealed=True))
        with pytest.raises(ArtifactError):
            tilewright.load(path, rebuild=False)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_code_that_nobody_vouches_for_does_not_run(small: Saved, tmp_path: Path) -> None:
    """A library whose constructor leaves a mark, in a file with right hashes: without a seal, with one of another key,
    and with the seal of the file that it was taken from."""
    mark, source = tmp_path / "ran", tmp_path / "evil.cpp"
    source.write_text(
        f'#include <cstdio>\n__attribute__((constructor)) static void run() {{ fclose(fopen("{mark}", "w")); }}\n'
    )
    subprocess.run(["g++", "-shared", "-fPIC", "-o", tmp_path / "evil.so", source], check=True)
    evil, path = (tmp_path / "evil.so").read_bytes(), tmp_path / "case.tw"
    parts = taken_apart(small.data)
    for name in [row[1] for row in parts.rows if row[0] == "library"]:
        parts.change(name, evil)
    plain = put_together(parts)
    old = small.data[PREFIX.size - 32 : PREFIX.size]
    for data in (
        plain,
        plain[: PREFIX.size - 32] + old + plain[PREFIX.size :],
        plain[: PREFIX.size - 32] + bytes([1] * 32) + plain[PREFIX.size :],
    ):
        path.write_bytes(data)
        with pytest.raises(ArtifactError, match="vouches"):
            tilewright.load(path, rebuild=False)
    with pytest.warns(RuntimeWarning, match="built again"):
        loaded = tilewright.load(path)
    with torch.no_grad():
        assert same_results(loaded(small.x), copy.deepcopy(small.model)(small.x))
    assert not mark.exists()
    with pytest.raises(TilewrightError):
        tilewright.load(path, trust=True)(small.x)
    assert mark.exists()  # the mark would have been seen


def test_loading_never_needs_the_place_of_the_file(small: Saved, tmp_path: Path) -> None:
    """What was checked is what runs: the file may be changed or removed behind it."""
    path = tmp_path / "case.tw"
    path.write_bytes(small.data)
    loaded = tilewright.load(path, rebuild=False)
    path.write_bytes(bytes(len(small.data)))
    path.unlink()
    with torch.no_grad():
        assert same_results(loaded(small.x), copy.deepcopy(small.model)(small.x))
