"""Scores within bounds, as tanh makes them: where only exponentials see them, by a quick function.

    r = (sum of exp(c tanh(x) - m) v) / (sum of exp(c tanh(x) - m))    m: the maximum of c tanh(x), or anything

An absolute error of tanh is one of the exponent, c times as large, and that a relative one of the power. Powers are
rounded to halves for their product, or added up to what that product is divided by, and are seen by nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from tilewright.analysis.contraction import product_sides
from tilewright.form.exp2 import constant_factor, products_of_halves
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Expr, call, transform, walk
from tilewright.ir.form import Form, Item
from tilewright.tuning.thresholds import FORMS

_PASSING = frozenset({"add", "sub", "neg", "maximum", "minimum", "cast", "narrow"})
"""Operations whose results err as much as their arguments do."""


def use_quick_tanh(form: Form) -> Form:
    """The form with its hyperbolic tangents as quick ones, if its products are of halves, and each tangent is a term,
    times a small constant, of the exponent of a weight, or of a maximum that nothing but such exponents read."""
    bodies = [(i, b) for i in form.items for b in i.body]
    products = {i.id for i in form.folds.values() if product_sides(i) is not None}
    found = any(_is_tanh(x) for _, b in bodies for x in walk(b))
    if not found or not products or products != products_of_halves(form):
        return form
    known = _Readers(products)
    known.look_for_maxima(bodies)
    known.look_for_totals(bodies)
    if not all(known.allow(i, b) for i, b in bodies):
        return form

    def visit(x: Expr) -> Expr | None:
        return call("quick_tanh", transform(x.args[0], visit)) if _is_tanh(x) else None

    return replace(
        form, items=tuple(replace(i, body=tuple(transform(b, visit) for b in i.body)) for i in form.items)
    )


def _is_tanh(x: Expr) -> bool:
    return x.op == "tanh" and x.dtype is f32


def _is_fold(item: Item, combiner: str) -> bool:
    return item.reduction is not None and item.reduction.combiner == combiner and len(item.body) == 1


def _fold_read(x: Expr) -> int | None:
    """The number of the fold whose result an expression is."""
    return x.value[0] if x.op == "value" and isinstance(x.value, tuple) else None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an expression stands: what an error of it counts in an exponent (`times`; None where it is in none),
    whether it may be a power (in a fold that adds), and whether a product of matrices is divided by it."""

    times: float | None = None
    added: bool = False
    divides: bool = False


@dataclass(slots=True)
class _Readers:
    """What sees the tangents of a form whose products of matrices are the folds `products`."""

    products: AbstractSet[int]
    maxima: dict[int, float] = field(default_factory=dict[int, float])
    """Maxima of tangents, with what these are multiplied by at most."""
    totals: set[int] = field(default_factory=set[int])
    """Sums of powers that are no products."""

    def look_for_maxima(self, bodies: list[tuple[Item, Expr]]) -> None:
        """Those of the bodies of folds."""
        for i, b in bodies:
            factors = self._factors(b) if _is_fold(i, "maximum") else []
            if factors:
                self.maxima[i.id] = max(factors)

    def _factors(self, body: Expr) -> list[float]:
        """What the tangents of a body are multiplied by."""
        found: list[float] = []
        todo = [(body, 1.0)]
        seen = set[tuple[Expr, float]]()
        while todo:
            x, times = todo.pop()
            if (x, times) in seen:
                continue
            seen.add((x, times))
            scaled = constant_factor(x)
            if _is_tanh(x):
                found.append(abs(times))
            elif scaled is not None:
                todo.append((scaled[0], times * scaled[1]))
            else:
                todo += [(a, times) for a in x.args]
        return found

    def look_for_totals(self, bodies: list[tuple[Item, Expr]]) -> None:
        """Those of the bodies of folds."""
        for i, b in bodies:
            if i.id not in self.products and _is_fold(i, "add") and any(map(self._is_power, walk(b))):
                self.totals.add(i.id)

    def _is_power(self, x: Expr) -> bool:
        """Whether an expression is an exponential of tangents, or of a maximum of such."""
        return x.op == "exp" and any(_is_tanh(y) or _fold_read(y) in self.maxima for y in walk(x))

    def allow(self, item: Item, body: Expr) -> bool:
        """Whether nothing in a body sees more of a tangent than it may."""
        first = _Place(1.0 if item.id in self.maxima else None, added=_is_fold(item, "add"))
        todo, seen = [(body, first)], set[tuple[Expr, _Place]]()
        while todo:
            x, place = todo.pop()
            if (x, place) in seen:
                continue
            seen.add((x, place))
            if not self._may_stand(x, place):
                return False
            todo += self._parts(x, place)
        return True

    def _may_stand(self, x: Expr, place: _Place) -> bool:
        read = _fold_read(x)
        factor = 1.0 if _is_tanh(x) else self.maxima.get(read) if read is not None else None
        if factor is not None:
            return place.times is not None and abs(place.times * factor) <= FORMS.max_tanh_factor
        if read in self.totals:
            return place.divides
        return place.added or not self._is_power(x)

    def _parts(self, x: Expr, place: _Place) -> list[tuple[Expr, _Place]]:
        """The arguments of an expression with their places."""
        scaled = constant_factor(x)
        if _is_tanh(x) or _fold_read(x) is not None:
            return [(a, _Place()) for a in x.args]
        if x.op == "exp" and x.dtype is f32:
            return [(x.args[0], _Place(times=1.0))]
        if x.op == "where":
            return [(x.args[0], _Place()), *((a, place) for a in x.args[1:])]
        if x.op in ("eq", "ne") and any(_is_infinite(a) for a in x.args):
            return []  # tangents are finite, close ones too
        if scaled is not None:
            times = None if place.times is None else place.times * scaled[1]
            return [(scaled[0], replace(place, times=times))]
        if x.op == "div":
            of_product = any(_fold_read(y) in self.products for y in walk(x.args[0]))
            return [(x.args[0], replace(place, times=None)), (x.args[1], _Place(divides=of_product))]
        if x.op in _PASSING:
            return [(a, place) for a in x.args]
        return [(a, _Place(added=place.added and x.op == "mul")) for a in x.args]


def _is_infinite(x: Expr) -> bool:
    return x.op == "const" and isinstance(x.value, float) and math.isinf(x.value)
