"""Plans survive JSON: every field comes back, calls run by name, and what has no name is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.errors import InputError
from tilewright.ir.graph import LibraryCall
from tilewright.plan import Plan
from tilewright.plan.portable import from_json, to_json
from tilewright.runtime.plan.executable import Executable


@pytest.fixture(autouse=True)
def fresh() -> None:
    tilewright.reset()


def softmax_rows(x: Tensor) -> Tensor:
    return torch.softmax(x * 2, -1) @ x.t()


def top(x: Tensor) -> Tensor:
    return torch.topk(x.relu(), 2, dim=0).values.t() + 1


def found(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.nonzero() * 2, x.sum().to(torch.float64)


def updated(x: Tensor) -> Tensor:
    x.mul_(2)
    return torch.full_like(x, float("inf"), dtype=torch.float64) + x


def plans(program: Callable[..., object], *inputs: Tensor, **how: Any) -> list[Plan]:
    """The plans of a program's graphs."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        tilewright.compile(program, inputs, **how)
    return [c.trace["plan"] for c in tilewright.compilations()]  # type: ignore[misc]


@pytest.mark.parametrize("program", [softmax_rows, top, found, updated])
@pytest.mark.parametrize("dynamic", [False, True])
def test_round_trip(program: Callable[[Tensor], object], dynamic: bool) -> None:
    x = torch.randn(6, 5)
    (plan,) = plans(program, x, dims={"x": {0: "n"}} if dynamic else None)
    text = json.dumps(to_json(plan), allow_nan=False)
    back = from_json(json.loads(text))
    assert back.show() == plan.show()
    assert json.dumps(to_json(back)) == text
    without_calls = [f.name for f in fields(Plan) if f.name != "segments"]
    assert all(getattr(back, name) == getattr(plan, name) for name in without_calls)
    for one, other in zip(back.segments, plan.segments, strict=True):
        assert (one.measures, one.frees) == (other.measures, other.frees)
        for a, b in zip(one.steps, other.steps, strict=True):
            call, kept = getattr(a, "call", None), getattr(b, "call", None)
            assert a == b or isinstance(kept, LibraryCall)
            if isinstance(kept, LibraryCall):
                assert isinstance(call, LibraryCall) and call.function is kept.function
                assert (call.args, call.kwargs, call.strides) == (kept.args, kept.kwargs, kept.strides)


def test_a_plan_that_was_read_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    x = torch.randn(6, 5)
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler"):
        (plan,) = plans(softmax_rows, x)
    (got,) = Executable(from_json(json.loads(json.dumps(to_json(plan)))))([x])
    torch.testing.assert_close(got, softmax_rows(x))


def test_private_calls_are_written_as_such_and_refused() -> None:
    net = nn.Sequential(nn.Linear(64, 512), nn.ReLU()).eval()
    with torch.no_grad():
        (plan,) = plans(net, torch.randn(128, 64), freeze=True)
    data = json.loads(json.dumps(to_json(plan)))
    assert '{"private": "linear"}' in json.dumps(data)
    with pytest.raises(InputError, match="only in the process that compiled it.*linear"):
        from_json(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(format=0),
        lambda d: d.pop("expressions"),
        lambda d: d["plan"].update({"is": "Popen"}),
        lambda d: d["plan"].update({"unknown": 1}),
        lambda d: d.update(plan=3),
        lambda d: d["expressions"].clear(),
    ],
)
def test_damaged_plans_are_refused(change: Callable[[dict[str, Any]], object]) -> None:
    (plan,) = plans(top, torch.randn(6, 5))
    data = json.loads(json.dumps(to_json(plan)))
    change(data)
    with pytest.raises(InputError):
        from_json(data)


def test_the_command_line_writes_plans(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from tilewright.cli.command import cli

    file = tmp_path / "facts.json"
    result = CliRunner().invoke(cli, ["compile", f"{__name__}:example", "--json", str(file)])
    assert result.exit_code == 0, result.output
    plan = from_json(json.loads(file.read_text())["plan"])
    assert "aten.topk" in plan.show()


class Top(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """`top`"""
        return top(x)


def example() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """For the command line."""
    return Top(), (torch.randn(6, 5),)


def test_only_ops_of_the_registry_are_named() -> None:
    (plan,) = plans(top, torch.randn(6, 5))
    text = json.dumps(to_json(plan))
    assert "aten.topk.default" in text
    for name in ("os.system", "aten.topk", "aten.__class__.x", "aten.nothing.default"):
        with pytest.raises(InputError, match="no such op"):
            from_json(json.loads(text.replace("aten.topk.default", name)))
