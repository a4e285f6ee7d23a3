"""The part of each input that a tile of a result needs: the image of the tile under the access maps.

    index expression f, tile T   =>   [min f(T), max f(T)], cut to the dim that f indexes

Bounds are those of `ir.sizes.dims`, with each axis replaced by its first value in the tile plus an axis as long as the
tile. So they hold for every place of the tile, also under `//` and `%`, and places and sizes may be symbols.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewright.errors import VerifyError
from tilewright.ir.expr import Axis, Expr, axis, show, substitute
from tilewright.ir.graph import Op, Value
from tilewright.ir.sizes import dims


@dataclass(frozen=True, slots=True)
class Span:
    """low <= index < high, along one dim; index expressions over symbols."""

    low: Expr
    high: Expr

    @property
    def size(self) -> Expr:
        """Indices in it."""
        return dims.maximum(dims.ZERO, dims.sub(self.high, self.low))

    @property
    def is_empty(self) -> bool:
        """Whether it has surely none."""
        return dims.at_least(dims.sub(self.low, self.high), 0)

    def join(self, other: Span) -> Span:
        """The shortest one that has what both have."""
        return Span(dims.minimum(self.low, other.low), dims.maximum(self.high, other.high))

    def __str__(self) -> str:
        return f"{show(self.low)}:{show(self.high)}"


Tile = tuple[Span, ...]
"""A box of a value's elements: one span a dim."""


def block(place: Sequence[Expr | int], sizes: Sequence[Expr | int]) -> Tile:
    """The tile of these sizes whose first element is at `place`."""
    starts, lengths = map(_exprs, (place, sizes))
    return tuple(Span(s, dims.add(s, n)) for s, n in zip(starts, lengths, strict=True))


def full_tile(v: Value) -> Tile:
    """All of a value."""
    return tuple(Span(dims.ZERO, n) for n in v.shape)


def elements(tile: Tile) -> Expr:
    """How many elements a tile has."""
    return dims.prod(s.size for s in tile)


def join(one: Tile | None, other: Tile) -> Tile:
    """The smallest box that has what both have (None: nothing). What several readers need is never less than what one
    of them needs."""
    if one is None or any(s.is_empty for s in one):
        return other
    if any(s.is_empty for s in other):
        return one
    return tuple(a.join(b) for a, b in zip(one, other, strict=True))


def propagate(op: Op, tile: Tile) -> dict[Value, Tile]:
    """For each input of `op`, the box of elements that `tile` of its results is computed from; all of a reduced axis,
    and of a running one all up to the tile's end.

    Never too small; larger than needed where reads lie apart (a stride, two pieces), where an index depends on data
    (all of that dim), or where a condition hides a read. A library call needs all of its inputs, whatever the
    tile. Raises VerifyError for a tile that does not have one span a dim."""
    if op.expr is None:
        return {v: full_tile(v) for v in op.inputs}
    shape = op.outputs[0].shape if op.outputs else ()
    if len(tile) != len(shape):
        raise VerifyError(f"a tile of {len(tile)} dims for {op.outputs}", phase="tilegraph", op=op.name)
    expr = op.expr
    moved: dict[Expr, Expr] = {}
    for a, span in zip(expr.axes, tile, strict=True):
        low = dims.ZERO if a == expr.scan else span.low
        moved[axis(a)] = dims.add(low, axis(Axis(a.name, dims.sub(span.high, low))))
    found: dict[Value, Tile] = {}
    for r in expr.reads():
        assert isinstance(r.value, int)
        v = op.inputs[r.value]
        box = tuple(_image(substitute(i, moved), n) for i, n in zip(r.args, v.shape, strict=True))
        found[v] = join(found.get(v), box)
    return found


def _image(index: Expr, extent: Expr) -> Span:
    """Where an index lies, as far as that is inside of its dim: what lies outside is not read."""
    low, high = dims.bounds(index)
    return Span(
        dims.ZERO if low is None else dims.maximum(low, dims.ZERO),
        extent if high is None else dims.minimum(dims.add(high, dims.ONE), extent),
    )


def _exprs(numbers: Iterable[Expr | int]) -> list[Expr]:
    return [n if isinstance(n, Expr) else dims.integer(n) for n in numbers]
