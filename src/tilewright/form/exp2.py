"""Exponentials as powers of two, and maxima of scores before they are scaled.

exp(c x - m) is exp2((c log2 e) x - m log2 e): what varies less than the element is multiplied once, and each element
takes one fused multiply-add and one instruction for the power. A maximum of scaled scores is the scaled maximum of
scores, exactly, since rounding is monotone; then the scaling of each element is part of that multiply-add.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from tilewright.analysis.contraction import factors, product_sides, stored_half
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Expr, axes_of, call, const, is_const, make, rebuild, transform, walk
from tilewright.ir.form import Form, Item
from tilewright.tuning.thresholds import FORMS

LOG2E = math.log2(math.e)


_INFINITE = (math.inf, -math.inf)


def power_of_two(
    x: Expr, size: Callable[[Expr], int], named: Callable[[Expr], Expr], quick: bool = False
) -> Expr:
    """exp(x) of an evaluated sum: `size` says along how many block axes a term varies, `named` names a value. Terms
    that vary most are added up where they have one factor; each other factor is one fused multiply-add. `quick`: the
    power may be the quick one."""
    terms = [(t, k) for t, k in _terms(x, 1.0) if not is_const(t, 0)]
    most = max((size(t) for t, _ in terms), default=0)
    wide: dict[float, Expr] = {}
    for t, k in terms:
        if size(t) == most:
            sign = "add" if k > 0 else "sub"
            wide[abs(k)] = call(sign, wide[abs(k)], t) if abs(k) in wide else t if k > 0 else call("neg", t)
    narrow = [(t, k) for t, k in terms if size(t) < most]
    if not narrow or len(wide) > FORMS.max_exponent_factors:
        return call("exp", x)
    result = named(_total([_scaled(*t) for t in narrow]))
    for factor, t in reversed(wide.items()):
        result = call("add", _scaled(*((t.args[0], -factor) if t.op == "neg" else (t, factor))), result)
    return call("quick_exp2" if quick else "exp2", result)


def quick_power(x: Expr) -> Expr:
    """exp(x) of an evaluated difference by a quick function."""
    return call("quick_exp2", call("mul", x, const(LOG2E, x.dtype)))


def _terms(x: Expr, factor: float) -> list[tuple[Expr, float]]:
    """Terms of a sum, each with what it is multiplied by."""
    if x.op in ("add", "sub"):
        sign = -1.0 if x.op == "sub" else 1.0
        return _terms(x.args[0], factor) + _terms(x.args[1], sign * factor)
    if x.op == "neg":
        return _terms(x.args[0], -factor)
    known = constant_factor(x)
    return [(x, factor)] if known is None else _terms(known[0], factor * known[1])


def _scaled(x: Expr, factor: float) -> Expr:
    return call("mul", x, const(factor * LOG2E, x.dtype))


def _total(terms: list[Expr]) -> Expr:
    result = terms[0]
    for t in terms[1:]:
        result = call("add", result, t)
    return result


def constant_factor(x: Expr) -> tuple[Expr, float] | None:
    """What a finite constant multiplies, and the constant."""
    if x.op != "mul" or not x.dtype.is_float:
        return None
    for a, b in (x.args, x.args[::-1]):
        if b.op == "const" and isinstance(b.value, (int, float, Fraction)) and math.isfinite(b.value):
            return a, float(b.value)
    return None


def unscale_maxima(form: Form) -> Form:
    """The form with positive constant factors taken out of its maxima."""
    items = [replace(i, body=tuple(_outward(b) for b in i.body)) for i in form.items]
    scales: dict[int, float] = {}
    for k, i in enumerate(items):
        found = (
            constant_factor(i.body[0])
            if i.reduction is not None and i.reduction.combiner == "maximum"
            else None
        )
        if found is not None and found[1] > 0 and len(i.body) == 1 and axes_of(found[0]):
            scales[i.id] = found[1]
            items[k] = replace(i, body=(found[0],))
    if not scales:
        return replace(form, items=tuple(items))

    def read(x: Expr) -> Expr | None:
        if x.op == "value" and isinstance(x.value, tuple) and x.value[0] in scales:
            plain = make("value", tuple(transform(a, read) for a in x.args), x.dtype, x.value)
            return call("mul", plain, const(scales[x.value[0]], x.dtype))
        return None

    made = [_rewritten(i, read) for i in items]
    return replace(form, items=tuple(replace(i, body=tuple(_outward(b) for b in i.body)) for i in made))


def use_log2(form: Form) -> Form:
    """The form with the logarithms that are terms of sums beside products of halves as quick ones: an absolute error
    far below what rounds the other term."""
    products = products_of_halves(form)

    def rounded(x: Expr) -> bool:
        return any(y.op == "value" and isinstance(y.value, tuple) and y.value[0] in products for y in walk(x))

    def visit(x: Expr) -> Expr | None:
        if x.op not in ("add", "sub") or not any(map(rounded, x.args)):
            return None
        found = tuple(
            call("mul", call("quick_log2", transform(a.args[0], visit)), const(1 / LOG2E, a.dtype))
            if a.op == "log" and a.dtype.compute is f32
            else transform(a, visit)
            for a in x.args
        )
        return rebuild(x, found)

    return replace(form, items=tuple(_rewritten(i, visit) for i in form.items))


def products_of_halves(form: Form) -> set[int]:
    """The numbers of the folds that are products of matrices, one of which lies in memory as halves."""
    return {
        i.id
        for i in form.folds.values()
        if i.halves is not None
        and product_sides(i) is not None
        and any(stored_half(f, form.params) for f in factors(i.body[0]))
    }


def use_erfc(form: Form) -> Form:
    """The form with 1 + erf(x) as erfc(-x) and 1 - erf(x) as erfc(x), where they are fp32."""

    def visit(x: Expr) -> Expr | None:
        inside = argument_of_erfc(x)
        return None if inside is None else call("quick_erfc", transform(inside, visit))

    return replace(form, items=tuple(_rewritten(i, visit) for i in form.items))


def argument_of_erfc(x: Expr) -> Expr | None:
    """The number of which an expression is 1 - erf, in fp32; None if it is no such thing."""
    if x.op not in ("add", "sub") or x.dtype is not f32:
        return None
    one, other = x.args if x.op == "sub" or is_const(x.args[0], 1) else x.args[::-1]
    if not is_const(one, 1) or other.op != "erf":
        return None
    return call("neg", other.args[0]) if x.op == "add" else other.args[0]


def _rewritten(item: Item, visit: Callable[[Expr], Expr | None]) -> Item:
    return replace(
        item, body=tuple(transform(b, visit) for b in item.body), offset=transform(item.offset, visit)
    )


def _outward(e: Expr) -> Expr:
    """where(p, c x, -inf) as c where(p, x, -inf), and c x == -inf as x == -inf, for c > 0, all through `e`."""
    memo: dict[Expr, Expr] = {}

    def go(x: Expr) -> Expr:
        done = memo.get(x)
        if done is None:
            inside = x.dtype.is_float or x.op == "eq"
            done = rebuild(x, tuple([go(a) for a in x.args])) if x.args and inside else x
            if done.op == "where":
                done = _pulled(done)
            elif done.op == "eq":
                done = _compared(done)
            memo[x] = done
        return done

    return go(e)


def _pulled(x: Expr) -> Expr:
    condition, yes, no = x.args
    for side, other in ((yes, no), (no, yes)):
        found = constant_factor(side)
        if (
            found is not None
            and found[1] > 0
            and other.op == "const"
            and other.value in (0, math.inf, -math.inf)
        ):
            inner = call("where", condition, *((found[0], other) if side is yes else (other, found[0])))
            return call("mul", inner, const(found[1], x.dtype))
    return x


def _compared(x: Expr) -> Expr:
    found = constant_factor(x.args[0])
    if found is not None and found[1] > 0 and x.args[1].op == "const" and x.args[1].value in _INFINITE:
        return call("eq", found[0], x.args[1])
    return x
