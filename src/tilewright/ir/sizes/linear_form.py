"""Sizes as sums of monomials with whole coefficients, which is how they are compared and divided."""

from __future__ import annotations

from math import gcd, prod
from typing import NamedTuple

from tilewright.ir.dtype import Kind, bool_, i64
from tilewright.ir.expr import OF_PROGRAM, Axis, Expr, Symbol, make, show, uncomputed, written
from tilewright.ir.identity import expr_identity
from tilewright.tuning.search_limits import LINEAR_FORMS

Monomial = tuple[Expr, ...]

_MAX_INT64 = (1 << 63) - 1
_MAGNITUDE_LIMIT = 1 << 64
"""The largest magnitude that is told from others: more is not needed to say that something wraps around."""
_UNKNOWN_EXTENT = 1 << 32
"""The magnitude that an axis of unknown extent counts as: a product of two may wrap around, one times a stride may
not, as it is a place of a tensor."""
_MAX_INDEX_STRIDE = 1 << 30
"""Elements from one index of a tensor to the next: what is multiplied by as much or more is no place in memory."""
_ASSUMED_SIZE = 1 << 31
"""The magnitude that a size counts as in such a product. In a place it counts as 1, as it is a part of a stride."""
_DATA = ("read", "value", "var")
_RING = ("add", "sub", "neg", "mul")
_BOUNDED = (*_RING, "floordiv", "mod", "maximum", "minimum", "where", "abs")
"""Operations on integers whose results are no larger than their arguments say."""

Linear = dict[Monomial, int]


def key_of(atom: Expr) -> str:
    """By which atoms of a monomial are ordered."""
    value = atom.value
    if isinstance(value, (Axis, Symbol)):
        return value.name
    return "~" + (
        show(atom) if written(atom) <= LINEAR_FORMS.max_readable_nodes else expr_identity(atom).hex()
    )


def linear(e: Expr) -> Linear:
    """The normal form of index expression `e`: monomial (sorted atoms) -> coefficient. Do not change the result.
    Expressions may be of any depth. A sum or product that would have too many terms is an atom itself; so is one that
    the program wrote over places and sizes and that might exceed an int64."""
    if e.linear_memo is not None:
        return e.linear_memo
    if e.op not in _RING:
        form: Linear = {(e,): 1}
        if e.op == "const":
            assert isinstance(e.value, int)
            form = {(): e.value} if e.value else {}
        e.linear_memo = form
        return form
    for x in uncomputed(e, lambda x: x.linear_memo is not None or x.op not in _RING):
        combined = _of_parts(x.op, [linear(a) for a in x.args])
        own = (
            x.value is OF_PROGRAM
            and combined is not None
            and not _has_data(combined)
            and _largest(combined) > _MAX_INT64
        )
        x.linear_memo = {(x,): 1} if combined is None or own else combined
    return linear(e)


def marked(e: Expr) -> Expr:
    """A sum or product that the program wrote, marked if it might exceed an int64. Data say so themselves, but places
    may stand for these later."""
    if e.op not in _RING:
        return e
    form = linear(e)
    return make(e.op, e.args, e.dtype, OF_PROGRAM) if _has_data(form) or _largest(form) > _MAX_INT64 else e


def _has_data(form: Linear) -> bool:
    return any(_reach(atom).any_size for m in form for atom in m)


def _largest(form: Linear) -> int:
    """A bound of the magnitude of what a program computes from places and sizes."""
    return min(sum(abs(c) * prod(_reach(atom).far for atom in m) for m, c in form.items()), _MAGNITUDE_LIMIT)


def _of_parts(op: str, parts: list[Linear]) -> Linear | None:
    """The form of a sum, difference, negation or product of forms; None if it has too many terms."""
    if op == "mul":
        return short_product(*parts)
    form = parts[0] if op != "neg" else sum_of({}, parts[0], -1)
    if op != "neg":
        form = sum_of(form, parts[1], 1 if op == "add" else -1)
    return form if is_short(form) else None


def short_product(a: Linear, b: Linear) -> Linear | None:
    """a * b; None if it has too many terms. What has them before some cancel is not multiplied out."""
    if len(a) * len(b) > LINEAR_FORMS.max_terms:
        moving, others = (sum(map(_moves, form)) for form in (a, b))
        if (
            max(
                len(a) * len(b) - LINEAR_FORMS.max_size_terms,
                moving * len(b) + others * (len(a) - moving) - LINEAR_FORMS.max_terms,
            )
            > 0
        ):
            return None
    form = product_of(a, b)
    return form if is_short(form) else None


def is_short(form: Linear) -> bool:
    """Whether a form is kept as a sum of its terms."""
    if len(form) > LINEAR_FORMS.max_size_terms or any(
        abs(c) >> LINEAR_FORMS.max_coefficient_bits for c in form.values()
    ):
        return False
    if any(
        len(m) > LINEAR_FORMS.max_factors and (len(m) > LINEAR_FORMS.max_size_terms or _moves(m))
        for m in form
    ):
        return False
    return len(form) <= LINEAR_FORMS.max_terms or sum(map(_moves, form)) <= LINEAR_FORMS.max_terms


