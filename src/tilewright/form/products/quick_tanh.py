"""Scores within bounds, as tanh makes them: where only exponentials see them, by a quick function.

    exp(c tanh(x) - m)

An absolute error of tanh is one of the exponent, c times as large, and that a relative one of the power.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.analysis.contraction import product_sides
from tilewright.form.exp2 import constant_factor, products_of_halves
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Expr, call, transform, walk
from tilewright.ir.form import Form, Item
from tilewright.tuning.thresholds import FORMS

_TERMS = frozenset({"add", "sub", "neg", "maximum", "minimum", "cast", "narrow"})
"""Operations whose results err as much as their arguments do."""


def use_quick_tanh(form: Form) -> Form:
    """The form with its hyperbolic tangents as quick ones, if its products are of halves, and all tangents are terms,
    times small constants, of exponents, or of maxima, which exponents are less by."""
    bodies = [(i, b) for i in form.items for b in i.body]
    found = any(_is_tanh(x) for _, b in bodies for x in walk(b))
    products = {i.id for i in form.folds.values() if product_sides(i) is not None}
    if not found or products != products_of_halves(form):
        return form
    if not all(_only_exponents_see(b, 1.0 if _is_maximum(i) else None) for i, b in bodies):
        return form

    def visit(x: Expr) -> Expr | None:
        return call("quick_tanh", transform(x.args[0], visit)) if _is_tanh(x) else None

    return replace(
        form, items=tuple(replace(i, body=tuple(transform(b, visit) for b in i.body)) for i in form.items)
    )


def _is_tanh(x: Expr) -> bool:
    return x.op == "tanh" and x.dtype is f32


def _is_maximum(item: Item) -> bool:
    return item.reduction is not None and item.reduction.combiner == "maximum" and len(item.body) == 1


def _only_exponents_see(body: Expr, factor: float | None) -> bool:
    """Whether each tangent of an expression is a term of an exponent, at most `max_tanh_factor` times. `factor`: what
    an error of the whole expression counts in an exponent; None where it may not err."""
    todo, seen = [(body, factor)], set[tuple[Expr, float | None]]()
    while todo:
        x, times = todo.pop()
        if (x, times) in seen:
            continue
        seen.add((x, times))
        scaled = constant_factor(x)
        if _is_tanh(x):
            if times is None or abs(times) > FORMS.max_tanh_factor:
                return False
            todo.append((x.args[0], None))
        elif x.op == "exp" and x.dtype is f32:
            todo.append((x.args[0], 1.0))
        elif x.op == "where":
            todo += [(x.args[0], None), *((a, times) for a in x.args[1:])]
        elif scaled is not None and times is not None:
            todo.append((scaled[0], times * scaled[1]))
        else:
            todo += [(a, times if x.op in _TERMS else None) for a in x.args]
    return True
