"""Extremes of monotone functions: max over j of f(c_j, y) = f(max over j of c_j, y) if f does not fall in c."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.ir.dtype import bool_
from tilewright.ir.expr import Expr, call, const, slot, where

from .running import Upstream
from .terms import Expansion

RISING = frozenset(
    {"exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "coarse_tanh", "quick_tanh", "sigmoid", "sqrt",
     "erf", "atan", "asinh", "sinh", "floor", "ceil", "trunc", "round"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Monotone:
    """`finish` (of slot a0 and complete results) at `data`; it does not fall (`rising`) or does not rise in it.

    `infinite`: it takes infinite data to infinity of the same sign, so that masked elements may stay away."""

    data: Expr
    finish: Expr
    rising: bool = True
    infinite: bool = True


@dataclass(frozen=True, slots=True)
class Decided:
    """A quantifier as extreme values: reductions (operation, body), and the result from slots a0.. ."""

    reductions: tuple[tuple[str, Expr], ...]
    finish: Expr


def extreme_of(x: Expansion, e: Expr, upstream: Sequence[Upstream]) -> Monotone | None:
    """`e` as a monotone function of one expression over data, if it is seen to be one."""
    if not x.reads(e):
        return Monotone(e, slot("a", 0, e.dtype)) if x.varies(e) else None
    if not x.varies(e):
        return None
    if e.op in RISING or (e.op in ("cast", "narrow") and e.dtype.is_float and e.args[0].dtype.is_float):
        inner = extreme_of(x, e.args[0], upstream)
        given = e.dtype if e.op in ("cast", "narrow") else None
        return _then(inner, lambda a: call(e.op, a, dtype=given), infinite=given is not None)
    if e.op == "neg":
        return _then(extreme_of(x, e.args[0], upstream), lambda a: call("neg", a), flip=True)
    if e.op == "where":
        return _masked(x, e, upstream)
    if e.op == "fma":
        return _fused(x, e, upstream)
    if len(e.args) != 2:
        return None
    first, second = e.args
    if x.varies(first) == x.varies(second):
        return None
    moving, still = (first, second) if x.varies(first) else (second, first)
    inner = extreme_of(x, moving, upstream)

    def put(a: Expr) -> Expr:
        return call(e.op, *((a, still) if moving is first else (still, a)))

    match e.op:
        case "add" | "sub":
            return _then(inner, put, flip=e.op == "sub" and moving is second)
        case "maximum" | "minimum":
            return _then(inner, put, infinite=False)
        case "mul" | "div" if nonnegative(still, upstream) and (e.op == "mul" or moving is first):
            return _then(inner, put, infinite=False)
        case _:
            return None


def _fused(x: Expansion, e: Expr, upstream: Sequence[Upstream]) -> Monotone | None:
    """a * b + c, rounded once, of which one operand varies: it never falls in c, nor in a where b is at least zero."""
    varying = [k for k, a in enumerate(e.args) if x.varies(a)]
    if len(varying) != 1:
        return None
    (moving,) = varying
    if moving < 2 and not nonnegative(e.args[1 - moving], upstream):
        return None

    def put(a: Expr) -> Expr:
        return call("fma", *e.args[:moving], a, *e.args[moving + 1 :])

    return _then(extreme_of(x, e.args[moving], upstream), put, infinite=moving == 2)


def _then(
    inner: Monotone | None, put: Callable[[Expr], Expr], flip: bool = False, infinite: bool = True
) -> Monotone | None:
    if inner is None:
        return None
    return Monotone(inner.data, put(inner.finish), inner.rising != flip, inner.infinite and infinite)


def _masked(x: Expansion, e: Expr, upstream: Sequence[Upstream]) -> Monotone | None:
    """Elements that are left out, as the identity: left out of the data as well."""
    condition, yes, no = e.args
    if x.reads(condition):
        return None
    for side, other, holds in ((yes, no, True), (no, yes, False)):
        if other.op != "const" or not isinstance(other.value, float) or not math.isinf(other.value):
            continue
        inner = extreme_of(x, side, upstream)
        if inner is None or not inner.infinite:
            return None
        limit = const(other.value if inner.rising else -other.value, inner.data.dtype)
        data = where(condition, inner.data, limit) if holds else where(condition, limit, inner.data)
        return Monotone(data, inner.finish, inner.rising)
    return None


def nonnegative(e: Expr, upstream: Sequence[Upstream]) -> bool:
    """Whether `e` is at least zero (or NaN), as far as its operations show it."""
    if e.op == "const":
        return isinstance(e.value, (int, float)) and e.value >= 0
    if e.op in ("exp", "exp2", "abs", "sqrt", "rsqrt", "sigmoid"):
        return True
    if e.op == "mul" and e.args[0] is e.args[1]:
        return True
    if e.op == "fma":
        squared = e.args[0] is e.args[1]
        return all(nonnegative(a, upstream) for a in (e.args[2:] if squared else e.args))
    if e.op in ("add", "mul", "div", "reciprocal", "cast", "narrow", "minimum"):
        return all(nonnegative(a, upstream) for a in e.args)
    if e.op == "maximum":
        return any(nonnegative(a, upstream) for a in e.args)
    if e.op == "where":
        return all(nonnegative(a, upstream) for a in e.args[1:])
    for u in upstream:
        if u.leaf is e and u.reduction.combiner in ("add", "maximum", "minimum"):
            return nonnegative(u.body[0], upstream)
    return False


_FLIPPED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt"}


def quantified(x: Expansion, combiner: str, body: Expr, upstream: Sequence[Upstream]) -> Decided | None:
    """any ("or") or all ("and") of `body`, a comparison of a monotone function of data with what does not vary.

    any(c >= y) = (max c >= y) and all(c >= y) = (min c >= y), where NaN never fulfils a comparison."""
    if body.op not in _FLIPPED:
        return None
    left, right = body.args
    if x.varies(left) == x.varies(right):
        return None
    op, moving, still = (body.op, left, right) if x.varies(left) else (_FLIPPED[body.op], right, left)
    found = extreme_of(x, moving, upstream)
    if found is None:
        return None
    largest = (op in ("ge", "gt")) == (combiner == "or")
    extreme = "maximum" if largest == found.rising else "minimum"
    decided = call(op, found.finish, still)
    if combiner == "and" or not found.data.dtype.is_float:
        return Decided(((extreme, found.data),), decided)
    number = call("not", call("isnan", found.data))
    worst = const(-math.inf if extreme == "maximum" else math.inf, found.data.dtype)
    data = where(number, found.data, worst)
    return Decided(((extreme, data), ("or", number)), call("and", decided, slot("a", 1, bool_)))