def _moves(m: Monomial) -> bool:
    """Whether axes or data decide a term, not sizes alone."""
    return any(not isinstance(a.value, Symbol) and _reach(a).moves for a in m)


class _Reach(NamedTuple):
    """What is known of an integer: the largest magnitude that numbers, axes or a narrow type decide (0 if data of any
    size do), that of arithmetic that the program wrote, whether data of any size are in it, and whether axes or data
    are, or numbers alone (that wrapped around)."""

    most: int
    far: int
    any_size: bool
    moves: bool


def _reach(e: Expr) -> _Reach:
    for x in uncomputed(e, lambda x: x.reach_memo is not None):
        moves = x.op in ("axis", *_DATA) or any(_reach(a).moves for a in x.args)
        moves = moves or (bool(x.args) and all(a.op == "const" for a in x.args))
        x.reach_memo = _Reach(
            min(_most(x), _MAGNITUDE_LIMIT), min(_far(x), _MAGNITUDE_LIMIT), _is_any_size(x), moves
        )
    assert isinstance(e.reach_memo, _Reach)
    return e.reach_memo


def _is_any_size(e: Expr) -> bool:
    """Whether an integer may be of any size, for an expression whose parts are known: what no rule here bounds is."""
    if e.op in _DATA:
        return e.dtype.kind is Kind.FLOAT or e.dtype.bytes >= i64.bytes
    if e.op == "cast" and e.dtype is i64:
        return e.args[0].dtype.is_float or (not _is_narrow(e.args[0]) and _reach(e.args[0]).any_size)
    if e.op == "checked":
        return False
    if e.value is OF_PROGRAM and linear(e) == {(e,): 1}:
        return True
    if e.dtype is i64 and e.args and e.op not in _BOUNDED:
        return True
    parts = e.args[1:] if e.op in ("mod", "where") else e.args
    return any(_reach(a).any_size for a in parts)


def _is_narrow(e: Expr) -> bool:
    """Whether the type of an expression bounds it within an int64."""
    return e.dtype is bool_ or (e.dtype.kind in (Kind.INT, Kind.UINT) and e.dtype.bytes < i64.bytes)


def may_wrap(e: Expr) -> bool:
    """Whether `e` is arithmetic of integers from data that may be of any size, or of places that exceeds an int64: then
    it may have wrapped around, and the quotients of its terms are not the terms of its quotient."""
    form = linear(e)
    if e.op not in _RING and form == {(e,): 1}:
        return False
    return beyond(form) or any(_reach(atom).any_size for m in form for atom in m)


def beyond(form: Linear) -> bool:
    """Whether terms that data of any size do not decide may together exceed an int64: a sum that is no place. What is
    known of the range of such a sum does not hold once it has wrapped around."""
    low, high = _ends(form)
    return high > _MAX_INT64 or low < -_MAX_INT64 - 1


def _ends(form: Linear) -> tuple[int, int]:
    """Numbers between which the terms lie that data of any size do not decide."""
    low = high = 0
    for m, c in form.items():
        size = c * (_MAGNITUDE_LIMIT if is_arithmetic(m) else prod(_reach(atom).most for atom in m))
        if abs(c) >= _MAX_INDEX_STRIDE:
            size *= _ASSUMED_SIZE ** sum(isinstance(atom.value, Symbol) for atom in m)
        signed = any(atom.op not in ("axis", "symbol", "mod", "abs") for atom in m)
        low += -abs(size) if signed else min(size, 0)
        high += abs(size) if signed else max(size, 0)
    return low, high


def is_arithmetic(m: Monomial) -> bool:
    """Whether a product has more sizes than a place of a tensor: what is indexed by an axis is one of its dims."""
    if len(m) < LINEAR_FORMS.max_equal_dims:
        return False
    sizes = [atom for atom in m if isinstance(atom.value, Symbol)]
    moving = any(atom.op == "axis" for atom in m)
    most = max(map(sizes.count, sizes), default=0)
    return most + moving > LINEAR_FORMS.max_equal_dims or len(sizes) + moving > LINEAR_FORMS.max_unknown_dims


