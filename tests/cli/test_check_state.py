"""`check` judges what a call writes, too, and each of its calls begins with the same inputs and state."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import tilewright.api
from tilewright.cli.command import cli

SOURCE = """
import torch
from torch import nn

class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))
    def forward(self, x):
        self.seen.add_(x.sum(0))
        return x * 2 + self.seen

class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(0, 4))
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x):
        self.calls = self.calls + 1
        self.kept = torch.cat([self.kept, x])
        return self.kept.sum(0) * self.calls

def assigned():
    torch.manual_seed(0)
    return Growing(), (torch.rand(3, 4),)

def state():
    torch.manual_seed(0)
    return Counter(), (torch.rand(3, 4),)

def given():
    return (lambda x: x.mul_(1.5).sum(0)), (torch.rand(3, 4),)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "writing.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "writing", raising=False)


def check(model: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(cli, ["check", f"writing:{model}", "--json", "-"], catch_exceptions=False)
    facts = json.loads(result.stdout)
    return result.exit_code, [o["output"] for o in facts["outputs"] if not o["passed"]]


@pytest.mark.parametrize("model", ["state", "assigned", "given"])
def test_a_program_that_writes_passes(model: str, here: None) -> None:
    assert check(model) == (0, [])


@pytest.mark.parametrize("wrong", ["result", "state", "input"])
def test_a_program_that_writes_and_is_wrong_fails(
    wrong: str, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bent(target: torch.nn.Module, *_: object, **__: object) -> object:
        def run(x: Tensor) -> Tensor:
            result = target(x)
            off = {"result": result, "input": x}.get(wrong)
            (target.get_buffer("seen") if off is None else off).add_(1e-3)
            return result

        run.coverage = "none"  # pyright: ignore[reportFunctionMemberAccess]
        run.compilations = ()  # pyright: ignore[reportFunctionMemberAccess]
        return run

    monkeypatch.setattr(tilewright.api, "compile", bent)
    place = {"result": "['results'][0]", "state": "['written']['seen']", "input": "['written']['input x']"}
    assert check("given" if wrong == "input" else "state") == (4, [place[wrong]])
