"""Whether any element of a fold fulfils a condition, as a number: threads have few registers of truth."""

from __future__ import annotations

from dataclasses import replace

from tilewright.ir.dtype import bool_, i32
from tilewright.ir.expr import Expr, call, const, make, slot, transform, where
from tilewright.ir.form import Form, Item
from tilewright.ir.reduction import Reduction

_NONE, _SOME = const(0, i32), const(1, i32)
_FIRST, _SECOND, _ELEMENT = slot("a", 0, i32), slot("b", 0, i32), slot("e", 0, i32)
SEEN = Reduction(
    "any", (i32,), (i32,), (_NONE,), (_ELEMENT,), (call("or", _FIRST, _SECOND),), (_FIRST,)
)  # fmt: skip
"""Disjunction of numbers 0 and 1."""


def any_as_int(form: Form) -> Form:
    """The form with its disjunctions over numbers 0 and 1."""
    flags = {
        i.id
        for i in form.folds.values()
        if i.reduction is not None and i.reduction.combiner == "or" and i.reduction.state == (bool_,)
    }
    if not flags:
        return form

    def visit(x: Expr) -> Expr | None:
        if x.op == "value" and isinstance(x.value, tuple) and x.value[0] in flags:
            return call("ne", make("value", x.args, i32, x.value), _NONE)
        return None

    def changed(i: Item) -> Item:
        body = tuple(transform(b, visit) for b in i.body)
        if i.id not in flags:
            return replace(i, body=body)
        return replace(i, body=tuple(where(b, _SOME, _NONE) for b in body), reduction=SEEN)

    return replace(form, items=tuple(map(changed, form.items)))
