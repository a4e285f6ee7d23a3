"""Folds of elements that are the same along a class: one rounding, and no loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.normal_graph import Function
from torch import Tensor

import tilewright
from tilewright.capture.fx import from_fx
from tilewright.capture.trace import trace
from tilewright.form.compose import compose
from tilewright.form.repeated_elements import fold_repeated
from tilewright.ir.dtype import f32, i64
from tilewright.ir.expr import Axis, Symbol, axis, call, cast, make
from tilewright.ir.form import Item
from tilewright.ir.kernel import Kernel
from tilewright.ir.reduction import sum_
from tilewright.ir.sizes import dims
from tilewright.rewrite.normal.normalise import normalise


def fold_of(f: Callable[..., Tensor], *given: Tensor) -> Item:
    """The one fold of a program."""
    graph = normalise(from_fx(trace(Function(f), given, [()] * len(given)).gm))
    form = compose(Kernel(graph.ops, tuple(v for op in graph.ops[-1:] for v in op.outputs)), graph.layouts)
    (fold,) = form.folds.values()
    return fold


@pytest.mark.parametrize(
    ("f", "walked"),
    [
        (lambda x: x.sum((0, 1)), 1),
        (lambda x: x.cos().sum(0), 0),
        (lambda x: x.sum(1), 1),
        (lambda x: x.amax(0), 0),
        (lambda x: (x > 0).all(0), 0),
        (lambda x: (x * torch.arange(64.0)[:, None]).sum(0), 1),
        (lambda x: x.argmax(0), 1),
        (lambda x: x.prod(0), 1),
        (lambda x: x.cumsum(0), 1),
    ],
    ids=["both", "sum", "other", "maximum", "all", "counted", "place", "product", "running"],
)
def test_no_class_is_walked_along_which_nothing_changes(f: Callable[..., Tensor], walked: int) -> None:
    """A row 64 times; what hangs on the place, or on how many there are in another way, stays."""
    fold = fold_of(lambda x: f(x.expand(64, 9)), torch.randn(9))
    assert len(fold.reduce) + (fold.scan is not None) == walked


def test_a_class_that_may_be_empty_is_walked() -> None:
    """The sum of no infinity is 0; 0 times infinity is none."""
    x = make("read", (dims.ZERO,), f32, 0)
    maybe, sure = (Axis(n, make("symbol", (), i64, Symbol(n, low))) for n, low in (("a", 0), ("b", 1)))
    assert fold_repeated((x,), (maybe,), sum_(f32)) == ((x,), (maybe,))
    body, over = fold_repeated((x,), (maybe, sure), sum_(f32))
    assert over == (maybe,) and body == (call("mul", x, cast(sure.extent, f32)),)
    used = call("mul", x, cast(axis(sure), f32))
    assert fold_repeated((used,), (sure,), sum_(f32)) == ((used,), (sure,))


def test_sums_of_one_number_round_once() -> None:
    """In a chain, roundings of equal sums do not cancel: 64 numbers of 56 in all erred by 9e-6."""
    f = lambda x, y: torch.trapezoid(torch.frac(x), dim=-1) - y  # noqa: E731
    made = tilewright.compile(f, (torch.randn(1).expand(65), torch.zeros(3)))
    for _ in range(20):
        x = torch.randn(1)
        want = (torch.frac(x) * 64).expand(3)
        assert torch.equal(made(x.expand(65), torch.zeros(3)), want)


def test_sizes_that_are_free_are_counted_as_they_are() -> None:
    x = torch.rand(1, 7)
    made = tilewright.compile(lambda x, y: x.expand(y.shape[0], 7).sum(0) + y[0], (x, torch.zeros(5, 7)),
                              dims={"y": {0: "n"}})  # fmt: skip
    for n in (5, 3, 64):
        assert torch.equal(made(x, torch.zeros(n, 7)), (x * n)[0])
