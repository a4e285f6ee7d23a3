"""How the elements of an access lie side by side, where quotients and rests of a class hide it.

Triton's compiler sees how long the runs of an affine offset are, and of simple quotients; of sums of those it knows
too little, or too much (`emit/triton/expr.Term.mixed`). Here a block axis is written as g times one axis and another
one below g: if the offset is the latter and something that does not depend on it, g elements lie side by side.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tilewright.ir.dtype import i64
from tilewright.ir.expr import Axis, Expr, axes_of, axis, substitute, walk
from tilewright.ir.selection import ElementRun, InterleavedStore, SharedElement
from tilewright.ir.sizes import dims

_PLAIN = frozenset(
    {"axis", "symbol", "const", "add", "sub", "mul", "neg", "floordiv", "mod", "maximum", "minimum"}
)
"""What places are made of that no data decide."""


def side_by_side(offset: Expr, axes: Sequence[Axis], tile: int) -> int:
    """Elements that one access may take of blocks of `tile` values of each axis, as many as lie side by side, begin at
    a multiple of so many, and are a power of two; sizes that are not known may be multiples of any."""
    if not _is_plain(offset):
        return 1
    sizes = {s: dims.mul(s, dims.integer(tile)) for s in dims.symbols_of(offset)}
    found = [_run(substitute(offset, sizes), a, tile) for a in axes]
    return max(min(r.length, r.multiple) for r in found)


@dataclass(frozen=True, slots=True)
class Words:
    """What an access of blocks of `tile` values of some axes loads: the offset of each word, of which `counts`
    neighbours along an axis are one."""

    offset: Expr
    counts: Mapping[Axis, int]
    tile: int

    @property
    def is_whole(self) -> bool:
        """Whether it has words along all axes, as a matrix has; what is the same for a row is a vector at most."""
        found = axes_of(self.offset)
        return all(axis(a) in found and n < self.tile for a, n in self.counts.items())

    def side_by_side(self) -> int:
        """See `side_by_side`."""
        return side_by_side(self.offset, tuple(self.counts), self.tile)


def words_of(offset: Expr, axes: Sequence[Axis], tile: int) -> Words:
    """An offset as that of words, along axes whose blocks begin at multiples of `tile`; sizes that are not known may be
    multiples of any."""
    tiles = dict.fromkeys(axes, tile)
    counts = dict.fromkeys(axes, 1) | {s.axis: s.count for s in shared_elements(offset, axes, tiles, axes)}
    words = {axis(a): dims.mul(axis(a), dims.integer(n)) for a, n in counts.items() if n > 1}
    return Words(substitute(offset, words), counts, tile)


def hidden_runs(
    offset: Expr, axes: Sequence[Axis], tiles: Mapping[Axis, int], even: Collection[Axis]
) -> tuple[ElementRun, ...]:
    """The runs of an offset along block axes; none where each has one element, where quotients hide none, or sizes are
    not known (of what these are multiples, the language's compiler is told). Blocks of the axes in `even` begin at
    multiples of their tiles."""
    hidden = [a for a in axes if dims.coefficient(offset, axis(a)) is None]
    if not hidden or not _is_plain(offset) or dims.symbols_of(offset):
        return ()
    found = tuple(_run(offset, a, tiles[a] if a in even else 1) for a in axes)
    return found if any(r.length > 1 for r in found) else ()


def interleaved_store(
    offset: Expr, axes: Sequence[Axis], tiles: Mapping[Axis, int], even: Collection[Axis], least: int
) -> InterleavedStore | None:
    """How two block axes take turns in memory, if they do: runs along one that are shorter than `least`, each followed
    by that of its next along the other, until at least as many lie side by side. Sizes are known, and blocks of the
    axes in `even` begin at multiples of their tiles."""
    if len(axes) != 2 or not _is_plain(offset) or dims.symbols_of(offset):
        return None
    aligned = {a: tiles[a] if a in even else 1 for a in axes}
    for rows, columns in (axes, axes[::-1]):
        run = _run(offset, columns, aligned[columns])
        behind = _run(offset, rows, aligned[rows], run.length)
        length = run.length * behind.length
        if 1 < run.length < min(least, tiles[columns]) and least <= length:
            halves = {r.axis: halved(r.axis, aligned[r.axis], r.length, r.axis.name) for r in (run, behind)}
            firsts = {axis(a): outer for a, (outer, _) in halves.items()}
            multiple = _multiple(substitute(offset, firsts)) or length
            return InterleavedStore(rows, columns, run.length, length, min(multiple, length))
    return None


def shared_elements(
    offset: Expr, axes: Sequence[Axis], tiles: Mapping[Axis, int], even: Collection[Axis]
) -> tuple[SharedElement, ...]:
    """Along which of the axes in `even` neighbours are one element, and how many: by halving from the whole block."""
    if not _is_plain(offset):
        return ()
    hidden = [a for a in axes if a in even and dims.coefficient(offset, axis(a)) is None]
    found = (SharedElement(a, _alike(offset, a, tiles[a])) for a in hidden)
    return tuple(s for s in found if s.count > 1)


def _alike(offset: Expr, a: Axis, tile: int) -> int:
    """How many neighbours along an axis whose blocks begin at multiples of `tile` are one element."""
    count = tile
    while count > 1:
        outer, inner = halved(a, tile, count)
        if inner not in axes_of(substitute(offset, {axis(a): dims.add(outer, inner)})):
            return count
        count //= 2
    return 1


def halved(a: Axis, tile: int, length: int, name: str = "") -> tuple[Expr, Expr]:
    """An axis whose blocks begin at multiples of `tile` as a multiple of `length` and what is below it. The `name`
    tells its halves from those of others."""
    count = dims.ceildiv(a.extent, dims.integer(tile))
    outer = Axis(f"outer{name}", dims.mul(count, dims.integer(tile // length)))
    inner = Axis(f"inner{name}", dims.integer(length))
    return dims.mul(axis(outer), dims.integer(length)), axis(inner)


def _run(offset: Expr, a: Axis, tile: int, step: int = 1) -> ElementRun:
    """The longest runs along an axis whose blocks begin at multiples of `tile`, by halving: neighbours lie `step` from
    each other."""
    length = tile
    while length > 1:
        outer, inner = halved(a, tile, length)
        parted = substitute(offset, {axis(a): dims.add(outer, inner)})
        if dims.coefficient(parted, inner) is dims.integer(step):
            return ElementRun(
                a, length, _multiple(dims.sub(parted, dims.mul(inner, dims.integer(step)))) or length
            )
        length //= 2
    return ElementRun(a, 1, _multiple(offset) or 1)


def _is_plain(e: Expr) -> bool:
    return all(x.op in _PLAIN and x.dtype is i64 for x in walk(e))


def _multiple(e: Expr) -> int:
    """The largest power of two that is known to divide an expression, whatever its axes are; 0 for zero."""
    common = math.gcd(*dims.linear(e).values())
    return common & -common
