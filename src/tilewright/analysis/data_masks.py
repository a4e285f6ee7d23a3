"""What masks of data say of a loop: whether it can end by them, jump by them, or run over a list of tiles."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.dtype import i64
from tilewright.ir.expr import Axis, Expr, axes_of, axis, const, walk, where
from tilewright.ir.form import Form, Item
from tilewright.ir.schedule import Role, Schedule
from tilewright.ir.sizes import dims

from .contraction import product_sides
from .loop_segments import shifted_by_rows
from .predicate import conditions, is_neutral, slack_of, tested


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


def bounds_loop(mask: Expr, c: Axis) -> bool:
    """Whether all that a mask says of data are comparisons with numbers that a loop over `c` can end at."""
    single = conditions([where(mask, const(1, i64), const(0, i64))])
    slacks = [slack_of(x, data=True) for x in single if any(y.op == "read" for y in walk(x))]
    return all(s is not None and dims.coefficient(s, axis(c)) is not None for s in slacks)


def jumping_masks(folds: Sequence[Item], c: Axis) -> tuple[tuple[Expr, bool], ...]:
    """Conditions that read data, each with the truth without which every one of `folds` takes only its identity; none
    that loops over `c` end at anyway."""
    found: list[tuple[Expr, bool]] = []
    for x in tested([r for t in folds for r in t.roots]):
        if not _of_data(x) or bounds_loop(x, c) or any(shifted_by_rows(t, x, c) for t in folds):
            continue
        found += [(x, t) for t in (True, False) if all(is_neutral(f, {x: not t}) for f in folds)]
    return tuple(found)


def listing_hints(roots: Sequence[Expr], trimmed: Sequence[Item], c: Axis) -> tuple[Expr, ...]:
    """Implied conditions in `roots` with a list of the tiles of `c`: others leave all of `trimmed` their identities."""
    hints = [x for x in tested(roots) if x.op == "implied" and len(x.args) > 1] if trimmed else []
    return tuple(
        x for x in hints if all(is_neutral(t, {x: False}) and _may_leave_out(t, x, c) for t in trimmed)
    )


def _may_leave_out(fold: Item, hint: Expr, c: Axis) -> bool:
    """Whether a fold takes off nothing that is infinite for values of `c` that see nothing, unless they are listed."""
    numbers = shifted_by_rows(fold, hint.args[0], c)
    if not numbers:
        return True
    visible, *facts = hint.args
    return len(facts) == 4 and all(axes_of(facts[3]) == axes_of(x) & axes_of(visible) for x in numbers)


def _of_data(mask: Expr) -> bool:
    """Whether a mask reads whole numbers or truth values, and nothing that the kernel computes."""
    reads = [x for x in walk(mask) if x.op == "read"]
    return (
        bool(reads) and not any(x.dtype.is_float for x in reads) and all(x.op != "value" for x in walk(mask))
    )
