"""The online law: may a reduction run beside one over the same axis that it reads, while that one still moves?

A reduction t = (x) over j of g(r, c_j) reads r = (+) over j of a(c_j). It may follow r while r moves if there are
states T_1 .. T_m, reductions of G_1 .. G_m, and a *rescaling* M with

    G(s, c) = M(r, s) G(r, c)     for every element c,

such that t follows from the T at the end. Then (r, T) is a monoid: parts of any split merge after each has been brought
to the common r. For sums a finite m exists iff the g(r, .) span m dimensions; here that is decided on `terms`: with
u = a - r a body sum K u^p exp(k u) has the closure under d/du as its basis, and M is exp(k d) times powers of
d = r - s. What depends on complete results only leaves the reduction (`finish`). For maxima the rescaling must be
monotone.

The rank-1 case is softmax's (Milakov and Gimelshein 2018); the centred polynomials are those of Chan, Golub and
LeVeque (1979).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import factorial, prod

from tilewright.ir.dtype import DType
from tilewright.ir.expr import Axis, Expr, call, const, slot, walk, where
from tilewright.ir.reduction import Reduction, any_, maximum, minimum
from tilewright.ir.sizes import dims

from .monotone import extreme_of, quantified
from .running import Upstream, lost, statistics_of
from .terms import (
    Expansion,
    Mixed,
    Mono,
    Poly,
    RunningStatistic,
    expression,
    number,
    ordered,
    plus,
    ratio,
    slope,
)

LOGS = frozenset({"log", "log2", "log10", "log1p"})
OUTSIDE_EXTREMUM = "elements may count that the running extreme does not see"


@dataclass(frozen=True, slots=True)
class Refusal:
    """`law` does not hold, because of `reason`."""

    law: str
    reason: str


@dataclass(frozen=True, slots=True)
class RescaledTerm:
    """factor * (product of gaps to `powers`) * state number `state`, a term of a rescaled state."""

    state: int
    factor: Fraction
    powers: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RescaledState:
    """T = `body` folded by `reduction`. Where each statistic moves by a gap d (old less new value), the rescaled state
    is exp(k d) (over `rates`) times the sum of `row`, plus `shift` times d.

    `lost`: it is NaN as long as the statistic has seen nothing but its identity."""

    reduction: Reduction
    body: Expr
    row: tuple[RescaledTerm, ...]
    rates: tuple[tuple[tuple[int, str], Fraction], ...] = ()
    shift: tuple[tuple[int, Fraction], ...] = ()
    lost: bool = False
    terms: tuple[tuple[Mono, Fraction], ...] = ()
    """The body of a sum as terms."""


@dataclass(frozen=True, slots=True)
class Law:
    """How a reduction follows its `statistics`: by `states`, of which `finish` (slots a0.. and complete results) makes
    the result. `hazard` says why the states may overflow or cancel where the reduction itself does not, if they
    may."""

    statistics: tuple[RunningStatistic, ...]
    states: tuple[RescaledState, ...]
    finish: Expr
    hazard: str = ""

    @property
    def rank(self) -> int:
        """Dimension of the state."""
        return len(self.states)

    @property
    def direct(self) -> bool:
        """Whether the first state is the reduction itself, so that nothing is left to do at the end."""
        return self.finish.op == "slot"

    def falls(self, statistic: int) -> bool:
        """Whether a statistic that comes from its identity takes a sum of rank 1 to zero by itself."""
        made, rising = self.states[0], self.statistics[statistic].rising
        alone = self.rank == 1 and made.reduction.combiner == "add"
        return alone and all((k > 0) == rising for (g, _), k in made.rates if g == statistic)

    def rescaled(self, state: int, old: Sequence[Expr], gaps: Sequence[Expr]) -> Expr:
        """State number `state` after the statistics moved by `gaps` (old value less new value), from all `old`
        states."""
        made = self.states[state]
        total: Expr | None = None
        for entry in made.row:
            term = old[entry.state]
            for g, power in entry.powers:
                for _ in range(power):
                    term = call("mul", term, gaps[g])
            if entry.factor != 1:
                term = call("mul", term, number(entry.factor, term.dtype))
            total = term if total is None else call("add", total, term)
        assert total is not None
        for (g, base), k in made.rates:
            gap = gaps[g] if k == 1 else call("mul", gaps[g], number(k, gaps[g].dtype))
            total = call("mul", total, call(base, gap))
        for g, k in made.shift:
            moved = gaps[g] if k == 1 else call("mul", gaps[g], number(k, gaps[g].dtype))
            total = call("add", total, moved)
        return total


def derive(
    reduction: Reduction, body: Sequence[Expr], upstream: Sequence[Upstream], over: Sequence[Axis]
) -> Law | Refusal:
    """The law by which `body`, folded by `reduction` over the axes `over`, follows the reductions `upstream` over the
    same axes, or why there is none."""
    combiner = reduction.combiner
    if combiner is None or len(body) != 1:
        return Refusal("homomorphism", f"{reduction.name} has a state of several values")
    leaves = [u.leaf for u in upstream]
    statistics = statistics_of(body[0], upstream, over)
    x = Expansion(over, leaves, statistics)
    if not x.reads(body[0]):
        return _independent(x, reduction, body[0])
    try:
        if combiner == "add":
            made = _Sums(x, statistics, reduction, body[0]).law()
        elif combiner in ("maximum", "minimum"):
            made = _extreme(x, statistics, reduction, body[0], upstream)
        elif combiner in ("or", "and"):
            made = _quantifier(x, combiner, body[0], upstream, over)
        else:
            return Refusal("homomorphism", f"no rescaling of a {reduction.name} is known")
    except Mixed as mixed:
        return Refusal("finite rank", str(mixed.args[0]))
    return made


def _independent(x: Expansion, reduction: Reduction, body: Expr) -> Law:
    """The law of a reduction that reads none of the results."""
    try:
        terms = x.poly(body) if reduction.combiner == "add" and body.dtype.is_float else {}
    except Mixed:
        terms = {}
    only = RescaledState(reduction, body, (RescaledTerm(0, Fraction(1), ()),), terms=tuple(terms.items()))
    return Law((), (only,), slot("a", 0, reduction.state[0]))


class _Sums:
    """Collects the basis of a sum."""

    def __init__(
        self, x: Expansion, statistics: Sequence[RunningStatistic], reduction: Reduction, body: Expr
    ) -> None:
        self.x, self.statistics, self.reduction, self.body = x, tuple(statistics), reduction, body
        self.dtype: DType = reduction.state[0]
        self.basis: list[Poly] = []
        self.rows: list[tuple[RescaledTerm, ...]] = []

    def law(self) -> Law | Refusal:
        polynomial = self.x.poly(self.body)
        if not self.dtype.is_float:
            return Refusal("finite rank", "it sums integers")
        terms: dict[frozenset[tuple[Expr, int]], dict[frozenset[object], Poly]] = {}
        for m, q in polynomial.items():
            group = terms.setdefault(m.results, {}).setdefault(m.rates, {})
            group[Mono(m.data, powers=m.powers, rates=m.rates)] = q
        if not terms:
            return Refusal("finite rank", "it is zero")
        heads: list[tuple[frozenset[tuple[Expr, int]], int, Fraction]] = []
        for results, groups in sorted(terms.items(), key=lambda g: -max(_degree(p) for p in g[1].values())):
            for p in sorted(groups.values(), key=_degree, reverse=True):
                heads.append((results, *self.add(p)))
        single = len(heads) == 1
        bodies = [expression(p, self.statistics, self.dtype) for p in self.basis]
        if single:
            bodies[0] = self.as_written(heads[0][0], self.basis[0]) or bodies[0]
        finish = self.finish(heads)
        states = tuple(self.state(k, b) for k, b in enumerate(bodies))
        return Law(self.statistics, states, finish, self.hazard([results for results, _, _ in heads]))

    def add(self, p: Poly) -> tuple[int, Fraction]:
        """The number of `p` in the basis, which grows by it and its derivatives, and its factor there."""
        for k, known in enumerate(self.basis):
            factor = ratio(p, known)
            if factor is not None:
                return k, factor
        number = len(self.basis)
        self.basis.append(p)
        self.rows.append(())
        row: list[RescaledTerm] = []
        todo: list[tuple[Poly, tuple[tuple[int, int], ...], int]] = [(p, (), 0)]
        while todo:
            moved, powers, last = todo.pop(0)
            index, factor = number, Fraction(1)
            if powers:
                lead = next(iter(moved.values()))
                index, factor = self.add(plus({}, moved, 1 / lead))
                factor *= lead / prod(factorial(k) for _, k in powers)
            row.append(RescaledTerm(index, factor, powers))
            for g in range(last, len(self.statistics)):
                steeper = slope(moved, g)
                if steeper:
                    power = dict(powers)
                    power[g] = power.get(g, 0) + 1
                    todo.append((steeper, tuple(power.items()), g))
        self.rows[number] = tuple(row)
        return number, Fraction(1)

    def state(self, k: int, body: Expr) -> RescaledState:
        p = self.basis[k]
        (rates,) = {m.rates for m in p}
        return RescaledState(
            self.reduction, body, self.rows[k], tuple(sorted(rates)), (), lost(body, self.statistics), tuple(p.items()),
        )  # fmt: skip

    def as_written(self, results: frozenset[tuple[Expr, int]], p: Poly) -> Expr | None:
        """The body without its factors `results`, otherwise as the program has it."""
        made = _without(self.x, self.body) if results else self.body
        if made is None:
            return None
        try:
            return made if self.x.poly(made) == p else None
        except Mixed:
            return None

    def finish(self, heads: Sequence[tuple[frozenset[tuple[Expr, int]], int, Fraction]]) -> Expr:
        total: Expr | None = None
        for results, k, factor in heads:
            term = slot("a", k, self.dtype)
            if factor != 1:
                term = call("mul", term, number(factor, self.dtype))
            for y, n in ordered(results):
                y = call("cast", y, dtype=self.dtype)
                for _ in range(abs(n)):
                    term = call("mul" if n > 0 else "div", term, y)
            if results and _zeroed(self.x, self.body):
                nothing = call("eq", slot("a", k, self.dtype), const(0.0, self.dtype))
                term = where(nothing, const(0.0, self.dtype), term)
            total = term if total is None else call("add", total, term)
        assert total is not None
        return total

    def hazard(self, factors: Sequence[frozenset[tuple[Expr, int]]]) -> str:
        common = dict(factors[0])
        for results in factors[1:]:
            common = {y: n for y, n in common.items() if dict(results).get(y) == n}
        rest = {y for results in factors for y, n in results if common.get(y) != n}
        if any(y.op not in LOGS for y in rest):
            return "parts of the sum may cancel: it is not centred on a running mean"
        if self.x.unheld and (rest or common or len(self.basis) > 1):
            return "an exponential of elements is not held down by a running maximum"
        shifted = any(
            self.statistics[g].open and not any(r == g for (r, _), _ in m.rates)
            for p in self.basis
            for m in p
            for g, _ in m.powers
        )
        if self.x.outside_extremum or shifted:
            return OUTSIDE_EXTREMUM
        return ""


def _degree(p: Poly) -> int:
    return max(sum(k for _, k in m.powers) for m in p)


def _without(x: Expansion, e: Expr) -> Expr | None:
    """`e` without the factors that depend on complete results only; None where that is a question of its sums."""
    if not x.reads(e):
        return e
    results = [x.of_results(a) for a in e.args]
    parts = [_without(x, a) for a in e.args]
    match e.op:
        case "mul" if any(results):
            return parts[1] if results[0] else parts[0]
        case "div" if results[1]:
            return parts[0]
        case "exp" | "exp2":
            inside = _without_addends(x, e.args[0])
            return None if inside is None else call(e.op, inside)
        case "where" if not x.reads(e.args[0]):
            parts[0] = e.args[0]
        case "mul" | "div" | "neg" | "cast" | "narrow":
            pass
        case _:
            return e
    if any(a is None for a in parts):
        return None
    return call(
        e.op, *(a for a in parts if a is not None), dtype=e.dtype if e.op in ("cast", "narrow") else None
    )


def _without_addends(x: Expansion, e: Expr) -> Expr | None:
    """`e` without the addends that depend on complete results only."""
    if e in x.statistics or not x.reads(e):
        return e
    if e.op not in ("add", "sub"):
        return None if x.of_results(e) else e
    a, b = (_without_addends(x, side) for side in e.args)
    if a is None:
        return b if b is None or e.op == "add" else call("neg", b)
    return a if b is None else call(e.op, a, b)


def _zeroed(x: Expansion, body: Expr) -> bool:
    """Whether elements are set to zero under a condition, whatever their factors are."""
    return any(
        y.op == "where"
        and x.reads(y)
        and x.varies(y)
        and any(a.op == "const" and a.value == 0 for a in y.args[1:])
        for y in walk(body)
    )


def _extreme(
    x: Expansion,
    statistics: Sequence[RunningStatistic],
    reduction: Reduction,
    body: Expr,
    upstream: Sequence[Upstream],
) -> Law | Refusal:
    """A maximum or minimum: of a monotone function of data, or scaled or shifted by what moves."""
    dtype = reduction.state[0]
    assert reduction.combiner is not None
    found = extreme_of(x, body, upstream)
    if found is not None:
        other = {"maximum": "minimum", "minimum": "maximum"}[reduction.combiner]
        inner = _reduction_by(reduction.combiner if found.rising else other, found.data.dtype)
        return Law((), (RescaledState(inner, found.data, (RescaledTerm(0, Fraction(1), ()),)),), found.finish)
    p = x.poly(body)
    kinds = {(m.results, m.powers, m.rates) for m in p}
    own = RescaledState(reduction, body, (RescaledTerm(0, Fraction(1), ()),), lost=lost(body, statistics))
    if len(kinds) == 1:
        ((results, powers, rates),) = kinds
        if not results and not powers:
            scaled = replace(own, rates=tuple(sorted(rates)))
            return Law(
                tuple(statistics), (scaled,), slot("a", 0, dtype), "an infinite identity cannot be scaled"
            )
    moving = {m: q for m, q in p.items() if m.powers or m.results or m.rates}
    if all(m == Mono(powers=m.powers) and [k for _, k in m.powers] == [1] for m in moving):
        shift = tuple((g, q) for m, q in moving.items() for g, _ in m.powers)
        hazard = OUTSIDE_EXTREMUM if any(g.open for g in statistics) else ""
        return Law(tuple(statistics), (replace(own, shift=shift),), slot("a", 0, dtype), hazard)
    return Refusal("homomorphism", "the order of its elements may change when a result moves")


def _quantifier(
    x: Expansion, combiner: str, body: Expr, upstream: Sequence[Upstream], over: Sequence[Axis]
) -> Law | Refusal:
    """any or all of a comparison with what is complete at the end: an extreme value decides."""
    found = quantified(x, combiner, body, upstream)
    if found is None:
        return Refusal("homomorphism", "its elements are no comparison of data with a result")
    if combiner == "and" and not all(dims.at_least(a.extent, 1) for a in over):
        return Refusal("homomorphism", "nothing is all of nothing, but no extreme value")
    row = (RescaledTerm(0, Fraction(1), ()),)
    states = tuple(
        RescaledState(_reduction_by(op, data.dtype), data, (RescaledTerm(k, Fraction(1), ()),) if k else row)
        for k, (op, data) in enumerate(found.reductions)
    )
    return Law((), states, found.finish)


def _reduction_by(combiner: str, dtype: DType) -> Reduction:
    return any_() if combiner == "or" else maximum(dtype) if combiner == "maximum" else minimum(dtype)
