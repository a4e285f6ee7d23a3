"""`check --bisect` names what is wrong, in few runs, and writes a program that shows it."""

from __future__ import annotations

import ast
import json
import os
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.bisect.cases import BUGS, WANTED
from benchmarks.bisect.judge import find
from benchmarks.bisect.models import MODELS, make
from benchmarks.bisect.planting import Bug, planted
from click.testing import CliRunner

import tilewright
from tilewright.accuracy import compare_trees, in_float64
from tilewright.bisection import Bisection, excess
from tilewright.cli.checking.check import SAME, again
from tilewright.cli.checking.reproduction import FailedCheck, write_case
from tilewright.cli.command import cli

NEAR = 4.0
"""Allowed in a state of its own rounding, in units of what is allowed: planted defects make more than a hundred."""

SAMPLE = tuple(
    next(b for b in BUGS if (b.kind, b.training) == wanted and b.model in ("dense", "folded"))
    for wanted in (
        ("kernel", True), ("capture", False), ("call", True), ("rewrite", False), ("declaration", False),
        ("rule", False),
    )
)  # fmt: skip


@pytest.mark.parametrize("bug", SAMPLE, ids=str)
def test_a_planted_defect_is_named(bug: Bug) -> None:
    found = find(bug)
    assert found is not None, "it makes no result wrong"
    assert found.named, found.culprit
    assert found.runs <= found.most_runs


@pytest.mark.slow
def test_fifty_planted_defects_are_named() -> None:
    found = [f for f in map(find, BUGS) if f is not None]
    assert len(found) >= WANTED
    assert [str(f.bug) for f in found if not f.passed] == []


SLOW = ("attending", "convolved")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MODELS]
)
def test_every_state_of_a_right_program_is_right(name: str, tmp_path: Path) -> None:
    module, inputs = make(name)
    module.eval()
    bisection = Bisection()
    with torch.no_grad(), bisection.watching():
        compiled = tilewright.compile(module, None, options={"cache_dir": str(tmp_path), "measure": False})
        compiled(*inputs)
        eager, exact = module(*inputs), in_float64(module)(*inputs)

    def error() -> float:
        with torch.no_grad():
            return excess(compare_trees(compiled(*inputs), eager, exact))

    count = len(bisection.candidates)
    assert count > 10
    errors = [bisection.error_in(k, error) for k in range(count + 1)]
    assert max(errors) < NEAR, str(bisection.candidates[errors.index(max(errors)) - 1])
    assert bisection.search(error, error()) is None


SOURCE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.RMSNorm(48), nn.Tanh(), nn.Linear(48, 3)), (torch.randn(6, 24),)
"""


@pytest.mark.parametrize("backward", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_reproduction_runs_by_itself(
    backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "to_bisect.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "to_bisect", raising=False)
    tilewright.reset()
    bug = Bug("", "kernel", "op", training=backward)
    words = ["to_bisect:make", "--option", f"cache_dir={tmp_path / 'cache'}", "--option", "measure=false"]
    words += ["--backward"] if backward else []
    with planted(bug, 0) as state:
        result = CliRunner().invoke(
            cli, ["check", *words, "--bisect", "--reproduction", "shown.py", "--json", "-"], catch_exceptions=False
        )  # fmt: skip
        assert state.met
    assert result.exit_code == 4
    facts = json.loads(result.stdout)
    found = facts["bisection"]
    assert found["kind"] == "kernel" and found["places"] and "void" in found["detail"]
    # The wrong kernel is in the cache of the code that printed it: another tree's would print it anew.
    environment = os.environ | {"PYTHONPATH": str(Path(tilewright.__file__).parents[1])}
    shown = subprocess.run(
        [sys.executable, "shown.py"], capture_output=True, text=True, check=False, env=environment
    )
    assert shown.returncode == 1, shown.stdout + shown.stderr
    written_down = runpy.run_path("shown.py")
    shutil.rmtree(tmp_path / "cache")
    tilewright.reset()
    capsys.readouterr()
    assert again(written_down["CASE"], written_down["DETAIL"]) == 0
    assert SAME[:40] in capsys.readouterr().out


@pytest.mark.parametrize("backward", [False, True])
def test_what_is_right_has_no_culprit(
    backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "to_bisect.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "to_bisect", raising=False)
    result = CliRunner().invoke(
        cli, ["check", "to_bisect:make", "--bisect", *["--backward"] * backward, "--json", "-"], catch_exceptions=False
    )  # fmt: skip
    assert result.exit_code == 0
    assert "bisection" not in json.loads(result.stdout)
    assert not (tmp_path / "wrong.py").exists()


def test_names_in_a_reproduction_are_only_text(tmp_path: Path) -> None:
    plain = FailedCheck(
        "a:b", (), (), (), (), None, None, None, False, None, (), 0, False, None, False, "kernel k0", 3, 1e6
    )
    hostile = '")\nimport os\nos.abort()\n#\'\'\'"""\u202e\\'
    bad = replace(plain, model=hostile, culprit=hostile, options=(hostile,), shapes=(hostile,))
    files = [
        write_case(tmp_path / "plain.py", (plain, "int k0;")), write_case(tmp_path / "bad.py", (bad, hostile * 3))
    ]  # fmt: skip
    trees = [ast.parse(f.read_bytes()) for f in files]
    kinds = [[type(n) for n in ast.walk(t) if isinstance(n, ast.stmt)] for t in trees]
    assert kinds[0] == kinds[1]
    texts = [n.value for n in ast.walk(trees[1]) if isinstance(n, ast.Constant)]
    assert texts.count(hostile) == 4
