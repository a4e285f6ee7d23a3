"""Loops over lists: the tiles of a class that a mask made of data leaves something of, by number (see `block_lists`).

Where `implied` conditions come with a list, a loop over the class becomes two: over the entries of tiles that are
visible whole, in which the mask is known to hold and nothing is tested, then over those that are visible in part. Each
step loads the number of its tile; all else is as in other loops, loads of later steps under way included. A list serves
tiles of other sizes than it was made for, as long as they lie in one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tilewright.analysis.loop_segments import Entries, Segment, shifted_by_rows
from tilewright.analysis.predicate import conditions, is_neutral, slack_of, tested
from tilewright.ir.dtype import bool_, i64
from tilewright.ir.expr import Axis, Expr, axes_of, axis, call, cast, substitute, walk
from tilewright.ir.form import Item
from tilewright.ir.program import Compute, Declare, Loop, Stmt, Update, value_of
from tilewright.ir.sizes import dims

from .evaluate import Evaluator

Facts = Mapping[object, bool]
"""Truths of comparisons, by what they compare (see `_compared`)."""


def list_segments(
    ev: Evaluator, c: Axis, tile: int, whole: bool, trimmed: Sequence[Item], roots: Sequence[Expr]
) -> list[Segment] | None:
    """The loops over `c` in steps of `tile` by a list; None if no list says which tiles leave all of `trimmed`
    their identities, or none of its blocks of rows has all rows of this one. `whole`: the loop has all of `c`."""
    if not whole or not trimmed:
        return None
    for hint in tested(roots):
        if hint.op != "implied" or len(hint.args) == 1:
            continue
        if not all(is_neutral(t, {hint: False}) and _may_leave_out(t, hint, c) for t in trimmed):
            continue
        found = _segments_of(ev, hint, c, tile, roots)
        if found is not None:
            return found
    return None


def _segments_of(
    ev: Evaluator, hint: Expr, c: Axis, tile: int, roots: Sequence[Expr]
) -> list[Segment] | None:
    """The loops by the list of one hint."""
    visible, tiles, whole, some = hint.args[:4]
    number, length = _tile_of(c, tiles)
    if number is None or length % tile:
        return None
    facts = [_read_here(ev, x, c) for x in (tiles, whole, some)]
    if None in facts:
        return None
    listed, full, end = (x for x in facts if x is not None)
    parts = length // tile
    count = dims.mul(dims.ceildiv(c.extent, dims.integer(length)), dims.integer(parts))
    entry = Axis(f"e{c.name[1:]}", count)
    of_entry = substitute(listed, {number: dims.floordiv(axis(entry), dims.integer(parts))})
    entries = Entries(entry, of_entry, length, parts)
    start, stop = (dims.mul(cast(ev.eval(x), i64), dims.integer(parts)) for x in (full, end))
    mask = None if dims.divisible(c.extent, length) else call("lt", axis(c), c.extent)
    whole_tiles = Segment(dims.ZERO, start, None, _decided(visible, roots), entries=entries)
    return [whole_tiles, Segment(start, stop, mask, entries=entries)]


def loop_over_list(ev: Evaluator, s: Segment, entries: Entries, step: Callable[[Expr], Stmt]) -> Loop:
    """The loop over entries of a list; `step` writes what is done where the class begins. Each step loads the
    number for the next one: what is loaded by a number of the same step is not fetched as far ahead."""
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
        ev.out.append(step(entries.first(value_of(now))))

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


def _may_leave_out(fold: Item, hint: Expr, c: Axis) -> bool:
    """Whether a fold takes off nothing that is infinite for values of `c` that see nothing, unless they are listed."""
    numbers = shifted_by_rows(fold, hint.args[0], c)
    if not numbers:
        return True
    visible, *facts = hint.args
    return len(facts) == 4 and all(axes_of(facts[3]) == axes_of(x) & axes_of(visible) for x in numbers)


def _decided(visible: Expr, roots: Sequence[Expr]) -> dict[Expr, bool]:
    """What is known of the single conditions of `roots` where `visible` holds."""
    facts: dict[object, bool] = {}
    size = -1
    while len(facts) > size:
        size = len(facts)
        facts |= dict(_follows(visible, True, facts))
    found: dict[Expr, bool] = {}
    for x in conditions(roots):
        what, truth = _compared(x)
        if what in facts:
            found[x] = facts[what] == truth
    return found


def _follows(e: Expr, truth: bool, facts: Facts) -> Iterator[tuple[object, bool]]:
    """What follows from the truth of `e` and other facts: of the sides of a disjunction, one that is left."""
    if e.dtype is bool_ and e.op == "not":
        yield from _follows(e.args[0], not truth, facts)
    elif e.dtype is bool_ and e.op in ("and", "or"):
        open_ = [a for a in e.args if (e.op == "and") == truth or _truth(a, facts) is not (not truth)]
        if (e.op == "and") == truth or len(open_) == 1:
            for a in open_:
                yield from _follows(a, truth, facts)
    else:
        what, same = _compared(e)
        yield what, truth == same


def _truth(e: Expr, facts: Facts) -> bool | None:
    """The truth of a condition, as far as it is known."""
    if e.dtype is bool_ and e.op == "not":
        inner = _truth(e.args[0], facts)
        return None if inner is None else not inner
    if e.dtype is bool_ and e.op in ("and", "or"):
        sides = [_truth(a, facts) for a in e.args]
        if (e.op == "or") in sides:
            return e.op == "or"
        return None if None in sides else e.op == "and"
    what, same = _compared(e)
    return None if what not in facts else facts[what] == same


def _compared(x: Expr) -> tuple[object, bool]:
    """What a comparison of whole numbers is about, and its truth where that is so: equal for all ways to write it."""
    if x.op == "not" and x.dtype is bool_:
        what, truth = _compared(x.args[0])
        return what, not truth
    if x.op not in ("eq", "ne", "lt", "le", "gt", "ge") or x.args[0].dtype.is_float:
        return x, True
    a, b = x.args
    if x.op in ("eq", "ne"):
        if a.dtype is i64:
            gap = dims.sub(a, b)
            return ("eq", frozenset({gap, dims.sub(b, a)})), x.op == "eq"
        return ("eq", frozenset({a, b})), x.op == "eq"
    slack = slack_of(x, data=True)
    if slack is not None:
        opposite = dims.sub(dims.integer(-1), slack)
        return ("ge", frozenset({slack, opposite})), repr(slack) < repr(opposite)
    if x.op in ("gt", "ge"):
        a, b = b, a
    return (("lt", a, b), True) if x.op in ("lt", "gt") else (("lt", b, a), False)
