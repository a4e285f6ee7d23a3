"""Sizes and numbers that a call reads from data: whoever uses them runs behind that call."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.partition.graphs import called
from torch import Tensor

import tilewright
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32, i64
from tilewright.ir.expr import integer, symbol
from tilewright.ir.graph import LibraryCall, Operand
from tilewright.ir.ops.common import access


@pytest.fixture(autouse=True)
def captured() -> Iterator[None]:
    """Numbers and sizes from data stay inside of graphs."""
    tilewright.reset()
    torch.manual_seed(0)
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def number_of_what_shares_a_kernel(x: Tensor, i: Tensor) -> object:
    """`y` and `x * k` would share a kernel, but k comes from `y`: the kernel took it as 0."""
    y = x * 2
    k = (y.sum() + i).int().item()
    return y, x * k, (y + k).sum()


def size_and_number(x: Tensor, i: Tensor) -> object:
    """The mask and `x * k` share a kernel behind the call for k; checks of the size of z stay behind z."""
    z = x[x > 0]
    k = i.item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    return z * 2, x * k


def size_as_a_number(x: Tensor, i: Tensor) -> object:
    """The number of elements of z as a factor."""
    z = x[x > 0]
    return x * 2 + i, x * z.numel(), z


@pytest.mark.parametrize("program", [number_of_what_shares_a_kernel, size_and_number, size_as_a_number])
def test_what_reads_a_number_runs_behind_its_call(program: Callable[[Tensor, Tensor], object]) -> None:
    fast = torch.compile(program, backend="tilewright", fullgraph=True)
    for x, i in ((torch.randn(7), 3), (-torch.rand(5), 0), (torch.ones(4), 1)):
        torch.testing.assert_close(fast(x, torch.tensor(i)), program(x, torch.tensor(i)))
    assert tilewright.stats().fallbacks == 0


def test_a_call_tells_no_size_that_it_gets() -> None:
    """In a part of a graph, whose inputs do not tell all sizes: a call that gives a size on has it from elsewhere."""
    b, n = Builder(), symbol("s4")
    x = b.value((), f32)
    wide = access(b, "full", x, (n, n), lambda _: ())
    kept = called(b, wide)
    assert not b.finish((x,), (kept,)).found_by_calls()
    u = symbol("u0")
    found = LibraryCall("nonzero", abs, (Operand(0),), (), ((integer(1), integer(1)),))
    (places,) = b.library(found, (kept,), [((u, integer(2)), i64)])
    assert list(b.finish((x,), (places,)).found_by_calls()) == ["u0"]
