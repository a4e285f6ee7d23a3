"""Sizes that must not be 0: of dims into which ops index by data. A kernel moves an index inside before it reads, and
tells later that it was outside; into no elements there is no inside."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.analysis.runtime_checks import from_data
from tilewright.ir.expr import Expr, walk
from tilewright.ir.graph import INDEX, Graph, Op, Precondition
from tilewright.ir.sizes import dims


def needed_sizes(graph: Graph) -> Iterator[Precondition]:
    """The sizes that a graph's ops need besides those that it names."""
    for op in graph.ops:
        for size in _indexed(op):
            origin = graph.origins[op.origin] if 0 <= op.origin < len(graph.origins) else None
            name, place = (op.name, "") if origin is None else (origin.name, origin.place)
            yield Precondition(size, name, place, _points(op), INDEX)


def _indexed(op: Op) -> tuple[Expr, ...]:
    """The dims, not known to have elements, of which an op reads the element that data names."""
    if op.expr is None:
        return ()
    sizes = (
        size
        for x in (x for body in op.expr.body for x in walk(body))
        if x.op == "read" and isinstance(x.value, int)
        for i, size in zip(x.args, op.inputs[x.value].shape, strict=True)
        if not dims.at_least(size, 1) and from_data(i)
    )
    return tuple(dict.fromkeys(sizes))


def _points(op: Op) -> Expr:
    """How many points an op computes: at none it reads nothing."""
    assert op.expr is not None
    return dims.mul(*(a.extent for a in (*op.expr.axes, *op.expr.reduce)))
