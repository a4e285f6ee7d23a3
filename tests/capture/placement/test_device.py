"""The device of a captured graph, on tensors that are only described."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.capture.fx import from_fx
from tilewright.capture.placement.device import graph_device, host_inputs
from tilewright.errors import UnsupportedError


def traced(function: Callable[..., object], *inputs: tuple[tuple[int, ...], str]) -> fx.GraphModule:
    """The graph of a function of tensors with these shapes and devices."""
    with FakeTensorMode():
        given = [torch.empty(shape, device=device) for shape, device in inputs]
    gm = make_fx(function, tracing_mode="fake")(*given)
    return gm


def test_one_device() -> None:
    assert graph_device(traced(lambda x: x + 1, ((3,), "cpu"))) == "cpu"
    assert graph_device(traced(lambda x: x + 1, ((3,), "cuda"))) == "cuda:0"
    assert graph_device(traced(lambda x, y: x + y, ((3,), "cuda:1"), ((), "cuda:1"))) == "cuda:1"


def test_numbers_of_the_cpu_are_operands() -> None:
    gm = traced(lambda s, x: x * s + 1, ((), "cpu"), ((3,), "cuda"))
    assert graph_device(gm) == "cuda:0" and host_inputs(gm) == (0,)
    assert len(from_fx(gm).inputs) == 2
    made = traced(lambda x: x * torch.full((), 2.0), ((3,), "cuda"))
    assert graph_device(made) == "cuda:0" and host_inputs(made) == ()


@pytest.mark.parametrize(
    ("function", "devices"),
    [
        (lambda x, s: (x * s, s + 1), ("cuda", "cpu")),
        (lambda x, s: x.to("cpu"), ("cuda", "cpu")),
        (lambda x, s: x + s.expand(3).sum(), ("cuda", "cpu")),
        (lambda x, s: s.copy_(x.sum()), ("cuda", "cpu")),
        (lambda x, s: x.sum() + s.to("cuda:0"), ("cuda:0", "cuda:1")),
        (lambda x, s: x + s, ("meta", "meta")),
    ],
    ids=["result", "moved", "dims", "written", "two", "meta"],
)
def test_other_mixtures_are_refused(function: Callable[..., object], devices: tuple[str, str]) -> None:
    gm = traced(function, ((3,), devices[0]), ((), devices[1]))
    with pytest.raises(UnsupportedError, match="cpu|cuda|meta"):
        graph_device(gm)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_of_a_gpu_has_results_that_are_no_tensors(dropout: float) -> None:
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    gm = traced(lambda q: attend(q, q, q, dropout)[0], ((2, 4, 64, 32), "cuda"))
    gm.graph.eliminate_dead_code()
    (origin,) = (o for o in from_fx(gm).origins if not o.view)
    assert origin.call is not None and origin.call.reason == ("random" if dropout else "attention")


def test_a_call_with_a_result_elsewhere_is_refused() -> None:
    gm = traced(lambda x: x * torch.rand(()), ((3,), "cuda"))
    with pytest.raises(UnsupportedError, match="a result on cpu in a graph on cuda:0"):
        from_fx(gm)


def test_graphs_of_the_cpu_may_hold_anything_of_it() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(), x + torch.ones(3)

    assert graph_device(traced(function, ((3,), "cpu"))) == "cpu"
