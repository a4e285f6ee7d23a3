"""Block lists: for each block of rows, the tiles that a mask of data leaves something of, listed by kernels before.

    visible(i, j) of a mask, in tiles of R rows and C columns
 => seen[a, b]  = the number of places of tile (a, b) that are visible (twice that: see below)
    rank[a, b]  = the number of tiles of row a that stand before b: tiles visible whole, then those in part, then
                  hidden ones, each in order
    tiles[a, e] = the tile of rank e;   whole[a], some[a] = how many tiles are visible whole, or at all
    s[i, j] = (x[i, j] where visible(i, j), else c)
            = ((x[i, j] where visible(i, j), else c) where implied(visible(i, j)), else c)      with the list beside it

It changes no result; a loop over the columns of row block a then runs over `tiles[a, e]` for e < some[a], and tests no
mask for e < whole[a] (see `lower.tile_lists`), whatever holes there are: FlexAttention's block mask, found by the
kernels of each call. It costs four bytes per tile, twice (ranks are of no use afterwards), and four more for `seen`.

Where columns are folded, a row that sees nothing shows in every column as NaN, so it may not be left out of any. Then
`sees[i]` says of each row whether it sees anything, and a tile with a row that does not is listed: a place that is
visible counts 2, one of such a row counts 1.

Places of a mask that reads blocks (flags[i // 64, j // 64]) are the same throughout a block: one of each is looked at.
Rows and columns beyond the end count as the last one, but no tile that reaches beyond is whole in its columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tilewright.ir.dtype import bool_, i32
from tilewright.ir.expr import (
    Axis,
    Expr,
    axes_of,
    axis,
    call,
    cast,
    const,
    implied,
    read,
    substitute,
    walk,
    where,
)
from tilewright.ir.graph import Op, Value
from tilewright.ir.reduction import any_, sum_
from tilewright.ir.schedule import Role, Schedule
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes
from tilewright.tuning.thresholds import MASKS

from .find import Mask

MakeReduction = Callable[[str, tuple[Value, ...], TensorExpr], Op]
"""Makes an op of a reduction, with a name."""


@dataclass(frozen=True, slots=True)
class MaskTiles:
    """Tiles of `rows` values of dim `row` of a mask (None: all rows see the same) and `columns` values of the dim that
    is folded."""

    columns: int
    row: int | None = None
    rows: int = 1


@dataclass(frozen=True, slots=True)
class BlockList:
    """The ops that make a list, one kernel each tuple, and what they leave to the kernel that has the mask: the tiles,
    how many are visible whole and how many at all, and, if asked for, which rows see anything."""

    kernels: tuple[tuple[Op, ...], ...]
    tiles: Value
    whole: Value
    some: Value
    sees: Value | None

    @property
    def bytes(self) -> Expr:
        """Bytes of all that is made."""
        made = (v for ops in self.kernels for op in ops for v in op.outputs)
        return dims.add(*(dims.mul(v.numel, dims.integer(v.dtype.bytes)) for v in made))


def cuts(m: Mask, schedule: Schedule) -> Iterator[MaskTiles]:
    """The tiles that a kernel with the mask has under a schedule; several if it does not show which class is which."""
    shape = m.op.output.shape
    streamed = [
        p
        for p in schedule.tiling.classes
        if p.role is Role.STREAMED and p.tile > 1 and p.axis.extent is shape[m.along]
    ]
    parallel = [p for p in schedule.tiling.classes if p.role is Role.GRID and p.tile > 1]
    for s in streamed:
        tiles = dims.static(dims.ceildiv(s.axis.extent, dims.integer(s.tile)))
        if tiles is not None and tiles < MASKS.min_listed_tiles:
            continue
        rows = [
            MaskTiles(s.tile, d, p.tile) for p in parallel for d in m.kept[::-1] if shape[d] is p.axis.extent
        ]
        yield from rows or [MaskTiles(s.tile)]


def block_list(m: Mask, cut: MaskTiles, make: MakeReduction, with_rows: bool) -> BlockList | None:
    """The ops that list the tiles of `cut`; `with_rows`: so that rows that see nothing are in each list, None if that
    cannot be."""
    if with_rows and cut.row is None:
        return None
    made = _Lists(m, cut, make)
    sees = made.sees() if with_rows else None
    seen = made.seen(sees)
    rank = made.rank(seen)
    tiles, full, some = made.tiles(rank), made.count("whole", seen), made.count("some", seen)
    groups = [(seen,), (rank,), (tiles,), (full, some)]
    kernels = tuple(groups) if sees is None else ((sees,), *groups)
    return BlockList(kernels, tiles.output, full.output, some.output, None if sees is None else sees.output)


def with_list(m: Mask, cut: MaskTiles, made: BlockList) -> Op:
    """The masked op, which knows its list."""
    expr = m.op.expr
    assert expr is not None
    table = {axis(a): axis(b) for a, b in zip(output_axes(m.op.output.shape), expr.axes, strict=True)}
    own = len(m.op.inputs)
    reads = [(x, n) for x in walk(m.visible) if x.op == "read" and isinstance(n := x.value, int)]
    moved = {x: read(own + n, x.args, x.dtype) for x, n in reads}
    count = len(m.op.inputs) + len(m.inputs)
    at = [dims.floordiv(axis(expr.axes[d]), dims.integer(cut.rows if d == cut.row else 1)) for d in m.kept]
    column = dims.floordiv(axis(expr.axes[m.along]), dims.integer(cut.columns))
    facts = [read(count, (*at, column), i32), read(count + 1, at, i32), read(count + 2, at, i32)]
    inputs = [made.tiles, made.whole, made.some]
    if made.sees is not None:
        own = [axis(expr.axes[d]) for d in m.kept if d != cut.row]
        facts.append(read(count + 3, (*own, axis(expr.axes[m.along])), bool_))
        inputs.append(made.sees)
    hint = implied(substitute(substitute(m.visible, moved), table), *facts)
    body = where(hint, expr.body[0], m.constant)
    return replace(m.op, inputs=(*m.op.inputs, *m.inputs, *inputs), expr=replace(expr, body=(body,)))


class _Lists:
    """Makes the ops. Dims of what they make: those that the mask depends on, blocks of rows in the place of rows, and
    last that of tiles."""

    def __init__(self, m: Mask, cut: MaskTiles, make: MakeReduction) -> None:
        self.mask, self.cut, self.make = m, cut, make
        self.shape = m.op.output.shape
        self.own = output_axes(self.shape)
        self.length = self.shape[m.along]
        self.count_of_tiles = dims.ceildiv(self.length, dims.integer(cut.columns))
        sides = {d: cut.rows if d == cut.row else 1 for d in m.kept}
        self.outer = output_axes(
            tuple(dims.ceildiv(self.shape[d], dims.integer(n)) for d, n in sides.items())
        )
        self.places = tuple(map(axis, self.outer))
        self.steps = {d: math.gcd(_grain(m.visible, axis(self.own[d])), size) for d, size in self.tiled()}

    def tiled(self) -> list[tuple[int, int]]:
        """Dims that are cut, with the tile's side."""
        found = [(self.mask.along, self.cut.columns)]
        return found if self.cut.row is None else [*found, (self.cut.row, self.cut.rows)]

    @property
    def full(self) -> int:
        """What `seen` is of a tile that is visible whole."""
        return 2 * math.prod(size // self.steps[d] for d, size in self.tiled())

    def sees(self) -> Op:
        """Whether each row (value of the folded dim) sees anything along the dim of the rows of tiles."""
        assert self.cut.row is not None
        kept = [d for d in self.mask.kept if d != self.cut.row] + [self.mask.along]
        axes = output_axes(tuple(self.shape[d] for d in kept))
        r = Axis("r0", self.shape[self.cut.row])
        table = {axis(self.own[d]): axis(a) for d, a in zip(kept, axes, strict=True)}
        visible = substitute(self.mask.visible, table | {axis(self.own[self.cut.row]): axis(r)})
        return self.make("sees", self.mask.inputs, TensorExpr(axes, (visible,), (r,), any_()))

    def seen(self, sees: Op | None) -> Op:
        """How much of each tile is visible."""
        tile = Axis(f"i{len(self.outer)}", self.count_of_tiles)
        outer = {d: axis(a) for d, a in zip(self.mask.kept, self.outer, strict=True)} | {
            self.mask.along: axis(tile)
        }
        place = {d: outer[d] for d in outer}
        reduce: list[Axis] = []
        for d, size in self.tiled():
            r = Axis(f"r{len(reduce)}", dims.integer(size // self.steps[d]))
            reduce.append(r)
            inner = dims.mul(axis(r), dims.integer(self.steps[d]))
            at = dims.add(dims.mul(outer[d], dims.integer(size)), inner)
            last = dims.sub(self.shape[d], dims.ONE)
            place[d] = at if dims.divisible(self.shape[d], size) else dims.minimum(at, last)
        visible = substitute(self.mask.visible, {axis(self.own[d]): e for d, e in place.items()})
        otherwise, inputs = const(0, i32), self.mask.inputs
        if sees is not None:
            at = [place[d] for d in self.mask.kept if d != self.cut.row]
            sighted = read(len(inputs), (*at, place[self.mask.along]), bool_)
            otherwise, inputs = where(sighted, otherwise, const(1, i32)), (*inputs, sees.output)
        body = where(visible, const(2, i32), otherwise)
        return self.make("seen", inputs, TensorExpr((*self.outer, tile), (body,), tuple(reduce), sum_(i32)))

    def is_fully_visible(self, seen: Expr, tile: Axis) -> Expr:
        """Whether a tile of which so much is seen is visible whole."""
        full = call("eq", seen, const(self.full, i32))
        if dims.divisible(self.length, self.cut.columns):
            return full
        end = dims.mul(dims.add(axis(tile), dims.ONE), dims.integer(self.cut.columns))
        return call("and", full, call("le", end, self.length))

    def rank(self, seen: Op) -> Op:
        """Where each tile stands."""
        tile, other = Axis(f"i{len(self.outer)}", self.count_of_tiles), Axis("r0", self.count_of_tiles)

        def order(a: Axis) -> Expr:
            much = read(0, (*self.places, axis(a)), i32)
            hidden = where(call("eq", much, const(0, i32)), const(2, i32), const(1, i32))
            return where(self.is_fully_visible(much, a), const(0, i32), hidden)

        mine, others = order(tile), order(other)
        tied = call("and", call("eq", others, mine), call("lt", axis(other), axis(tile)))
        before = call("or", call("lt", others, mine), tied)
        body = where(before, const(1, i32), const(0, i32))
        return self.make("rank", seen.outputs, TensorExpr((*self.outer, tile), (body,), (other,), sum_(i32)))

    def tiles(self, rank: Op) -> Op:
        """The tile of each rank."""
        place, tile = Axis(f"i{len(self.outer)}", self.count_of_tiles), Axis("r0", self.count_of_tiles)
        here = call("eq", read(0, (*self.places, axis(tile)), i32), cast(axis(place), i32))
        body = where(here, cast(axis(tile), i32), const(0, i32))
        return self.make("tiles", rank.outputs, TensorExpr((*self.outer, place), (body,), (tile,), sum_(i32)))

    def count(self, name: str, seen: Op) -> Op:
        """How many tiles of each row of blocks are visible whole, or at all."""
        tile = Axis("r0", self.count_of_tiles)
        much = read(0, (*self.places, axis(tile)), i32)
        counts = self.is_fully_visible(much, tile) if name == "whole" else call("ne", much, const(0, i32))
        body = where(counts, const(1, i32), const(0, i32))
        return self.make(name, seen.outputs, TensorExpr(self.outer, (body,), (tile,), sum_(i32)))


def _grain(condition: Expr, a: Expr) -> int:
    """How many neighbours along an axis a condition cannot tell apart: blocks of so many, from the first one on."""
    found = 0
    todo, seen = [condition], set[Expr]()
    while todo:
        x = todo.pop()
        if x in seen:
            continue
        seen.add(x)
        if x is a:
            return 1
        size = dims.static(x.args[1]) if x.op == "floordiv" and x.args[0] is a else None
        if size is not None:
            found = math.gcd(found, size)
        elif a in axes_of(x):
            todo += x.args
    return found or 1
