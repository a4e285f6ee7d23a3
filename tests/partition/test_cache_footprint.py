"""Kernels that each find what they read in a cache do not one after the other, where they touch too much together."""

from __future__ import annotations

import pytest

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32
from tilewright.ir.expr import const
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Kernel, Price
from tilewright.ir.ops import pointwise as p
from tilewright.ir.sizes import dims
from tilewright.options import Options
from tilewright.partition.cover import partition
from tilewright.partition.greedy import Afar
from tilewright.schedule.solver import Solver
from tilewright.target import MemoryKind, preset


def iterated(elements: int) -> Graph:
    """A step of z^2 + c for five tensors, three of which are results."""
    b = Builder()
    shape = (dims.integer(elements),)
    re, im, count, at, other = given = tuple(b.value(shape, f32) for _ in range(5))
    new = p.add(b, p.sub(b, p.mul(b, re, re), p.mul(b, im, im)), at)
    made = p.add(b, p.mul(b, p.mul(b, re, im), const(2, f32)), other)
    size = p.add(b, p.mul(b, new, new), p.mul(b, made, made))
    return b.finish(given, (new, made, p.add(b, count, p.tanh(b, size))))


def kernels(graph: Graph, price: Price, afar: Afar | None) -> int:
    return sum(isinstance(s, Kernel) for s in partition(graph, price, NO_HINTS, afar=afar).steps)


@pytest.mark.parametrize("machine", ["x86-64-v4", "sm_90", "gfx942"])
@pytest.mark.parametrize("power", [14, 18, 19, 20, 21, 22, 24])
def test_what_is_only_pointwise_is_one_kernel_at_all_sizes(machine: str, power: int) -> None:
    """Also where the parts fit into the cache and the whole does not."""
    solver = Solver(preset(machine), Options())
    assert kernels(iterated(1 << power), solver.price, solver.afar) == 1


def test_apart_they_only_look_faster() -> None:
    """Without the second price, what fits into the cache is kept apart from what does not."""
    solver = Solver(preset("x86-64-v4"), Options())
    assert kernels(iterated(1 << 20), solver.price, None) > 1


def test_prices_afar_count_memory_alone() -> None:
    """They are those of a machine without a last cache; small kernels are priced as before."""
    target = preset("x86-64-v4")
    solver, bare = Solver(target, Options()), Solver(target.without(MemoryKind.L2), Options())
    assert bare.afar is None
    afar = solver.afar
    assert afar is not None
    for power in (12, 20, 24):
        graph = iterated(1 << power)
        kernel = Kernel(graph.ops, tuple(v for v in graph.outputs if isinstance(v, Value)))
        distant = afar.price(kernel, graph.layouts)
        assert distant == bare.price(kernel, graph.layouts) >= solver.price(kernel, graph.layouts)
        assert (8 * 4 << power >= afar.near_bytes) == (distant == solver.price(kernel, graph.layouts))
