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
from tilewright.analysis.contraction import product_sides
from tilewright.analysis.loop_segments import Segment
from tilewright.analysis.predicate import is_neutral, tested
from tilewright.analysis.runtime_checks import unsafe
from tilewright.ir.dtype import i64
from tilewright.ir.expr import Axis, Expr, axes_of, substitute, transform, walk, where
from tilewright.ir.form import Form
from tilewright.ir.program import value_of
from tilewright.ir.reduction import maximum, minimum
from tilewright.ir.schedule import Role, Schedule
from tilewright.ir.sizes import dims

from .evaluate import Evaluator
from .plan import bounds_loop
from .states import collapse, hold


def explain_unbounded_loops(form: Form, schedule: Schedule) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Why loops of products run over tiles that a mask may hide, in words, with the places of the folds there."""
    found: dict[tuple[tuple[int, ...], str], None] = {}
    for c in (p.axis for p in schedule.tiling.classes if p.role is Role.STREAMED):
        folds = [f for f in form.folds.values() if c in f.reduce]
        roots = [r for i in form.items if c in i.axes for r in i.roots]
        masks = [
            x
            for x in tested(roots)
            if any(map(product_sides, folds))
            and any(all(is_neutral(f, {x: t}) for f in folds) for t in (True, False))
        ]
        reasons = (
            ()
            if any(x.op == "implied" for x in masks)
            else (_unbounded(x, c, schedule.reductions.skip_hidden) for x in masks)
        )
        if masks and not schedule.reductions.trim:
            reasons = ("what its mask hides may not be finite (trim='exact'): no tile is left out for it",)
        places = tuple(dict.fromkeys(f.source for f in folds if f.source >= 0))
        found |= {(places, why): None for why in reasons if why}
    return tuple(found)


def _unbounded(mask: Expr, c: Axis, skip: bool) -> str:
    if any(x.op == "value" or (x.op == "read" and x.dtype.is_float) for x in walk(mask)):
        return "its mask depends on what it computes: no tile is left out for it"
    known = skip or bounds_loop(mask, c)
    return "" if known else "the tiles that its mask hides are not known ahead: no tile is left out for it"


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


def compute_ends(ev: Evaluator, found: Sequence[Segment], ends: Ends) -> list[Segment]:
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
