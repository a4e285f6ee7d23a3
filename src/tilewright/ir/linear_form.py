"""Sizes as sums of monomials with whole coefficients, which is how they are compared and divided."""

from __future__ import annotations

from functools import lru_cache
from math import gcd, prod

from .dtype import Kind, i64
from .expr import Axis, Expr, Symbol, show, written
from .identity import expr_identity

Monomial = tuple[Expr, ...]

_READABLE = 256
"""Nodes of an atom that is ordered by its text; the text of one that shares its parts may have no end."""
_LARGEST = (1 << 63) - 1
_DATA = ("read", "value", "var")

Linear = dict[Monomial, int]


def key_of(atom: Expr) -> str:
    """By which atoms of a monomial are ordered."""
    value = atom.value
    if isinstance(value, (Axis, Symbol)):
        return value.name
    return "~" + (show(atom) if written(atom) <= _READABLE else expr_identity(atom).hex())


def linear(e: Expr) -> Linear:
    """The normal form of index expression `e`: monomial (sorted atoms) -> coefficient. Do not change the result."""
    if isinstance(e.linear_memo, dict):
        return e.linear_memo
    if e.op == "const":
        assert isinstance(e.value, int)
        form: Linear = {(): e.value} if e.value else {}
    elif e.op == "add":
        form = sum_of(linear(e.args[0]), linear(e.args[1]), 1)
    elif e.op == "sub":
        form = sum_of(linear(e.args[0]), linear(e.args[1]), -1)
    elif e.op == "neg":
        form = {m: -c for m, c in linear(e.args[0]).items()}
    elif e.op == "mul":
        form = product_of(linear(e.args[0]), linear(e.args[1]))
    else:
        form = {(e,): 1}
    e.linear_memo = form
    return form


def may_wrap(e: Expr) -> bool:
    """Whether `e` is arithmetic of integers from data that may be of any size, or of places that exceeds an int64: then
    it may have wrapped around, and the quotients of its terms are not the terms of its quotient."""
    form = linear(e)
    if form == {(e,): 1}:
        return False
    return beyond(form) or any(_any_size(atom) for m in form for atom in m)


def beyond(form: Linear) -> bool:
    """Whether terms without sizes that are unknown may together exceed an int64: a sum that is no place of anything.
    What is known of the range of such a sum does not hold once it has wrapped around."""
    low, high = _ends(form)
    return high > _LARGEST or low < -_LARGEST - 1


def _ends(form: Linear) -> tuple[int, int]:
    """Numbers between which the terms lie that sizes and data of any size do not decide."""
    low = high = 0
    for m, c in form.items():
        size = c * prod(map(_most, m))
        signed = any(atom.op in ("floordiv", "cast", *_DATA) for atom in m)
        low += -abs(size) if signed else min(size, 0)
        high += abs(size) if signed else max(size, 0)
    return low, high


@lru_cache(1 << 14)
def _most(e: Expr) -> int:
    """The largest magnitude of an atom that numbers or a narrow type decide; 0 if sizes or data do."""
    if e.op == "cast" or e.op in _DATA:
        narrow = e.args[0] if e.op == "cast" else e
        held = narrow.op in _DATA and narrow.dtype.kind in (Kind.INT, Kind.UINT)
        return 1 << 8 * narrow.dtype.bytes if held and narrow.dtype.bytes < i64.bytes else 0
    if isinstance(e.value, Axis):
        last = linear(e.value.extent)
        return max(last.get((), 0) - 1, 0) if last.keys() <= {()} else 0
    by = e.args[1].value if e.op in ("floordiv", "mod") and e.args[1].op == "const" else 0
    if not isinstance(by, int) or by == 0:
        return 0
    low, high = _ends(linear(e.args[0]))
    size = min(max(-low, high), 1 << 63)
    # What wraps around, or lies below zero, may have any remainder.
    return -(-size // abs(by)) if e.op == "floordiv" else abs(by) - 1 if low < 0 else min(size, abs(by) - 1)


@lru_cache(1 << 14)
def _any_size(e: Expr) -> bool:
    if e.op in _DATA:
        return e.dtype.kind is Kind.FLOAT or e.dtype.bytes >= i64.bytes
    if e.op == "checked":
        return False
    return any(map(_any_size, e.args[1:] if e.op == "mod" else e.args))


def sum_of(a: Linear, b: Linear, sign: int) -> Linear:
    """a + sign * b."""
    out = dict(a)
    for m, c in b.items():
        total = out.get(m, 0) + sign * c
        if total:
            out[m] = total
        else:
            out.pop(m, None)
    return out


def product_of(a: Linear, b: Linear) -> Linear:
    """a * b."""
    out: Linear = {}
    for m, c in a.items():
        for n, d in b.items():
            key = tuple(sorted(m + n, key=key_of)) if m and n else m or n
            total = out.get(key, 0) + c * d
            if total:
                out[key] = total
            else:
                out.pop(key, None)
    return out


def monomial_of(e: Expr) -> tuple[Monomial, int] | None:
    """The one monomial that an expression is, with its coefficient; None if it is no single one."""
    form = linear(e)
    if len(form) != 1:
        return None
    ((m, c),) = form.items()
    return m, c


def quotient_of(m: Monomial, by: Monomial) -> Monomial | None:
    """What is left of a monomial divided by another; None if it does not divide."""
    rest = list(m)
    for atom in by:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def split_by(form: Linear, m: Monomial, c: int) -> tuple[Linear, Linear]:
    """Terms divisible by the monomial c*m, divided by it; and the others."""
    quotient: Linear = {}
    rest: Linear = {}
    for n, d in form.items():
        q = quotient_of(n, m)
        if q is None:
            rest[n] = d
            continue
        whole, left = divmod(d, c)
        if whole:
            quotient[q] = whole
        if left:
            rest[n] = left
    return quotient, rest


def common_factors(form: Linear, m: Monomial, c: int) -> list[tuple[Monomial, int]]:
    """Greatest common factors of the terms of `form` with c*m, other than 1; larger ones first."""
    found: dict[tuple[Monomial, int], None] = {}
    for n, d in form.items():
        rest = list(m)
        shared: list[Expr] = []
        for atom in n:
            if atom in rest:
                rest.remove(atom)
                shared.append(atom)
        factor = (tuple(sorted(shared, key=key_of)), gcd(c, d))
        if factor != ((), 1):
            found[factor] = None
    return sorted(found, key=lambda f: (len(f[0]), f[1]), reverse=True)


def needs_bound(atom: Expr) -> bool:
    """Whether an atom says nothing about its sign by itself."""
    return not isinstance(atom.value, Symbol)
