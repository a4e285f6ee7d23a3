"""Inputs that are integers and only tell which places count, as how far a cache is filled: what they hold decides how
long a loop is, and no clock may take zeros for them."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.dtype import DType, Kind
from tilewright.ir.expr import Axis, Expr, axes_of, walk
from tilewright.ir.graph import Graph, Value
from tilewright.ir.sizes import dims

_INTEGERS = (Kind.INT, Kind.UINT)
_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})


def middle_places(graph: Graph, hints: SizeHints) -> dict[Value, int]:
    """For each such input of a graph the place in the middle of what it is compared with: of n places, n // 2, or the
    last place that its type can tell."""
    return {
        v: min(n // 2, _largest(v.dtype))
        for v in graph.inputs
        if isinstance(v, Value) and v.dtype.kind in _INTEGERS
        if (n := _compared_extent(graph, v, hints)) is not None
    }


def _largest(dtype: DType) -> int:
    return (1 << (8 * dtype.bytes - (dtype.kind is Kind.INT))) - 1


def _compared_extent(graph: Graph, given: Value, hints: SizeHints) -> int | None:
    """How many places an input is compared with at most; None if it is compared nowhere, or anything made of it is an
    index: of zeros all are, of other numbers not."""
    numbers, derived, longest = {given}, {given}, 0
    for op in graph.ops:
        read = [v for v in op.inputs if v in derived]
        if not read:
            continue
        derived.update(op.outputs)
        if op.expr is None:
            if any(v.dtype.kind in _INTEGERS for v in read):
                return None
            continue
        every, own = ({n for n, v in enumerate(op.inputs) if v in found} for found in (derived, numbers))
        if any(_is_index(e, every) for e in op.expr.body):
            return None
        found = [_places(e, own, hints) for e in op.expr.body]
        longest = max(longest, *found)
        if own and not any(found):
            numbers.update(v for v in op.outputs if v.dtype.kind in _INTEGERS)
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
    places = [place for side in sides for place in _counted(side)]
    return max((_extent(place, hints) for place in places), default=0)


def _counted(side: Expr) -> Iterator[Expr]:
    """What counts up in one side of a comparison: of numbers that are read, the places where they lie."""
    read = [place for x in walk(side) if x.op == "read" for place in x.args]
    for place in read or [side]:
        if any(isinstance(a.value, Axis) for a in axes_of(place)):
            yield place


def _extent(place: Expr, hints: SizeHints) -> int:
    """One more than the largest that a place may be; where no bound is known, the length of its longest axis."""
    _, last = dims.bounds(place)
    if last is not None:
        return hints.estimate(last) + 1
    return max(hints.estimate(a.value.extent) for a in axes_of(place) if isinstance(a.value, Axis))


def _reads(e: Expr, numbers: set[int]) -> bool:
    return any(x.op == "read" and x.value in numbers for x in walk(e))


def _is_index(e: Expr, numbers: set[int]) -> bool:
    return any(x.op == "read" and any(_reads(a, numbers) for a in x.args) for x in walk(e))
