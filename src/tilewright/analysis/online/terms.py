"""Sums of terms: a body as a function of the results that it reads.

With u = anchor - r for a result r that still moves (a *statistic*), a body is written as

    g = sum of  q * data * results * u^p * exp(k u)

where `data` varies from element to element, `results` depends on complete results only, and q and k are rational. Most
bodies that occur have this form; what has not is `Mixed`, with the reason.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TypeVar

from tilewright.ir.dtype import DType
from tilewright.ir.expr import (
    Axis,
    Expr,
    call,
    conjuncts,
    const,
    is_const,
    substitute,
    transform,
    walk,
    where,
)
from tilewright.tuning.search_limits import ONLINE

Rate = tuple[int, str]
"""A statistic and the base in which it stands in an exponent: "exp" or "exp2"."""


K = TypeVar("K")
N = TypeVar("N", int, Fraction)


class Mixed(Exception):
    """A body that is no such sum; `args[0]` says why."""


@dataclass(frozen=True, slots=True)
class RunningStatistic:
    """What a body reads of a result that moves: `through`, that result or a function of it; u = `anchor` - `through`.

    `leaf` is the result. `centred` says that `through` is the mean of `anchor`, of those elements seen so far;
    `bounded` that an extreme and something else is meant, so that it is never the identity. `rising`: a maximum."""

    leaf: Expr
    through: Expr
    anchor: Expr
    centred: bool = False
    bounded: bool = False
    rising: bool = True

    @property
    def open(self) -> bool:
        """Whether it may stand at an infinite identity, where shifts from it mean nothing."""
        return not (self.centred or self.bounded)

    @property
    def closed(self) -> bool:
        """Whether its value follows from its state alone."""
        rest = substitute(self.through, {self.leaf: const(0.0, self.leaf.dtype)})
        return not any(x.op in ("read", "value", "axis") for x in walk(rest))


@dataclass(frozen=True, slots=True)
class Mono:
    """A product of powers, without its rational factor. Conditions count as factors 0 or 1 among `data`."""

    data: frozenset[tuple[Expr, int]] = frozenset()
    results: frozenset[tuple[Expr, int]] = frozenset()
    powers: frozenset[tuple[int, int]] = frozenset()
    rates: frozenset[tuple[Rate, Fraction]] = frozenset()


Poly = dict[Mono, Fraction]
ONE = Mono()


def constant(value: Fraction | int) -> Poly:
    """A number."""
    return {ONE: Fraction(value)} if value else {}


def plus(a: Poly, b: Poly, times: Fraction | int = 1) -> Poly:
    """a + times * b."""
    out = dict(a)
    for m, q in b.items():
        total = out.get(m, Fraction(0)) + q * times
        if total:
            out[m] = total
        else:
            out.pop(m, None)
    return out


def product(a: Poly, b: Poly) -> Poly:
    """a * b. Raises Mixed if it has too many terms."""
    out: Poly = {}
    for m, p in a.items():
        for n, q in b.items():
            made = joined(m, n)
            if made is not None:
                out = plus(out, {made: p * q})
    if len(out) > ONLINE.max_terms:
        raise Mixed(f"its body has more than {ONLINE.max_terms} terms")
    return out


def joined(m: Mono, n: Mono) -> Mono | None:
    """The product of two monomials; None if their conditions exclude each other."""
    data = _added(m.data, n.data)
    for x in data:
        if not x.dtype.is_float:
            data[x] = 1
            if (x.args[0] if x.op == "not" else call("not", x)) in data:
                return None
    return Mono(
        frozenset(data.items()),
        frozenset(_added(m.results, n.results).items()),
        frozenset(_added(m.powers, n.powers).items()),
        frozenset(_added(m.rates, n.rates).items()),
    )


def _added(m: Iterable[tuple[K, N]], n: Iterable[tuple[K, N]]) -> dict[K, N]:
    total = dict(m)
    for x, k in n:
        if x in total:
            k = total[x] + k
        if k:
            total[x] = k
        else:
            total.pop(x, None)
    return total


def slope(p: Poly, statistic: int) -> Poly:
    """The derivative of the polynomial part of `p` by the u of a statistic; exponentials stay."""
    out: Poly = {}
    for m, q in p.items():
        power = dict(m.powers).get(statistic, 0)
        if power:
            rest = frozenset((g, k - (g == statistic)) for g, k in m.powers if g != statistic or k > 1)
            out = plus(out, {Mono(m.data, m.results, rest, m.rates): q * power})
    return out


def ratio(p: Poly, q: Poly) -> Fraction | None:
    """p / q if that is a number."""
    if p.keys() != q.keys():
        return None
    first, *rest = {c / q[m] for m, c in p.items()} or {Fraction(1)}
    return None if rest else first


@lru_cache(1 << 14)
def fingerprint(e: Expr) -> bytes:
    """A place in an order of expressions that is the same in every run."""
    own = f"{e.op} {e.dtype} {e.value!r}".encode()
    return hashlib.blake2b(b"".join((own, *map(fingerprint, e.args))), digest_size=8).digest()


def ordered(factors: Iterable[tuple[Expr, int]]) -> list[tuple[Expr, int]]:
    """Powers of expressions in that order."""
    return sorted(factors, key=lambda f: fingerprint(f[0]))


def number(q: Fraction, dtype: DType) -> Expr:
    """A rational constant; a plain float where that is exact."""
    return const(float(q) if Fraction(float(q)) == q else q, dtype)


def expression(p: Poly, statistics: Sequence[RunningStatistic], dtype: DType) -> Expr:
    """`p` as an expression of type `dtype`, with u = anchor - through."""
    total: Expr | None = None
    for m, q in p.items():
        term = _term(m, abs(q), statistics, dtype)
        if total is None:
            total = term if q > 0 else call("neg", term)
        else:
            total = call("add" if q > 0 else "sub", total, term)
    return total if total is not None else const(0.0, dtype)


def _term(m: Mono, q: Fraction, statistics: Sequence[RunningStatistic], dtype: DType) -> Expr:
    def shift(g: int) -> Expr:
        return call("sub", statistics[g].anchor, statistics[g].through)

    factors: list[tuple[Expr, int]] = []
    for (g, base), k in sorted(m.rates):
        u = shift(g)
        factors.append((call(base, u if k == 1 else call("mul", u, number(k, u.dtype))), 1))
    factors += [(shift(g), k) for g, k in sorted(m.powers)]
    numbers = ordered((*m.data, *m.results))
    factors += [(x, k) for x, k in numbers if x.dtype.is_float]
    made = number(q, dtype) if q != 1 or not any(k > 0 for _, k in factors) else None
    for x, k in sorted(factors, key=lambda f: f[1] < 0):
        x = call("cast", x, dtype=dtype)
        for _ in range(abs(k)):
            made = x if made is None else call("mul" if k > 0 else "div", made, x)
    assert made is not None
    for x, _ in numbers:
        if not x.dtype.is_float:
            made = where(x, made, const(0.0, dtype))
    return made


class Expansion:
    """Writes bodies over the axes `over`, which read the results `leaves`, as sums of terms with `statistics`."""

    def __init__(
        self, over: Sequence[Axis], leaves: Sequence[Expr], statistics: Sequence[RunningStatistic]
    ) -> None:
        self.over, self.leaves = frozenset(over), frozenset(leaves)
        self.all = tuple(statistics)
        self.statistics = {g.through: k for k, g in enumerate(statistics)}
        self.anchors = [g.anchor for g in statistics]
        self.centred = {g.through for g in statistics if g.centred}
        self.unheld = False
        """Whether an exponential of data stands beside one of results, not held down by a statistic."""
        self.outside_extremum = False
        """Whether elements may count that an extreme does not see."""

    def reads(self, e: Expr) -> bool:
        """Whether `e` depends on a result."""
        return any(x in self.leaves for x in walk(e))

    def varies(self, e: Expr) -> bool:
        """Whether `e` changes from element to element."""
        return any(x.op == "axis" and x.value in self.over for x in walk(e))

    def of_results(self, e: Expr) -> bool:
        """Whether `e` depends on results only."""
        return self.reads(e) and not self.varies(e)

    def poly(self, e: Expr, truths: frozenset[Expr] = frozenset()) -> Poly:
        """`e` as a sum of terms where the conditions `truths` hold. Raises Mixed."""
        statistic = self.statistics.get(e)
        if statistic is not None:
            return plus(
                self.poly(assume(self.anchors[statistic], truths), truths),
                {Mono(powers=frozenset({(statistic, 1)})): Fraction(1)}, -1,
            )  # fmt: skip
        value = e.value
        if e.op == "const" and isinstance(value, (bool, int, float, Fraction)) and math.isfinite(value):
            return constant(Fraction(value))
        if e.op in ("add", "sub"):
            sign = 1 if e.op == "add" else -1
            return plus(self.poly(e.args[0], truths), self.poly(e.args[1], truths), sign)
        if e.op == "neg":
            return plus({}, self.poly(e.args[0], truths), -1)
        rule = _RULES.get(e.op)
        made = rule(self, e, truths) if rule is not None else None
        return self.atom(e) if made is None else made

    def atom(self, e: Expr) -> Poly:
        """`e` as a factor that is not looked into."""
        if not self.reads(e):
            return {Mono(data=frozenset({(e, 1)})): Fraction(1)}
        if self.varies(e):
            raise Mixed(f"{e.op} joins an element and a result that moves")
        return {Mono(results=frozenset({(e, 1)})): Fraction(1)}

    def factor(self, e: Expr, truths: frozenset[Expr], below: bool = False) -> Poly:
        """`e` in the place of a factor (or divisor, `below`): what depends on results only is not taken apart at its
        sums, but a running mean stays a statistic."""
        if not self.of_results(e) or (e in self.centred and not below):
            return self.poly(e, truths)
        taken = e.op in ("mul", "div", "neg", "reciprocal")
        parts = [self.factor(a, truths, True) for a in e.args] if taken else []
        match e.op:
            case "mul":
                return product(*parts)
            case "div":
                return product(parts[0], inverse(parts[1]))
            case "neg":
                return plus({}, parts[0], -1)
            case "reciprocal":
                return inverse(parts[0])
            case _:
                return self.atom(e)


def assume(e: Expr, truths: frozenset[Expr]) -> Expr:
    """`e` where the conditions `truths` hold."""
    if not truths:
        return e

    def visit(x: Expr) -> Expr | None:
        if x.op != "where":
            return None
        if all(c in truths for c in conjuncts(x.args[0])):
            return assume(x.args[1], truths)
        return assume(x.args[2], truths) if call("not", x.args[0]) in truths else None

    return transform(e, visit)


def inverse(p: Poly) -> Poly:
    """1 / p. Raises Mixed unless `p` is one term without powers of a shift."""
    if len(p) != 1:
        raise Mixed("it divides by a sum that reads a result that moves")
    ((m, q),) = p.items()
    if m.powers:
        raise Mixed("it divides by a shift of a result that moves")
    if any(not x.dtype.is_float for x, _ in m.data):
        raise Mixed("it divides by zero where a condition fails")
    data, results = (frozenset((x, -k) for x, k in s) for s in (m.data, m.results))
    return {Mono(data, results, m.powers, frozenset((r, -k) for r, k in m.rates)): 1 / q}


def _mul(x: Expansion, e: Expr, truths: frozenset[Expr]) -> Poly:
    scaled = any(a.op == "const" for a in e.args)
    a, b = (x.poly(a, truths) if scaled else x.factor(a, truths) for a in e.args)
    return product(a, b)


def _div(x: Expansion, e: Expr, truths: frozenset[Expr]) -> Poly | None:
    above, below = e.args
    if below.op == "const":
        return product(x.poly(above, truths), inverse(x.poly(below, truths)))
    if not x.reads(e):
        return None
    if not x.reads(below):
        return product(x.factor(above, truths), {Mono(data=frozenset({(below, -1)})): Fraction(1)})
    return product(x.factor(above, truths), inverse(x.factor(below, truths, True)))


def _reciprocal(x: Expansion, e: Expr, truths: frozenset[Expr]) -> Poly | None:
    return inverse(x.factor(e.args[0], truths, True)) if x.reads(e) else None


def _pow(x: Expansion, e: Expr, truths: frozenset[Expr]) -> Poly | None:
    n = e.args[1].value
    if (
        not isinstance(n, (int, float, Fraction))
        or n != int(n)
        or not 1 <= n <= ONLINE.max_power
        or x.of_results(e)
    ):
        return None
    base = x.poly(e.args[0], truths)
    made = base
    for _ in range(int(n) - 1):
        made = product(made, base)
    return made


def _exponential(x: Expansion, e: Expr, truths: frozenset[Expr]) -> Poly | None:
    if not x.reads(e):
        return None
    inside = assume(e.args[0], truths)
    if inside.op == "where" and not x.reads(inside.args[0]):
        yes, no = (call(e.op, a) for a in inside.args[1:])
        return _where(x, where(inside.args[0], yes, no), truths)
    data: Poly = {}
    results: Poly = {}
    rates: dict[Rate, Fraction] = {}
    for m, q in x.poly(inside, truths).items():
        if not m.results and not m.powers and not m.rates:
            data = plus(data, {m: q})
        elif not m.data and not m.powers and not m.rates:
            results = plus(results, {m: q})
        elif len(m.powers) == 1 and not m.data and not m.results and not m.rates:
            ((statistic, power),) = m.powers
            if power != 1:
                raise Mixed("an exponent is not linear in a result that moves")
            rates[statistic, e.op] = q
        else:
            raise Mixed("how fast an exponential moves depends on the element")
    made = {Mono(rates=frozenset(rates.items())): Fraction(1)}
    if data:
        x.unheld |= bool(results) or not rates
        varies = any(x.varies(a) for m in data for a, _ in m.data)
        x.outside_extremum |= varies and any(x.all[g].open for g, _ in rates)
        made = product(made, _power_of(e.op, data, e.dtype, of_results=False))
    return product(made, _power_of(e.op, results, e.dtype, of_results=True)) if results else made


def _power_of(base: str, exponent: Poly, dtype: DType, of_results: bool) -> Poly:
    """base^exponent as one factor; exp(n log y) as y^n."""
    log = {"exp": "log", "exp2": "log2"}[base]
    made = constant(1)
    rest: Poly = {}
    for m, q in exponent.items():
        atoms = [*m.results, *m.data]
        (y, n) = atoms[0] if len(atoms) == 1 else (None, 0)
        if y is not None and y.op == log and n == 1 and q.denominator == 1:
            factor = frozenset({(y.args[0], int(q))})
            made = product(made, {Mono(results=factor) if of_results else Mono(data=factor): Fraction(1)})
        else:
            rest[m] = q
    if rest:
        power = frozenset({(call(base, expression(rest, (), dtype)), 1)})
        made = product(made, {Mono(results=power) if of_results else Mono(data=power): Fraction(1)})
    return made


def _where(x: Expansion, e: Expr, truths: frozenset[Expr]) -> Poly | None:
    if not x.reads(e) or x.of_results(e):
        return None
    condition, yes, no = e.args
    if x.reads(condition):
        raise Mixed("a condition joins an element and a result that moves")
    total: Poly = {}
    for holds, side in ((condition, yes), (call("not", condition), no)):
        if is_const(side, 0):
            continue
        known = truths | set(conjuncts(holds))
        mask = {Mono(data=frozenset((c, 1) for c in conjuncts(holds))): Fraction(1)}
        total = plus(total, product(mask, x.factor(assume(side, known), known)))
    return total


def _cast(x: Expansion, e: Expr, truths: frozenset[Expr]) -> Poly | None:
    inner = e.args[0]
    if not (e.dtype.is_float and inner.dtype.is_float):
        return None
    return x.factor(inner, truths)


def _homogeneous(x: Expansion, e: Expr, truths: frozenset[Expr]) -> Poly | None:
    """|h K| = h |K| and max(h K, 0) = h max(K, 0), for an exponential h."""
    if not x.reads(e) or x.of_results(e):
        return None
    inner, *rest = sorted(e.args, key=lambda a: a.op == "const")
    if rest and not is_const(rest[0], 0):
        raise Mixed(f"{e.op} joins an element and a result that moves")
    p = x.poly(inner, truths)
    kinds = {(m.results, m.powers, m.rates) for m in p}
    if len(kinds) != 1 or next(iter(kinds))[:2] != (frozenset(), frozenset()):
        raise Mixed(f"the sign inside {e.op} depends on a result that moves")
    data = expression({Mono(data=m.data): q for m, q in p.items()}, (), e.dtype)
    _, _, rates = next(iter(kinds))
    return {Mono(frozenset({(call(e.op, data, *rest), 1)}), rates=rates): Fraction(1)}


_RULES: dict[str, Callable[[Expansion, Expr, frozenset[Expr]], Poly | None]] = {
    "mul": _mul, "div": _div, "reciprocal": _reciprocal, "pow": _pow, "exp": _exponential, "exp2": _exponential,
    "where": _where, "cast": _cast, "narrow": _cast, "abs": _homogeneous, "maximum": _homogeneous,
    "minimum": _homogeneous,
}  # fmt: skip
