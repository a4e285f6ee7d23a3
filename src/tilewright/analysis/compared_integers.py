"""Inputs that are integers and only tell which places count, as how far a cache is filled: what they hold decides how
long a loop is, and no clock may take zeros for them."""

from __future__ import annotations

import math

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.dtype import Kind
from tilewright.ir.expr import Axis, Expr, axes_of, walk
from tilewright.ir.graph import Graph, Value

_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})


def middle_places(graph: Graph, hints: SizeHints) -> dict[Value, int]:
    """For each such input of a graph the place in the middle of what it is compared with: of n places, n // 2."""
    return {
        v: n // 2
        for v in graph.inputs
        if isinstance(v, Value) and v.dtype.kind in (Kind.INT, Kind.UINT)
        if (n := _compared_extent(graph, v, hints)) is not None
    }


def _compared_extent(graph: Graph, given: Value, hints: SizeHints) -> int | None:
    """How many places an input is compared with at most; None if it is compared nowhere, or is an index too."""
    derived, longest = {given}, 0
    for op in graph.ops:
        read = {n for n, v in enumerate(op.inputs) if v in derived}
        if not read:
            continue
        if op.expr is None or any(_is_index(e, read) for e in op.expr.body):
            return None
        found = [_places(e, read, hints) for e in op.expr.body]
        longest = max(longest, *found)
        if not any(found):
            derived.update(v for v in op.outputs if v.dtype.kind in (Kind.INT, Kind.UINT))
    return longest or None


def _places(e: Expr, numbers: set[int], hints: SizeHints) -> int:
    """How many places those operands are compared with that have these numbers; 0 if with none."""
    sides = [
        other
        for x in walk(e)
        if x.op in _COMPARISONS and any(_reads(a, numbers) for a in x.args)
        for other in x.args
        if not _reads(other, numbers)
    ]
    axes = [[a.value for a in axes_of(side) if isinstance(a.value, Axis)] for side in sides]
    return max((math.prod(hints.estimate(a.extent) for a in found) for found in axes if found), default=0)


def _reads(e: Expr, numbers: set[int]) -> bool:
    return any(x.op == "read" and x.value in numbers for x in walk(e))


def _is_index(e: Expr, numbers: set[int]) -> bool:
    return any(x.op == "read" and any(_reads(a, numbers) for a in x.args) for x in walk(e))
