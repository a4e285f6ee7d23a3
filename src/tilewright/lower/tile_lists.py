"""Loops over lists: the tiles of a class that a mask made of data leaves something of, by number (see `block_lists`).

Where `implied` conditions come with a list, a loop over the class becomes two: over the entries of tiles that are
visible whole, in which the mask is known to hold and nothing is tested, then over those that are visible in part. Each
step loads the number of its tile; all else is as in other loops, loads of later steps under way included. A list serves
tiles of other sizes than it was made for, as long as they lie in one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.analysis.condition_ranges import Steps
from tilewright.analysis.loop_segments import Entries, LoopSegment
from tilewright.analysis.predicate import decided_by
from tilewright.ir.dtype import i64
from tilewright.ir.expr import Axis, Expr, axes_of, axis, call, cast, substitute, walk
from tilewright.ir.program import Compute, Declare, Loop, Stmt, Update, value_of
from tilewright.ir.sizes import dims

from .evaluate import Evaluator


def list_segments(
    ev: Evaluator, steps: Steps, hints: Sequence[Expr], roots: Sequence[Expr]
) -> list[LoopSegment] | None:
    """The loops by the list of the first of `hints` that has one number of tiles for all rows here; None if there is
    none. The loop has all of its class."""
    c, whole_class = steps.axis, steps.start is dims.ZERO and steps.stop is steps.axis.extent
    for hint in hints if whole_class else ():
        visible, tiles, full_count, some = hint.args[:4]
        number, length = _tile_of(c, tiles)
        listed, full, end = (_read_here(ev, x, c) for x in (tiles, full_count, some))
        if number is None or length % steps.tile or listed is None or full is None or end is None:
            continue
        parts = dims.integer(length // steps.tile)
        entry = Axis(f"e{c.name[1:]}", dims.mul(dims.ceildiv(c.extent, dims.integer(length)), parts))
        of_entry = substitute(listed, {number: dims.floordiv(axis(entry), parts)})
        entries = Entries(entry, of_entry, length, length // steps.tile)
        start, stop = (dims.mul(cast(ev.eval(x), i64), parts) for x in (full, end))
        mask = None if dims.divisible(c.extent, length) else call("lt", axis(c), c.extent)
        whole_tiles = LoopSegment(dims.ZERO, start, None, decided_by(visible, roots), entries=entries)
        return [whole_tiles, LoopSegment(start, stop, mask, entries=entries)]
    return None


def loop_over_list(
    ev: Evaluator, s: LoopSegment, entries: Entries, step: Callable[[Expr, Expr], Stmt]
) -> Loop:
    """The loop over entries of a list; `step` writes what is done from one value of the class to another. Each step
    loads the number for the next one: what is loaded by a number of the same step is not fetched as far ahead."""
    place = axis(entries.axis)
    last = dims.sub(entries.axis.extent, dims.ONE)

    def number(at: Expr) -> Expr:
        return ev.eval(substitute(entries.tile, {place: dims.minimum(at, last)}))

    first = number(s.start)
    state = ev.var(first.dtype, ())
    ev.out.append(Declare((state,), (first,)))

    def body() -> None:
        now = ev.var(first.dtype, ())
        ev.out.append(Compute(now, value_of(state)))
        ev.out.append(Update((state,), (number(dims.add(place, dims.ONE)),)))
        start = entries.first(value_of(now))
        ev.out.append(step(start, dims.add(start, dims.integer(entries.length // entries.parts))))

    return Loop(entries.axis, s.start, s.stop, 1, ev.block(entries.axis, 1, None, body))


def _read_here(ev: Evaluator, fact: Expr, c: Axis) -> Expr | None:
    """What a hint reads, for the block of rows that is bound: one number for all; None if there are several."""
    table: dict[Expr, Expr] = {}
    for a in (x.value for x in axes_of(fact)):
        if not isinstance(a, Axis) or a == c:
            continue
        bound = ev.scope.bound.get(a)
        if bound is None:
            return None
        if bound > 1:
            blocks = [x for x in walk(fact) if x.op == "floordiv" and x.args[0] is axis(a)]
            start, _ = ev.scope.spans.get(a, (axis(a), axis(a)))
            if not dims.divisible(start, bound) or any(not dims.divisible(x.args[1], bound) for x in blocks):
                return None
            table |= {x: dims.floordiv(start, x.args[1]) for x in blocks}
    made = substitute(fact, table)
    left = {x.value for x in axes_of(made)} - {c}
    return None if any(n > 1 for a, n in ev.scope.bound.items() if a in left) else made


def _tile_of(c: Axis, tiles: Expr) -> tuple[Expr | None, int]:
    """The number of the tile of `c` that a read of a list has as its index, and the tile's length."""
    for x in walk(tiles):
        if x.op == "floordiv" and x.args[0] is axis(c):
            length = dims.static(x.args[1])
            elsewhere = axis(c) in axes_of(substitute(tiles, {x: dims.ZERO}))
            return (None, 1) if length is None or elsewhere else (x, length)
    return None, 1
