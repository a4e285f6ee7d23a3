"""Rows of columns in parts, these in chunks of rows that a thread holds at once.

Row (p * M + m) * ROW_CHUNKS.rows + k is element k of chunk m of part p, of which each has M chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.ir.dtype import DType
from tilewright.ir.expr import Axis, Expr, axis, call, cast, const, where
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import ROW_CHUNKS


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in `parts` (one axis, or none), these in chunks, these in elements. What a chunk of known rows lacks is
    None: all its rows are there."""

    whole: Axis
    parts: tuple[Axis, ...]
    chunk: Axis

    @classmethod
    def of(cls, whole: Axis, count: int) -> Rows:
        """`count` parts, each of whole steps of chunks unless they come out even."""
        extent = whole.extent
        known = dims.divisible(extent, count * ROW_CHUNKS.rows * ROW_CHUNKS.even_multiple)
        even = dims.ONE if known else dims.integer(ROW_CHUNKS.odd_multiple)
        step = dims.mul(dims.integer(count * ROW_CHUNKS.rows), even)
        chunks = dims.mul(dims.ceildiv(extent, step), even)
        parts = (Axis("p", dims.integer(count)),) if count > 1 else ()
        return cls(whole, parts, Axis("m", chunks))

    @property
    def extent(self) -> Expr:
        """All rows."""
        return self.whole.extent

    @property
    def number(self) -> Expr:
        """Of the chunk, among those of all parts."""
        before = [dims.mul(axis(p), self.chunk.extent) for p in self.parts]
        return dims.add(*before, axis(self.chunk))

    def place(self, element: int) -> Expr:
        """The row that is an element of the chunk."""
        return dims.add(dims.mul(self.number, dims.integer(ROW_CHUNKS.rows)), dims.integer(element))

    @property
    def full(self) -> Expr | None:
        """Whether all rows of a chunk are there."""
        count = dims.prod(a.extent for a in (*self.parts, self.chunk))
        if dims.equal(dims.mul(count, dims.integer(ROW_CHUNKS.rows)), self.extent):
            return None
        return call("lt", self.number, dims.floordiv(self.extent, dims.integer(ROW_CHUNKS.rows)))

    @property
    def some(self) -> Expr | None:
        """Whether a row of the chunk may be there."""
        if self.full is None:
            return None
        chunks = dims.add(dims.floordiv(self.extent, dims.integer(ROW_CHUNKS.rows)), dims.ONE)
        return call("lt", self.number, chunks)

    def inside(self, element: int) -> Expr | None:
        """Whether a row of the chunk is there."""
        return (
            None if self.full is None else call("or", self.full, call("lt", self.place(element), self.extent))
        )

    @property
    def held(self) -> Expr:
        """Rows of a chunk."""
        if self.full is None:
            return dims.integer(ROW_CHUNKS.rows)
        left = dims.sub(self.extent, dims.mul(self.number, dims.integer(ROW_CHUNKS.rows)))
        return dims.maximum(dims.minimum(dims.integer(ROW_CHUNKS.rows), left), dims.ZERO)

    def weight(self, dtype: DType) -> Expr:
        """The same as a float, which is one number for all full chunks."""
        held = cast(self.held, dtype)
        return held if self.full is None else where(self.full, const(ROW_CHUNKS.rows, dtype), held)

    @property
    def of_part(self) -> Expr:
        """Rows of a part."""
        length = dims.mul(self.chunk.extent, dims.integer(ROW_CHUNKS.rows))
        start = dims.mul(axis(self.parts[0]), length)
        if self.full is None:
            return length
        return dims.maximum(dims.minimum(length, dims.sub(self.extent, start)), dims.ZERO)


def chunk_moments(elements: Sequence[Expr], start: Expr, rows: Rows, halves: bool) -> tuple[Expr, ...]:
    """A chunk of `elements` as one element of `merge_laws.moments_of_chunks`. The sum of a few halves is exact; else
    each element counts from `start`. The mean does so either way: of equal elements it is one of them, and the squares
    are 0."""
    dtype = start.dtype
    one, zero, weight = const(1, dtype), const(0, dtype), rows.weight(dtype)
    inside = [rows.inside(k) for k in range(len(elements))]
    xs = [x if i is None else where(i, x, zero) for i, x in zip(inside, elements, strict=True)]

    def distances(values: Sequence[Expr], place: Expr) -> list[Expr]:
        """From what is the same for all; 0 for one that is none, without reading it under another mask."""
        places = [place if i is None else call("mul", place, where(i, one, zero)) for i in inside]
        return [call("sub", x, p) for x, p in zip(values, places, strict=True)]

    total, share = _total(xs), call("div", one, call("maximum", weight, one))
    if halves:
        moved = call("sub", total, call("mul", weight, start))
        from_mean = distances(xs, call("add", start, call("mul", moved, share)))
    else:
        near = distances(xs, start)
        moved = _total(near)
        from_mean = distances(near, call("mul", moved, share))
    squares = _total([call("mul", d, d) for d in from_mean])
    found = (weight, moved, squares, total)
    return found if rows.some is None else tuple(where(rows.some, e, zero) for e in found)


def _total(values: Sequence[Expr]) -> Expr:
    """The sum of a power of two of values, as a tree."""
    found = list(values)
    while len(found) > 1:
        found = [call("add", x, y) for x, y in zip(found[::2], found[1::2], strict=True)]
    return found[0]