def _most(e: Expr) -> int:
    """The magnitude of `_Reach`, for an expression whose parts have theirs."""
    if e.op == "cast" or e.op in _DATA:
        held = e.args[0] if e.op == "cast" else e
        if held.dtype is bool_:
            return 1
        if _is_narrow(held):
            return 1 << 8 * held.dtype.bytes
        return _magnitude(held) if e.op == "cast" and held.dtype is i64 else 0
    if isinstance(e.value, Axis):
        last = linear(e.value.extent)
        return max(last.get((), 0) - 1, 0) if last.keys() <= {()} else _UNKNOWN_EXTENT
    if isinstance(e.value, Symbol):
        return 1  # it is part of a stride, see `_ASSUMED_SIZE`
    if e.op in ("maximum", "minimum", "where", "abs") and e.dtype is i64:
        return max(_magnitude(a) for a in (e.args[1:] if e.op == "where" else e.args))
    if e.op in _RING:
        return _most_of_parts(e)
    if e.op not in ("floordiv", "mod") or e.dtype is not i64:
        return 0
    by = e.args[1].value if e.args[1].op == "const" else None
    if not isinstance(by, int) or by == 0:  # a size, or data
        return min(max(_magnitude(e.args[0]), _UNKNOWN_EXTENT if e.op == "mod" else 0), 1 << 63)
    low, high = _ends(linear(e.args[0]))
    size = min(max(-low, high), 1 << 63)
    # What wraps around, or lies below zero, may have any remainder.
    return -(-size // abs(by)) if e.op == "floordiv" else abs(by) - 1 if low < 0 else min(size, abs(by) - 1)


def _far(e: Expr) -> int:
    """The same where the program wrote the arithmetic. A size without a bound counts as one that memory can hold."""
    if isinstance(e.value, Symbol):
        return _ASSUMED_SIZE if e.value.high is None else max(abs(e.value.low), e.value.high)
    if isinstance(e.value, Axis):
        last = linear(e.value.extent)
        return max(last.get((), 0) - 1, 0) if last.keys() <= {()} else min(_largest(last), _ASSUMED_SIZE)
    if e.op == "checked":
        return _ASSUMED_SIZE
    if e.op in ("floordiv", "mod") and e.dtype is i64:
        by = e.args[1].value if e.args[1].op == "const" else None
        if isinstance(by, int) and by:
            return _largest(linear(e.args[0])) // abs(by) + 1 if e.op == "floordiv" else abs(by) - 1
        return _largest(linear(e.args[e.op == "mod"]))
    if e.dtype is i64 and e.op in _BOUNDED:
        sizes = [_largest(linear(a)) for a in (e.args[1:] if e.op == "where" else e.args)]
        return prod(sizes) if e.op == "mul" else sum(sizes) if e.op in _RING else max(sizes)
    return _most(e)


def _magnitude(e: Expr) -> int:
    low, high = _ends(linear(e))
    return max(-low, high)


def _most_of_parts(e: Expr) -> int:
    """The magnitude of a sum or product that is an atom; of another one, nothing that its terms do not say."""
    if e.dtype is not i64:
        return 0
    sizes = [_magnitude(a) for a in e.args]
    return prod(sizes) if e.op == "mul" else sum(sizes)


def held(form: Linear) -> Linear | None:
    """The same number to an int64, which is whole up to multiples of 2^64, with coefficients that it holds: a constant
    that arithmetic gives has wrapped around. None if all are so."""
    if all(-_MAX_INT64 - 1 <= c <= _MAX_INT64 for c in form.values()):
        return None
    wrapped = {m: (c + _MAX_INT64 + 1) % _MAGNITUDE_LIMIT - _MAX_INT64 - 1 for m, c in form.items()}
    return {m: c for m, c in wrapped.items() if c}


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


class Digit(NamedTuple):
    """The term of a form that has a digit of a number, and how many values that has."""

    term: Monomial
    values: int


def next_digit(form: Linear, lower: Linear, quotient: Expr, size: int) -> Digit | None:
    """The digit of the `quotient` beside one of `size` values that `lower`, a single term, is multiplied with: the term
    that has `size` times as much of `quotient % count`. None if there is none."""
    ((others, c),) = lower.items()
    for n, d in form.items():
        if d != c * size:
            continue
        for j, atom in enumerate(n):
            if atom.op == "mod" and atom.args[0] is quotient and n[:j] + n[j + 1 :] == others:
                count = atom.args[1].value if atom.args[1].op == "const" else None
                if isinstance(count, int) and count > 0:
                    return Digit(n, count)
    return None


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
        times, left = divmod(d, c)
        if times:
            quotient[q] = times
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


def shifted_nonnegative(form: Linear, bound: int) -> bool:
    """Substitute s = low + s' (s' >= 0); the form is nonnegative if no coefficient is negative and the constant holds.
    Negative terms may also be bounded by the symbols' highs."""
    shifted: Linear = {(): -bound}
    for m, c in form.items():
        part: Linear = {(): c}
        for atom in m:
            value = atom.value
            assert isinstance(value, Symbol)
            part = product_of(part, {(atom,): 1, (): value.low} if value.low else {(atom,): 1})
        shifted = sum_of(shifted, part, 1)
    constant = shifted.pop((), 0)
    for m, c in shifted.items():
        if c < 0:
            high = 1
            for atom in m:
                value = atom.value
                assert isinstance(value, Symbol)
                if value.high is None:
                    return False
                high *= value.high - value.low
            constant += c * high
    return constant >= 0


def divisible(e: Expr, by: int) -> bool:
    """Whether `by` is proved to divide `e`."""
    return all(c % by == 0 for c in linear(e).values())
