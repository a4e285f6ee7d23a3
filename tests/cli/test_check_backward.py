"""`check --backward` judges the loss, the gradients and the buffers of a training step."""

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

def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3))
    return net, (torch.randn(16, 6),)

class Own(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
        self.kind = kind
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        if kind == "adamw":
            self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    def forward(self, x, y):
        if self.kind != "written":
            self.opt.zero_grad()
        loss = nn.functional.mse_loss(self.net(x), y)
        if self.kind != "written":
            loss.backward()
            self.opt.step()
        else:
            weights = list(self.net.parameters())
            gradients = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                for p, g in zip(weights, gradients):
                    p.sub_(0.1 * g)
        return loss.detach()

def own(kind="optimizer"):
    torch.manual_seed(0)
    return Own(kind), (torch.randn(16, 6), torch.randn(16, 3))

def written():
    return own("written")

def adamw():
    return own("adamw")

class Broken(nn.Module):
    def forward(self, x):
        y = x.exp()
        torch._dynamo.graph_break()
        return (y - x).sum(1)

def broken():
    return Broken(), (torch.randn(16, 6),)

def whole():
    return nn.Embedding(4, 3).requires_grad_(False), (torch.tensor([1, 2]),)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "trainable.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "trainable", raising=False)
    return tmp_path


class Bent(torch.autograd.Function):
    """The same forward, with gradients that are a thousandth too large."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1.001


def check(*words: str, how: str = "--backward") -> tuple[int, dict[str, object]]:
    result = CliRunner().invoke(cli, ["check", *words, how, "--json", "-"], catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout)


def test_a_step_that_is_right_passes(here: Path) -> None:
    code, facts = check("trainable:make")
    outputs = facts["outputs"]
    assert isinstance(outputs, list)
    names = " ".join(str(o["output"]) for o in outputs)
    assert code == 0 and facts["passed"] is True
    for part in ("loss", "gradients", "input 0", "1.weight", "buffers", "running_var", "num_batches_tracked"):
        assert part in names


@pytest.mark.parametrize("wrong", ["gradient", "buffer"])
def test_a_step_that_is_wrong_fails(wrong: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bent(module: torch.nn.Module, *_: object, **__: object) -> object:
        def run(x: Tensor) -> Tensor:
            result = module(x)
            if wrong == "gradient":
                return Bent.apply(result)  # pyright: ignore[reportReturnType]
            module.get_buffer("1.running_mean").data.add_(1e-4)
            return result

        run.coverage = "none"  # pyright: ignore[reportFunctionMemberAccess]
        return run

    monkeypatch.setattr(tilewright.api, "compile", bent)
    code, facts = check("trainable:make")
    outputs = facts["outputs"]
    assert isinstance(outputs, list)
    failed = " ".join(str(o["output"]) for o in outputs if not o["passed"])
    assert (
        code == 4
        and ("gradients" if wrong == "gradient" else "running_mean") in failed
        and "loss" not in failed
    )


def test_what_cannot_be_trained_is_refused(here: Path) -> None:
    code, facts = check("trainable:whole")
    assert code == 2 and "error" in facts


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch, where it breaks a graph
@pytest.mark.parametrize("model", ["own", "written", "adamw"])
def test_a_step_that_writes_its_weights_is_judged_by_them(model: str, here: Path) -> None:
    """One with an optimizer is no single graph: it is compiled in parts."""
    code, facts = check(f"trainable:{model}")
    outputs = facts["outputs"]
    assert isinstance(outputs, list)
    names = " ".join(str(o["output"]) for o in outputs)
    assert code == 0 and facts["passed"] is True
    expected = ["results", "parameter net.0.weight", "parameter net.2.bias"]
    if model == "own":
        expected += ["gradient of net.0.weight", "opt of net.2.weight: momentum_buffer"]
    assert all(part in names for part in expected)


def test_weights_that_a_step_leaves_wrong_fail(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bent(module: torch.nn.Module, *_: object, **__: object) -> object:
        def run(*inputs: Tensor) -> Tensor:
            result = module(*inputs)
            module.get_parameter("net.2.bias").data.add_(1e-4)
            return result

        run.coverage = "none"  # pyright: ignore[reportFunctionMemberAccess]
        return run

    monkeypatch.setattr(tilewright.api, "compile", bent)
    code, facts = check("trainable:own")
    outputs = facts["outputs"]
    assert isinstance(outputs, list)
    failed = [str(o["output"]) for o in outputs if not o["passed"]]
    assert code == 4 and len(failed) == 1 and "parameter net.2.bias" in failed[0]


def test_results_of_several_graphs_are_judged(here: Path) -> None:
    code, facts = check("trainable:broken", how="-q")
    assert code == 0 and facts["passed"] is True and "2 graphs" in str(facts["coverage"])


def test_parts_take_no_dims(here: Path) -> None:
    code, facts = check("trainable:broken", "--dim", "x:0=batch", how="-q")
    error = facts["error"]
    assert code == 3 and isinstance(error, dict) and error["type"] == "SeveralGraphs"
