"""Kernels that differ only in where on their inputs they begin are solved once for their price."""

from __future__ import annotations

import pytest
from tests.support.cpp_harness import host_target

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32
from tilewright.ir.expr import const
from tilewright.ir.graph import Graph
from tilewright.ir.kernel import Kernel
from tilewright.ir.ops import pointwise as p
from tilewright.ir.ops.reduce import sum_
from tilewright.ir.ops.view import narrow_dim, select, stack
from tilewright.ir.sizes import dims
from tilewright.options import Options
from tilewright.partition.cover import partition
from tilewright.partition.kernel_ops import GraphParts
from tilewright.schedule import solver
from tilewright.schedule.equal_kernels import at_first_step
from tilewright.schedule.solver import Solver, kernel_key
from tilewright.tuning.thresholds import GPU_BLOCKS


def scan(steps: int) -> Graph:
    """A state that is multiplied and added to at each step, and a sum of each state."""
    b = Builder()
    x = b.value([dims.integer(n) for n in (8, steps, 64, 16)], f32)
    h, sums = select(b, x, 1, dims.ZERO), []
    for t in range(1, steps):
        h = p.add(b, p.mul(b, h, select(b, x, 1, dims.integer(t))), h)
        sums.append(sum_(b, h, (2,)))
    return b.finish((x,), (stack(b, sums, 1),))


def formed(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many forms of kernels a partition makes."""
    count, real = 0, solver.make_form

    def make_form(*args: object, **more: object) -> object:
        nonlocal count
        count += 1
        return real(*args, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(solver, "make_form", make_form)
        partition(graph, Solver(host_target(), Options()).price, NO_HINTS)
    return count


def test_steps_that_are_written_out_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (formed(scan(steps), monkeypatch) for steps in (24, 48))
    assert many < 1.4 * few


def rows(first: int, width: int) -> Kernel:
    """A kernel that reads some rows of a matrix, from the row `first` on."""
    b = Builder()
    x = b.value([dims.integer(n) for n in (100, width)], f32)
    part = narrow_dim(b, x, 0, dims.integer(first), dims.integer(4))
    parts = GraphParts(b.finish((x,), (p.mul(b, part, const(2, f32)),)), NO_HINTS)
    return parts.kernel(parts.position[op] for op in parts.generated())


@pytest.mark.parametrize(("width", "step"), [(64, 1), (16, 4), (20, 16), (7, 64)])
def test_kernels_begin_elsewhere_only_by_whole_lines_and_not_at_the_front(width: int, step: int) -> None:
    keys = {
        n: kernel_key(at_first_step(rows(n, width), {}, GPU_BLOCKS.begin_multiple), {}) for n in range(90)
    }
    assert len(set(keys.values())) == min(2 * step, 90)
    assert all(keys[n] == keys[n % step + step] for n in range(step, 90))
    assert all(kernel_key(rows(n, width), {}) == keys[n] for n in range(min(2 * step, 90)))
