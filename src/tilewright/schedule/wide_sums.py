"""Sums of singles in doubles, where terms may cancel.

    s[i] = sum over r of x(i, r)        in doubles, rounded once

Each addition of singles rounds to half a unit of what has been summed so far, so a sum that comes out small keeps few
digits, and the mean of equal elements is not that element: no distance from it is 0 then, and a norm with a small
variance makes the error large. Where a machine adds doubles as fast as memory brings singles, they cost nothing.
Sums of what is never negative keep their digits, products of blocks have units of their own, and what is made of
halves, or corrected while it is summed (an online law), stays as it is.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.dtype import f32, f64
from ..ir.expr import call, cast, const, slot, walk
from ..ir.reduction import Reduction, sum_
from ..rewrite.sign import sign_of
from .contract import contraction, sides
from .form import Form, Item, folds_read
from .schedule import Schedule

_SINGLES = sum_(f32)


def _in_doubles() -> Reduction:
    a, b, e = slot("a", 0, f64), slot("b", 0, f64), slot("e", 0, f32)
    return Reduction(
        "sum in doubles",
        (f32,),
        (f64,),
        (const(0, f64),),
        (cast(e, f64),),
        (call("add", a, b),),
        (cast(a, f32),),
    )


IN_DOUBLES = _in_doubles()
"""The sum of singles over a state of a double."""


def with_wide_sums(form: Form, schedule: Schedule) -> Form:
    """The form with `IN_DOUBLES` for the sums of singles whose terms may cancel."""
    followed = _followed(form)
    items = tuple(
        replace(i, reduction=IN_DOUBLES)
        if i.id not in followed and _may_cancel(i, form) and not _is_product(i, form, schedule)
        else i
        for i in form.items
    )
    return replace(form, items=items) if items != form.items else form


def _may_cancel(item: Item, form: Form) -> bool:
    """Whether a fold sums singles of both signs that were no halves."""
    if item.reduction != _SINGLES or item.scan is not None:
        return False
    halves = any(form.params[p].dtype.is_half for p, _ in item.accesses())
    sign = sign_of(item.body[0])
    return not halves and not sign.nonnegative and not sign.nonpositive


def _is_product(item: Item, form: Form, schedule: Schedule) -> bool:
    """Whether a fold is a product of two blocks, or would be one with larger tiles."""
    dot = contraction(item, form.params, lambda a: schedule.plan(a).tile)
    return dot is not None or sides(item) is not None


def _followed(form: Form) -> set[int]:
    """Folds that others over the same class read through an exponential or that read such: what an online law may
    correct while it runs."""
    found: set[int] = set()
    for item in form.folds.values():
        raised = [x for b in item.body for x in walk(b) if x.op in ("exp", "exp2")]
        if any(set(form.folds[d].reduce) & set(item.reduce) for d in folds_read(raised)):
            found.add(item.id)
    return found
