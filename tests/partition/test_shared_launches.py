"""Tiny kernels that read nothing in common share a launch; others do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.corpus import Case
from tests.support.cpp_harness import host_target
from tests.support.one_kernel import capture
from torch import Tensor

import tilewright
from tilewright.analysis.size_hints import NO_HINTS
from tilewright.ir.kernel import Kernel
from tilewright.options import Options
from tilewright.partition.cover import partition
from tilewright.schedule.solver import Solver

Shapes = tuple[tuple[int, ...], ...]


def kernels(run: Callable[..., tuple[Tensor, ...]], shapes: Shapes) -> list[int]:
    """Results of each kernel of the cover."""
    graph = capture(Case("strangers", run, shapes), False)
    cover = partition(graph, Solver(host_target(), Options()).price, NO_HINTS)
    return sorted(len(s.outputs) for s in cover.steps if isinstance(s, Kernel))


def three(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return torch.exp(x), y * 2 + 1, torch.tanh(z)


def test_tiny_kernels_share_a_launch() -> None:
    assert kernels(three, ((30, 40),) * 3) == [3]


def test_large_ones_do_not() -> None:
    assert kernels(three, ((1 << 11, 1 << 11),) * 3) == [1, 1, 1]


def test_other_shapes_do_not() -> None:
    assert kernels(three, ((30, 40), (40, 30), (7,))) == [1, 1, 1]


def test_reductions_of_equal_rows_do() -> None:
    assert kernels(lambda x, y: (torch.softmax(x, -1), torch.softmax(y, -1)), ((8, 20),) * 2) == [2]


def test_a_path_through_something_else_forbids_it() -> None:
    """The second kernel needs the sorted result of the first."""
    found = kernels(lambda x, y: (torch.sort(torch.exp(x) * x)[0].tanh() + y,), ((30, 40),) * 2)
    assert len(found) == 2


def test_a_path_through_calls_behind_both_and_another_kernel_forbids_it() -> None:
    """Both that read p may share a kernel, or both that read q: each pair waits for the other."""

    def crossed(p: Tensor, q: Tensor) -> tuple[Tensor, ...]:
        first, second = torch.exp(p), torch.sin(q)
        return torch.sort(first)[0] + q, torch.sort(torch.sort(second)[0], 0)[0].tanh() * p

    assert kernels(crossed, ((30, 40),) * 2) == [1, 1, 2]


@pytest.mark.parametrize("draw", [torch.poisson, lambda p: torch.multinomial(p, 3).float()])
def test_calls_that_draw_numbers_keep_their_order(draw: Callable[[Tensor], Tensor]) -> None:
    """The kernel behind the second call cannot be the one that makes what the first call reads."""

    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        return draw(torch.sigmoid(x)), torch.rand_like(x) * 2 + x

    x = torch.randn(4, 100)
    compiled = tilewright.compile(twice, (x,))
    torch.manual_seed(0)
    got = compiled(x)
    torch.manual_seed(0)
    torch.testing.assert_close(got, twice(x))


@pytest.mark.parametrize("count", [2, 9])
def test_results(count: int) -> None:
    def run(*args: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.sin(a) + k for k, a in enumerate(args))

    inputs = tuple(torch.randn(5, 13) for _ in range(count))
    compiled = tilewright.compile(run, inputs)
    assert len(compiled.kernels) == 1
    for got, want in zip(compiled(*inputs), run(*inputs), strict=True):
        torch.testing.assert_close(got, want)
