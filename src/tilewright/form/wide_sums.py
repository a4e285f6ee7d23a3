"""Sums of singles in doubles, where terms may cancel or a loop cannot be cut.

    s[i] = sum over r of x(i, r)        in doubles, rounded once
    s[i] / n                            in doubles, rounded once, where a program divides the sum

Each addition of singles rounds to half a unit of what has been summed so far, so a sum that comes out small keeps few
digits, and the mean of equal elements is not that element: no distance from it is 0 then, and a norm with a small
variance makes the error large. Where a machine adds doubles as fast as memory brings singles, they cost nothing.
Sums of what is never negative keep their digits, products of blocks have units of their own, and what is made of
halves, or corrected while it is summed (an online law), stays as it is.

Beside a running fold that takes one element a step, a loop cannot be cut into blocks, and a sum would be one chain of
all its terms: it is one of doubles as well, whatever the signs and the machine.

Where a sum is taken in parts (`rewrite.split.merge_laws`), the parts are doubles in memory: rounded there, what cancels
between them would be lost after all.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from tilewright.analysis.contraction import contraction, product_sides
from tilewright.ir.dtype import f32, f64
from tilewright.ir.expr import Expr, call, cast, make, transform, walk
from tilewright.ir.form import Form, Item, folds_read
from tilewright.ir.reduction import Reduction, sum_
from tilewright.ir.schedule import Role, Schedule
from tilewright.rewrite.split.merge_laws import IN_DOUBLES, OF_PARTS, SINGLES, TO_DOUBLES, cancels


def with_wide_sums(form: Form, schedule: Schedule) -> Form:
    """The form with `IN_DOUBLES` for the sums of singles in uncut loops, and, where the schedule has wide sums, for
    those whose terms may cancel."""
    asked = schedule.reductions.wide_sums
    found = [i for i in form.items if (asked and _may_cancel(i, form)) or _is_uncut(i, schedule)]
    followed = _followed(form) if found else set[int]()
    wide = {i.id for i in found if i.id not in followed and not _is_product(i, form, schedule)}
    if not wide:
        return form
    divided = {d for i in form.items for b in i.roots for x in walk(b) for d in _divided(x)} & wide
    items = tuple(
        replace(i, body=tuple(_read_late(b, divided) for b in i.body), reduction=_of(i, wide, divided))
        for i in form.items
    )
    return replace(form, items=items)


def _of(item: Item, wide: Set[int], divided: Set[int]) -> Reduction | None:
    if item.id not in wide or not item.is_fold:
        return item.reduction
    if item.reduction == OF_PARTS:
        return sum_(f64) if item.id in divided else OF_PARTS
    return TO_DOUBLES if item.id in divided else IN_DOUBLES


def _divided(x: Expr) -> Sequence[int]:
    """The sum of which `x` is a quotient, if what divides it reads no fold."""
    plain = x.op == "div" and x.args[0].op == "value" and not folds_read(x.args[1:])
    return folds_read(x.args[:1]) if plain else ()


def _read_late(body: Expr, divided: Set[int]) -> Expr:
    """The body with the sums that are doubles rounded where they are read: behind a division, or at once."""

    def visit(x: Expr) -> Expr | None:
        sum_at = x.args[0] if _divided(x) else x
        if sum_at.op != "value" or not isinstance(sum_at.value, tuple) or sum_at.value[0] not in divided:
            return None
        wide = make("value", sum_at.args, f64, sum_at.value)
        return cast(wide if x is sum_at else call("div", wide, cast(x.args[1], f64)), f32)

    return transform(body, visit)


def _may_cancel(item: Item, form: Form) -> bool:
    """Whether a fold sums singles of both signs that were no halves, or parts of such a sum."""
    if item.reduction == OF_PARTS:
        return True
    if item.reduction != SINGLES or item.scan is not None:
        return False
    return cancels(item.body[0], any(form.params[p].dtype.is_half for p, _ in item.accesses()))


def _is_uncut(item: Item, schedule: Schedule) -> bool:
    """Whether a fold sums singles in a loop that a running fold has take one element after the other."""
    plans = [schedule.plan(a) for a in item.reduce] if item.reduction == SINGLES and item.scan is None else []
    return any(p.role is Role.SCAN and p.tile == 1 for p in plans)


def _is_product(item: Item, form: Form, schedule: Schedule) -> bool:
    """Whether a fold is a product of two blocks, or would be one with larger tiles."""
    dot = contraction(item, form.params, lambda a: schedule.plan(a).tile)
    return dot is not None or product_sides(item) is not None


def _followed(form: Form) -> set[int]:
    """Folds that others over the same class read through an exponential or that read such: what an online law may
    correct while it runs."""
    found: set[int] = set()
    for item in form.folds.values():
        raised = [x for b in item.body for x in walk(b) if x.op in ("exp", "exp2")]
        if any(set(form.folds[d].reduce) & set(item.reduce) for d in folds_read(raised)):
            found.add(item.id)
    return found
