"""Rank-1 transport: when the running maximum that a sum depends on moves, by which factor does the sum move?

A sum over elements of degree k in r, that is body(r') = body(r) * exp(k * (r - r')), is repaired by that factor.
`degree` decides it structurally; anything it cannot see is None, which costs a pass and is never wrong.
"""

from __future__ import annotations

from fractions import Fraction

from ..ir.expr import Expr, is_const, walk
from .form import Item


def degree(fold: Item, upstream: Item) -> Fraction | None:
    """k such that the sum `fold` scales by exp(k (r_old - r_new)) when the maximum `upstream` moves, or None."""
    if fold.reduction is None or upstream.reduction is None or len(fold.body) != 1:
        return None
    if (
        fold.reduction.combiner != "add"
        or upstream.reduction.combiner != "maximum"
        or not fold.body[0].dtype.is_float
    ):
        return None
    k = _degree(fold.body[0], upstream.id)
    return k if k else None


def _uses(e: Expr, fold: int) -> bool:
    return any(x.op == "value" and isinstance(x.value, tuple) and x.value[0] == fold for x in walk(e))


def _is(e: Expr, fold: int) -> bool:
    return e.op == "value" and isinstance(e.value, tuple) and e.value[0] == fold


def _degree(e: Expr, r: int) -> Fraction | None:
    """k with e(r') = e(r) exp(k (r - r')); None if e has no such form."""
    if not _uses(e, r):
        return Fraction(0)
    if e.op == "exp":
        return _shift(e.args[0], r)
    if e.op in ("mul", "div"):
        a, b = _degree(e.args[0], r), _degree(e.args[1], r)
        if a is None or b is None:
            return None
        return a + b if e.op == "mul" else a - b
    if e.op in ("add", "sub"):
        a, b = _degree(e.args[0], r), _degree(e.args[1], r)
        return a if a == b else None
    if e.op == "where" and not _uses(e.args[0], r):
        a, b = _degree(e.args[1], r), _degree(e.args[2], r)
        if is_const(e.args[2], 0):
            return a
        if is_const(e.args[1], 0):
            return b
        return a if a == b else None
    return _degree(e.args[0], r) if e.op in ("cast", "narrow", "neg") and e.dtype.is_float else None


def _shift(e: Expr, r: int) -> Fraction | None:
    """k with e(r') = e(r) + k (r - r'), for e inside an exp."""
    if not _uses(e, r):
        return Fraction(0)
    if _is(e, r):
        return Fraction(-1)
    if e.op in ("add", "sub"):
        a, b = _shift(e.args[0], r), _shift(e.args[1], r)
        if a is None or b is None:
            return None
        return a + b if e.op == "add" else a - b
    if e.op == "neg":
        a = _shift(e.args[0], r)
        return None if a is None else -a
    if e.op == "mul":
        for x, y in (e.args, e.args[::-1]):
            if y.op == "const" and isinstance(y.value, (int, float, Fraction)):
                a = _shift(x, r)
                return None if a is None else a * Fraction(y.value)
    if e.op == "where" and not _uses(e.args[0], r):
        a, b = _shift(e.args[1], r), _shift(e.args[2], r)
        if is_const(e.args[2], float("-inf")):
            return a
        if is_const(e.args[1], float("-inf")):
            return b
        return a if a == b else None
    return _shift(e.args[0], r) if e.op in ("cast", "narrow") and e.dtype.is_float else None
