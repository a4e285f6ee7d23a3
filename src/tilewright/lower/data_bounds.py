"""Loops that end where data says: the least and greatest number that a block of memory holds, found before the loop.

A mask may compare a class with whole numbers from memory: with the length of each sequence, or with the first and last
place that a row sees (see `schedule.mask_windows`). Over a block of the other classes the least and the greatest of
them bound the loop. Where `implied` conditions stand, kernels know the bound already and test nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tilewright.analysis.condition_ranges import End, Ends
from tilewright.analysis.loop_segments import LoopSegment
from tilewright.analysis.runtime_checks import unsafe
from tilewright.ir.dtype import i64
from tilewright.ir.expr import Axis, Expr, axes_of, substitute, transform, walk, where
from tilewright.ir.program import value_of
from tilewright.ir.reduction import maximum, minimum
from tilewright.ir.sizes import dims

from .evaluate import Evaluator
from .states import collapse, hold


def readable_ends(ev: Evaluator) -> Ends:
    """What loops may end at: numbers that can be read wherever the loop stands."""
    return Ends(partial(is_safe, ev))


def is_safe(ev: Evaluator, e: Expr) -> bool:
    """Whether `e` may be evaluated wherever its classes are bound, which then have elements."""
    sizes = {a.value.extent for a in axes_of(e) if isinstance(a.value, Axis)}

    def positive(x: Expr) -> Expr | None:
        if x.op != "maximum" or dims.ONE not in x.args:
            return None
        return next((a for a in x.args if a in sizes), None)

    return not unsafe(transform(e, positive), ev.params)


def compute_ends(ev: Evaluator, found: Sequence[LoopSegment], ends: Ends) -> list[LoopSegment]:
    """Segments whose bounds are values computed here, before their loops."""
    used = {x for s in found for e in (s.start, s.stop) for x in walk(e) if x.op == "slot"}
    table: dict[Expr, Expr] = {}
    for end in ends.found:
        if (stand_in := ends.stand_in(end)) in used:
            if not ev.blocks(ev.eval(end.number)):
                end = replace(end, low=True)
            if end not in ev.scope.ends:
                ev.scope.ends[end] = compute_end(ev, end)
            table[stand_in] = ev.scope.ends[end]
    return [replace(s, start=substitute(s.start, table), stop=substitute(s.stop, table)) for s in found]


def compute_end(ev: Evaluator, end: End) -> Expr:
    """The number that `end` means, of the lanes that count."""
    reduction = minimum(i64) if end.low else maximum(i64)
    least = dims.mul(end.limit, dims.integer(-1))
    value = ev.eval(end.number)
    blocks = ev.blocks(value)
    mask = ev.tail(blocks)
    if mask is not None:
        value = where(mask, value, end.limit if end.low else least)
    if blocks:
        (var,) = collapse(ev, reduction, (hold(ev, value, blocks),), blocks)
        value = value_of(var)
    return ev.named(dims.minimum(dims.maximum(value, least), end.limit))
