"""`tilewright tune`: a file that others compile with and time nothing; what is kept, refused and interrupted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner, Result

import tilewright
from tilewright.cli.command import cli
from tilewright.cli.tune import seconds_of
from tilewright.errors import InputError
from tilewright.runtime.own.timer import Timer
from tilewright.runtime.stats import STATS
from tilewright.runtime.store.tuning_file import TuningFile

NET = """
import torch
def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU()), (torch.randn(64, 128),)
def other():
    torch.manual_seed(0)
    return torch.nn.Linear(192, 256), (torch.randn(64, 192),)
"""
TUNE = ("tune", "tune_net:make", "--freeze", "--threads", "2")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models, as the current one, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "tune_net", raising=False)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TILEWRIGHT_MEASURE", "1")
    (tmp_path / "tune_net.py").write_text(NET)
    tilewright.reset()
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), catch_exceptions=False)


def choices(path: Path) -> dict[str, Any]:
    """Of the one device."""
    ((_, entries),) = json.loads(path.read_text())["devices"].items()
    return entries


def compiled_with(file: Path) -> str:
    """What a process compiles that has no choices in its store: the coverage of its graph."""
    tilewright.reset()
    torch.manual_seed(0)
    net, x = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU()), torch.randn(64, 128)
    options = {"tuning_file": str(file), "threads": 2, "freeze": True}
    with torch.no_grad(), mock.patch.object(Timer, "_trials", return_value=[]):
        made = tilewright.compile(net, (x,), options=options)
        torch.testing.assert_close(made(x), net(x))
    return str(made.coverage)


def test_who_has_the_file_times_nothing(here: Path) -> None:
    result = invoke(*TUNE, "--json", "facts.json")
    assert result.exit_code == 0, result.output
    facts = json.loads((here / "facts.json").read_text())
    assert (
        facts["output"] == "tuning.json"
        and facts["timed"] >= 1
        and "TUNING_FILE=tuning.json" in result.stdout
    )
    ((name, entry),) = choices(here / "tuning.json").items()
    assert (
        name.startswith("call ") and entry["fastest"] in entry["seconds"] and "f32[64, 128]" in entry["what"]
    )
    with mock.patch.object(Timer, "measure", side_effect=AssertionError):
        compiled_with(here / "tuning.json")
    assert STATS.timed == 0


def test_the_choice_is_the_one_of_the_file(here: Path) -> None:
    """Not what a clock would say; a name that nobody offers is timed."""
    invoke(*TUNE)
    facts = json.loads((here / "tuning.json").read_text())
    ((_, entries),) = facts["devices"].items()
    ((name, entry),) = entries.items()
    for fastest, words, timed in (
        ("plain", "library calls by choice", 0),
        ("own", "routines of our own", 0),
        ("nobody", "", 1),
    ):
        entries[name] = {**entry, "fastest": fastest}
        (here / "tuning.json").write_text(json.dumps(facts))
        assert words in compiled_with(here / "tuning.json") and STATS.timed == timed


def test_another_model_is_added_and_what_is_known_is_not_timed(here: Path) -> None:
    invoke(*TUNE)
    first = choices(here / "tuning.json")
    assert invoke(*TUNE, "--option", "cache=off").exit_code == 0
    STATS.reset()
    with mock.patch.object(Timer, "measure", side_effect=AssertionError):
        assert invoke(*TUNE, "--option", "cache=off").exit_code == 0
    again = choices(here / "tuning.json")
    assert again.keys() == first.keys()
    assert invoke("tune", "tune_net:other", "--freeze", "--threads", "2").exit_code == 0
    assert len(choices(here / "tuning.json")) == 2 and first.items() <= choices(here / "tuning.json").items()


def test_two_that_write_one_file_keep_both(here: Path) -> None:
    measure: Callable[..., str] = Timer.measure

    def meanwhile(timer: Timer, *given: Any) -> str:
        TuningFile({"another device": {}}).write(here / "tuning.json")
        return measure(timer, *given)

    with mock.patch.object(Timer, "measure", meanwhile):
        assert invoke(*TUNE).exit_code == 0
    devices = json.loads((here / "tuning.json").read_text())["devices"]
    assert len(devices) == 2 and sorted(map(len, devices.values())) == [0, 1]


def test_a_budget_of_nothing_times_nothing(here: Path) -> None:
    with mock.patch.object(Timer, "_times", side_effect=AssertionError):
        result = invoke(*TUNE, "--budget", "0")
    assert result.exit_code == 0 and choices(here / "tuning.json") == {}
    assert "more time would settle 1 more" in result.stdout
    invoke(*TUNE, "-o", "other.json")
    with mock.patch.object(Timer, "_times", side_effect=AssertionError):  # but what is known is written
        assert invoke(*TUNE, "--budget", "0").exit_code == 0
    assert choices(here / "tuning.json") == choices(here / "other.json")


@pytest.mark.parametrize("known", [False, True], ids=["nothing", "an entry"])
def test_interrupted_tuning_leaves_what_it_found(known: bool, here: Path) -> None:
    measure: Callable[..., str] = Timer.measure
    written: list[str] = []

    def stopped(timer: Timer, *given: Any) -> None:
        if known:
            measure(timer, *given)
            written.append(
                (here / "tuning.json").read_text()
            )  # each is written when it is found, if not too often
        raise KeyboardInterrupt

    with mock.patch.object(Timer, "measure", stopped):
        result = invoke(*TUNE)
    assert result.exit_code == 130 and "interrupted" in result.output
    assert len(choices(here / "tuning.json")) == known and len(written) == known
    assert sorted(p.name for p in here.glob("*tuning*")) == ["tuning.json"]


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("{", 2, "no tuning file is overwritten that cannot be read"),
        ('{"schema": 3, "version": "0.0.1"}', 0, "is written anew: it is of version '0.0.1'"),
    ],
)
def test_what_lies_where_the_file_should(text: str, code: int, words: str, here: Path) -> None:
    (here / "tuning.json").write_text(text)
    result = invoke(*TUNE)
    assert result.exit_code == code and words in " ".join(result.output.split())
    assert code == 0 or (here / "tuning.json").read_text() == text


def test_wrong_use_is_told_before_the_work(here: Path) -> None:
    with mock.patch("tilewright.cli.tune.prepared", side_effect=AssertionError):
        assert invoke(*TUNE, "-o", "absent/t.json").exit_code == 2
        assert invoke(*TUNE, "--budget", "soon").exit_code == 2
        assert invoke(*TUNE, "--option", "measure=0").exit_code == 2
    assert torch.cuda.is_available() or invoke(*TUNE, "--device", "cuda").exit_code == 2
    assert invoke("compile", "tune_net:make", "-o", "kept.tw").exit_code == 0
    refused = invoke("tune", "kept.tw").output
    assert "compiled already (op kept.tw). Hint: tune the model that it was made of" in refused
    assert not (here / "tuning.json").exists()


@pytest.mark.parametrize(("text", "seconds"), [("60", 60), ("60s", 60), ("1.5m", 90), ("1h", 3600), ("0", 0)])
def test_budgets(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "-1", "1e3", "nan", "inf", "five", "9" * 400, "1 d"])
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(InputError, match="a budget cannot be"):
        seconds_of(text)
