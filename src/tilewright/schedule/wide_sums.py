"""Sums of singles in doubles, where terms may cancel.

    s[i] = sum over r of x(i, r)        in doubles, rounded once
    s[i] / n                            in doubles, rounded once, where a program divides the sum

Each addition of singles rounds to half a unit of what has been summed so far, so a sum that comes out small keeps few
digits, and the mean of equal elements is not that element: no distance from it is 0 then, and a norm with a small
variance makes the error large. Where a machine adds doubles as fast as memory brings singles, they cost nothing.
Sums of what is never negative keep their digits, products of blocks have units of their own, and what is made of
halves, or corrected while it is summed (an online law), stays as it is.

Where a sum is taken in parts (`split`), the parts are doubles in memory: rounded there, what cancels between them would
be lost after all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from ..ir.dtype import DType, f32, f64
from ..ir.expr import Expr, call, cast, const, make, read, slot, transform, walk
from ..ir.reduction import Reduction, sum_
from ..ir.tensor import TensorExpr
from ..rewrite.sign import sign_of
from .contract import contraction, factored, sides
from .form import Form, Item, folds_read
from .schedule import Schedule

_SINGLES = sum_(f32)


def _in_doubles(name: str, element: DType, *, rounded: bool) -> Reduction:
    a, b, e = slot("a", 0, f64), slot("b", 0, f64), slot("e", 0, element)
    return Reduction(
        name,
        (element,),
        (f64,),
        (const(0, f64),),
        (cast(e, f64),),
        (call("add", a, b),),
        (cast(a, f32) if rounded else a,),
    )


IN_DOUBLES = _in_doubles("sum in doubles", f32, rounded=True)
"""The sum of singles over a state of a double."""
TO_DOUBLES = _in_doubles("sum to doubles", f32, rounded=False)
"""The same, which its readers round: a sum of n equal singles, divided by n, is that single only if it was not rounded
before."""
OF_PARTS = _in_doubles("sum of parts", f64, rounded=True)
"""The sum of singles from its parts, each a double."""


def with_wide_parts(part: TensorExpr, merge: TensorExpr) -> tuple[TensorExpr, TensorExpr]:
    """A sum in two steps, what it keeps of each part in doubles. `merge` reads the parts as its first operand."""
    return (
        replace(part, body=(cast(part.body[0], f64),), reduction=sum_(f64)),
        replace(merge, body=(read(0, merge.body[0].args, f64),), reduction=OF_PARTS),
    )


def may_cancel(expr: TensorExpr, summed: Callable[[], Expr]) -> bool:
    """Whether a fold sums singles of both signs that were no halves, and no products of blocks. `summed` tells what it
    sums, seen through the pointwise ops before it; it is asked of sums of singles alone, as it walks through them."""
    if expr.reduction != _SINGLES or expr.scan is not None:
        return False
    term = summed()
    halves = any(x.op == "read" and x.dtype.is_half for x in walk(term))
    return _cancels(term, halves) and not factored(term, expr.axes, expr.reduce)


def with_wide_sums(form: Form, schedule: Schedule) -> Form:
    """The form with `IN_DOUBLES` for the sums of singles whose terms may cancel."""
    followed = _followed(form)
    wide = {
        i.id
        for i in form.items
        if i.id not in followed and _may_cancel(i, form) and not _is_product(i, form, schedule)
    }
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
        kept = make("value", sum_at.args, f64, sum_at.value)
        return cast(kept if x is sum_at else call("div", kept, cast(x.args[1], f64)), f32)

    return transform(body, visit)


def _may_cancel(item: Item, form: Form) -> bool:
    """Whether a fold sums singles of both signs that were no halves, or parts of such a sum."""
    if item.reduction == OF_PARTS:
        return True
    if item.reduction != _SINGLES or item.scan is not None:
        return False
    return _cancels(item.body[0], any(form.params[p].dtype.is_half for p, _ in item.accesses()))


def _cancels(term: Expr, halves: bool) -> bool:
    sign = sign_of(term)
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
