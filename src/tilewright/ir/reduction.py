"""Reductions with state: one declaration gives the identity, the step, the merge and the finish.

A reduction folds elements into a state, a tuple of typed values. It is associative: `merge` of the states of two parts
is the state of the whole, so a reduction may be split, vectorised in lanes, or run as an ordered scan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .dtype import DType, Kind, bool_, f32, i64
from .expr import Expr, call, const, slot, substitute, where


@dataclass(frozen=True, slots=True)
class Reduction:
    """`lift` makes the state of one element from slots e0.. (types `elements`); `merge` joins slots a0.. (earlier) and
    b0.. (later); `finish` makes the results from a0..; `identity` is the state of no element."""

    name: str
    elements: tuple[DType, ...]
    state: tuple[DType, ...]
    identity: tuple[Expr, ...]
    lift: tuple[Expr, ...]
    merge: tuple[Expr, ...]
    finish: tuple[Expr, ...]
    extreme: str | None = None
    """For a state (value, place): the operation ("maximum", "minimum") of which the value is the extreme one, at the
    first place where it occurs (-1: no element yet)."""
    step: tuple[Expr, ...] = ()
    """The state after one more element, from slots a0.. and e0.., where that takes less than a merge with the state of
    the element (empty: it does not)."""
    pooled: tuple[Expr, ...] = ()
    """What of a part's state (slots a0..) adds up to the state of the whole (slots b0..), first to those values that
    mention no b, then to the others. Empty: parts are merged two at a time."""

    @property
    def combiner(self) -> str | None:
        """The scalar operation that merges a state of one value ("add", "maximum", ...), or None if it is a tuple."""
        only = self.merge[0]
        return (
            only.op
            if len(self.state) == 1 and len(only.args) == 2 and all(a.op == "slot" for a in only.args)
            else None
        )

    @property
    def combiners(self) -> tuple[str, ...]:
        """The scalar operation that merges each value of the state if none depends on others, else nothing."""
        simple = all(
            len(m.args) == 2 and m.args == (slot("a", k, t), slot("b", k, t))
            for k, (m, t) in enumerate(zip(self.merge, self.state, strict=True))
        )
        return tuple(m.op for m in self.merge) if simple else ()

    def lifted(self, elements: Sequence[Expr]) -> tuple[Expr, ...]:
        """The state of one element."""
        return _fill(self.lift, "e", self.elements, elements)

    def merged(self, a: Sequence[Expr], b: Sequence[Expr]) -> tuple[Expr, ...]:
        """The state of two parts, `a` before `b`."""
        mapping = {slot("a", k, t): v for k, (t, v) in enumerate(zip(self.state, a, strict=True))}
        mapping |= {slot("b", k, t): v for k, (t, v) in enumerate(zip(self.state, b, strict=True))}
        return tuple(substitute(m, mapping) for m in self.merge)

    def stepped(self, state: Sequence[Expr], elements: Sequence[Expr]) -> tuple[Expr, ...]:
        """The state after one more element."""
        if not self.step:
            return self.merged(state, self.lifted(elements))
        mapping = {slot("a", k, t): v for k, (t, v) in enumerate(zip(self.state, state, strict=True))}
        mapping |= {slot("e", k, t): v for k, (t, v) in enumerate(zip(self.elements, elements, strict=True))}
        return tuple(substitute(x, mapping) for x in self.step)

    def finished(self, state: Sequence[Expr]) -> tuple[Expr, ...]:
        """The results of a complete state."""
        return _fill(self.finish, "a", self.state, state)

    @property
    def results(self) -> tuple[DType, ...]:
        """Types of the results."""
        return tuple(f.dtype for f in self.finish)


def _fill(
    of: tuple[Expr, ...], side: str, types: tuple[DType, ...], values: Sequence[Expr]
) -> tuple[Expr, ...]:
    mapping = {slot(side, k, t): v for k, (t, v) in enumerate(zip(types, values, strict=True))}
    return tuple(substitute(x, mapping) for x in of)


def _simple(name: str, op: str, dtype: DType, identity: float | bool) -> Reduction:
    return replace(simple(op, dtype, const(identity, dtype)), name=name)


def lowest(dtype: DType) -> float:
    """The identity of max in `dtype`."""
    if dtype.is_float:
        return -math.inf
    if dtype.kind is Kind.INT:
        return -(1 << (8 * dtype.bytes - 1))
    return 0


def highest(dtype: DType) -> float:
    """The identity of min in `dtype`."""
    if dtype.is_float:
        return math.inf
    if dtype.kind is Kind.BOOL:
        return 1
    return (1 << (8 * dtype.bytes - (1 if dtype.kind is Kind.INT else 0))) - 1


def simple(op: str, dtype: DType, identity: Expr) -> Reduction:
    """Values merged by a scalar operation, of which `identity` is the neutral one."""
    a, b, e = slot("a", 0, dtype), slot("b", 0, dtype), slot("e", 0, dtype)
    return Reduction(op, (dtype,), (dtype,), (identity,), (e,), (call(op, a, b),), (a,))


def sum_(dtype: DType) -> Reduction:
    """Sum; the caller gives elements of the accumulation type."""
    return _simple("sum", "add", dtype, 0)


def product(dtype: DType) -> Reduction:
    """Product."""
    return _simple("prod", "mul", dtype, 1)


def maximum(dtype: DType) -> Reduction:
    """Maximum; NaN wins."""
    return _simple("max", "maximum", dtype, lowest(dtype))


def minimum(dtype: DType) -> Reduction:
    """Minimum; NaN wins."""
    return _simple("min", "minimum", dtype, highest(dtype))


def any_() -> Reduction:
    """Disjunction of bools."""
    return _simple("any", "or", bool_, False)


def all_() -> Reduction:
    """Conjunction of bools."""
    return _simple("all", "and", bool_, True)


def _arg(name: str, dtype: DType, better: str, identity: float) -> Reduction:
    """State (value, index): the first of equals wins, the first NaN wins over all. Index -1 = no element yet."""
    av, bv, ai, bi = slot("a", 0, dtype), slot("b", 0, dtype), slot("a", 1, i64), slot("b", 1, i64)
    wins = call(better, bv, av)
    if dtype.is_float:
        nan_a, nan_b = call("isnan", av), call("isnan", bv)
        wins = call("or", call("and", nan_b, call("not", nan_a)), call("and", wins, call("not", nan_a)))
        tie = call("or", call("eq", av, bv), call("and", nan_a, nan_b))
    else:
        tie = call("eq", av, bv)
    none = const(0, i64)
    empty_a, empty_b = call("lt", ai, none), call("lt", bi, none)
    earlier = call("and", tie, call("lt", bi, ai))
    take_b = call("and", call("not", empty_b), call("or", empty_a, call("or", wins, earlier)))
    return Reduction(
        name, (dtype, i64), (dtype, i64), (const(identity, dtype), const(-1, i64)),
        (slot("e", 0, dtype), slot("e", 1, i64)), (where(take_b, bv, av), where(take_b, bi, ai)), (av, ai),
        "maximum" if better == "gt" else "minimum",
    )  # fmt: skip


def argmax(dtype: DType) -> Reduction:
    """(max, index of its first occurrence); elements are (value, index)."""
    return _arg("argmax", dtype, "gt", lowest(dtype))


def argmin(dtype: DType) -> Reduction:
    """(min, index of its first occurrence); elements are (value, index)."""
    return _arg("argmin", dtype, "lt", highest(dtype))


def moments(dtype: DType = f32) -> Reduction:
    """(count, mean, sum of squared deviations), merged as Chan, Golub and LeVeque (1979) do; results in that order."""
    one, zero = const(1, dtype), const(0, dtype)
    na, ma, sa = (slot("a", k, dtype) for k in range(3))
    nb, mb, sb = (slot("b", k, dtype) for k in range(3))
    n = call("add", na, nb)
    share = where(call("eq", n, zero), zero, call("div", nb, n))
    delta = call("sub", mb, ma)
    moved = call("mul", delta, share)
    spread = call("add", call("add", sa, sb), call("mul", call("mul", delta, na), moved))
    return Reduction(
        "moments", (dtype,), (dtype,) * 3, (zero,) * 3, (one, slot("e", 0, dtype), zero),
        (n, call("add", ma, moved), spread), (na, ma, sa),
    )  # fmt: skip


def logsumexp(dtype: DType = f32) -> Reduction:
    """log(sum(exp(x))) by the pair (maximum, sum of exp(x - maximum)); a part whose maximum is -inf counts nothing."""
    ma, sa, mb, sb = slot("a", 0, dtype), slot("a", 1, dtype), slot("b", 0, dtype), slot("b", 1, dtype)
    top = call("maximum", ma, mb)
    empty, zero = const(-math.inf, dtype), const(0, dtype)

    def part(m: Expr, s: Expr) -> Expr:
        return where(call("eq", m, top), s, call("mul", s, call("exp", call("sub", m, top))))

    total = where(call("eq", top, empty), zero, call("add", part(ma, sa), part(mb, sb)))
    return Reduction(
        "logsumexp", (dtype,), (dtype, dtype), (empty, zero), (slot("e", 0, dtype), const(1, dtype)), (top, total),
        (call("add", ma, call("log", sa)),),
    )  # fmt: skip


def scaled(value: Expr, count: Expr) -> Expr:
    """`value / count` for a count given as an index expression (the division that makes a mean)."""
    return call("div", value, call("cast", count, dtype=value.dtype))
