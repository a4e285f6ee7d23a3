"""An offer that raises is dropped and told of: while it is made, while its epilogue is, or in its first run."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.library.offers import onednn, registry
from tilewright.pipeline.trace import Trace
from tilewright.plan.data import CallStep, Plan
from tilewright.runtime.own import product

torch.manual_seed(0)


class Net(nn.Module):
    """A depthwise convolution, one with a sum behind it, and products, each with an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pointwise = nn.Conv2d(8, 8, 1, bias=False)
        self.out = nn.Linear(2048, 640)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.depthwise(x))
        y = torch.relu(self.pointwise(y) + y)
        return torch.nn.functional.gelu(self.out(y.flatten(2).flatten(1).reshape(2, 2, 2048)))


@pytest.fixture
def net() -> tuple[Net, Tensor]:
    return Net().eval(), torch.randn(4, 8, 16, 8 * 2)[:, :, :, :16].contiguous()


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError("could not create a primitive descriptor\nfor many reasons")


def broken(made: Callable[..., object]) -> Callable[..., object]:
    """What is made, but that does not run."""
    return lambda *args, **kwargs: refuse


def compiled(net: nn.Module, x: Tensor) -> tilewright.CompiledModel:
    with torch.no_grad():
        return tilewright.compile(net, (x,), freeze=True, options={"measure": False})


def check(net: nn.Module, x: Tensor, found: Callable[..., object]) -> None:
    with torch.no_grad():
        torch.testing.assert_close(found(x), net(x))
        torch.testing.assert_close(found(x), net(x))


@pytest.fixture
def nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(product.ProductCalls, "__call__", lambda self, task: None)
    yield monkeypatch


def test_packing_that_fails_is_no_offer(net: tuple[Net, Tensor], nothing_of_ours: pytest.MonkeyPatch) -> None:
    """All ways to pack fail: the program's own calls run, and the report says what was offered."""
    nothing_of_ours.setattr(onednn.PackedWindow, "pack", refuse)
    nothing_of_ours.setattr(onednn, "packed_parts", refuse)
    nothing_of_ours.setattr(registry, "PROVIDERS", (onednn.offers,))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = compiled(*net)
        check(*net, found)
    told = [str(call) for call in found.calls]
    assert len([t for t in told if "onednn failed: could not create a primitive descriptor" in t]) == 3
    assert all("aten." in t and "many reasons" not in t for t in told)


def test_packing_that_fails_leaves_leading_dims(nothing_of_ours: pytest.MonkeyPatch) -> None:
    """The program's own product is of a matrix, and what is read in its place has three dims."""
    nothing_of_ours.setattr(onednn, "packed_parts", refuse)
    nothing_of_ours.setattr(registry, "PROVIDERS", (onednn.offers,))
    net = nn.Sequential(nn.Linear(2048, 640), nn.GELU()).eval()
    options = {"measure": False, "freeze": True}
    with torch.no_grad():
        found = torch.compile(net, backend=tilewright.backend, dynamic=True, options=options)
        for shape in ((2, 3, 2048), (4, 5, 2048)):
            x = torch.randn(shape)
            torch.testing.assert_close(found(x), net(x))


def test_code_of_ours_that_fails_is_no_offer(
    net: tuple[Net, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product.ProductCalls, "__call__", refuse)
    found = compiled(*net)
    check(*net, found)
    assert sum("own failed" in str(call) for call in found.calls) == 3


def test_a_faster_form_that_fails_leaves_the_call(
    net: tuple[Net, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "flushed", refuse)
    found = compiled(*net)
    check(*net, found)
    assert any("failed" in str(call) for call in found.calls)


def test_an_epilogue_that_fails_stays_apart(
    net: tuple[Net, Tensor], nothing_of_ours: pytest.MonkeyPatch
) -> None:
    nothing_of_ours.setattr(onednn, "_activated", refuse)
    check(*net, compiled(*net))


@pytest.mark.parametrize("form", [onednn.PackedConvolution, onednn.PackedLinear])
def test_a_first_run_that_fails_is_done_by_the_program(
    form: type, net: tuple[Net, Tensor], nothing_of_ours: pytest.MonkeyPatch
) -> None:
    """With what was fused into the call: activations, and the sum that takes the memory of an operand."""
    nothing_of_ours.setattr(form, "bind", broken(form.bind))
    nothing_of_ours.setattr(registry, "PROVIDERS", (onednn.offers,))
    found = compiled(*net)
    with pytest.warns(
        RuntimeWarning, match=r"onednn.* failed, so aten.* runs in its place: could not create"
    ):
        check(*net, found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(*net, found)


def test_what_stands_behind_a_call_is_let_go_after_its_first_run(net: tuple[Net, Tensor]) -> None:
    found = compiled(*net)
    trace = found.trace
    assert isinstance(trace, Trace)
    plan = trace["plan"]
    assert isinstance(plan, Plan)
    spares = [s.call.spare for g in plan.segments for s in g.steps if isinstance(s, CallStep)]
    assert any(s is not None and s.call is not None for s in spares)
    check(*net, found)
    assert all(s is None or s.call is None for s in spares)


class Halving(nn.Module):
    """A convolution whose results are as many as windows fit, and one after it with a sum behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.pointwise = nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.halves(x))
        return torch.relu(self.pointwise(y) + y)


def test_the_program_knows_sizes_that_its_tensors_do_not_tell() -> None:
    """What stands behind a call is run beside it under `verify`; its operands have counts of windows for sizes."""
    net = Halving().eval()
    with torch.no_grad():
        found = tilewright.compile(
            net, (torch.randn(2, 3, 12, 16),), dims={"x": {2: "rows"}}, freeze=True, options={"verify": True}
        )
        for rows in (12, 15):
            x = torch.randn(2, 3, rows, 16)
            torch.testing.assert_close(found(x), net(x))
    assert "aten.add" in str(found.coverage), "the sum is part of a call"
