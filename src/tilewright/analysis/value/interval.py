"""Sets of numbers that a sign analysis can tell apart: an interval of finite values, 0 in it or not, and the specials.

Arithmetic is that of the reals extended by -inf, inf and NaN as IEEE 754 has them; rounding, underflow and overflow are
not modelled (exp is positive, not "positive or 0").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

Sign = Literal["none", "zero", "positive", "nonnegative", "negative", "nonpositive", "any"]

INF = math.inf


@dataclass(frozen=True, slots=True)
class Interval:
    """Finite values lie in [low, high] (infinite bounds: no bound; low > high: there is none), 0 only if `zero`.
    `below`, `above` and `nan` say whether -inf, inf and NaN may occur. Make one with `interval`."""

    low: float
    high: float
    zero: bool
    below: bool = False
    above: bool = False
    nan: bool = False

    @property
    def empty(self) -> bool:
        """Whether no finite value may occur."""
        return self.low > self.high

    @property
    def bottom(self) -> float:
        """A lower bound of every value but NaN."""
        return -INF if self.below else self.low if not self.empty else INF

    @property
    def top(self) -> float:
        """An upper bound of every value but NaN."""
        return INF if self.above else self.high if not self.empty else -INF

    @property
    def finite(self) -> bool:
        """Whether every value is finite."""
        return not (self.below or self.above or self.nan)

    @property
    def nonnegative(self) -> bool:
        """Whether no value is below 0 (a NaN may be)."""
        return self.bottom >= 0

    @property
    def nonpositive(self) -> bool:
        """Whether no value is above 0 (a NaN may be)."""
        return self.top <= 0

    @property
    def nonzero(self) -> bool:
        """Whether no value is 0."""
        return not self.zero

    @property
    def positive(self) -> bool:
        """Whether every value is above 0 (or NaN)."""
        return self.nonnegative and self.nonzero

    @property
    def negative(self) -> bool:
        """Whether every value is below 0 (or NaN)."""
        return self.nonpositive and self.nonzero

    @property
    def sign(self) -> Sign:
        """The element of the sign lattice, whatever NaN may occur."""
        if self.nonnegative and self.nonpositive:
            return "zero" if self.zero else "none"
        if self.nonnegative:
            return "positive" if self.nonzero else "nonnegative"
        if self.nonpositive:
            return "negative" if self.nonzero else "nonpositive"
        return "any"

    @property
    def constant(self) -> float | None:
        """The only value that may occur (0 for both zeros), None if there are several or none."""
        values: list[float] = [v for v, may in ((-INF, self.below), (INF, self.above)) if may]
        if not self.empty:
            if self.low != self.high:
                return None
            values.append(self.low)
        if self.nan:
            return math.nan if not values else None
        return values[0] if len(values) == 1 else None

    def contains(self, x: float) -> bool:
        """Whether `x` is among the values."""
        if math.isnan(x):
            return self.nan
        if math.isinf(x):
            return self.above if x > 0 else self.below
        return self.low <= x <= self.high and (x != 0 or self.zero)

    def __str__(self) -> str:
        specials = [n for n, may in (("-inf", self.below), ("inf", self.above), ("nan", self.nan)) if may]
        span = "" if self.empty else f"[{self.low:g}, {self.high:g}]" + ("" if self.zero else " not 0")
        return " or ".join(filter(None, [span, *specials])) or "none"


def interval(
    low: float, high: float, zero: bool = True, below: bool = False, above: bool = False, nan: bool = False
) -> Interval:
    """The `Interval`, in its one normal form."""
    if low == high == 0 and not zero:
        low, high = INF, -INF
    if low > high:
        low, high = INF, -INF
    return Interval(low, high, zero and low <= 0 <= high, below, above, nan)


NONE = interval(INF, -INF)
ZERO = interval(0, 0)
BELOW, ABOVE, NAN = replace(NONE, below=True), replace(NONE, above=True), replace(NONE, nan=True)
REAL = interval(-INF, INF)
"""Any finite number."""
ANYTHING = replace(REAL, below=True, above=True, nan=True)
"""Any number at all."""
TRUTH = interval(0, 1)
"""A bool."""


def point(x: float) -> Interval:
    """The one value `x`."""
    if math.isnan(x):
        return NAN
    if math.isinf(x):
        return ABOVE if x > 0 else BELOW
    return interval(x, x)


def join(parts: Iterable[Interval]) -> Interval:
    """Everything that one of the parts has (and what lies between their finite values)."""
    low, high, zero, below, above, nan = INF, -INF, False, False, False, False
    known: list[Interval] = []
    for p in parts:
        known.append(p)
        below, above, nan = below or p.below, above or p.above, nan or p.nan
        if not p.empty:
            low, high, zero = min(low, p.low), max(high, p.high), zero or p.zero
    return interval(low, high, zero, below, above, nan)


def meet(a: Interval, b: Interval) -> Interval:
    """What both have."""
    return interval(
        max(a.low, b.low), min(a.high, b.high), a.zero and b.zero, a.below and b.below, a.above and b.above,
        a.nan and b.nan,
    )  # fmt: skip


def parts(x: Interval) -> list[Interval]:
    """`x` cut where signs change: negative, 0, positive, and each special."""
    found = [s for s, may in ((BELOW, x.below), (ABOVE, x.above), (NAN, x.nan)) if may]
    if not x.empty:
        if x.low < 0:
            found.append(interval(x.low, min(x.high, 0), False))
        if x.zero:
            found.append(ZERO)
        if x.high > 0:
            found.append(interval(max(x.low, 0), x.high, False))
    return found


def negated(x: Interval) -> Interval:
    """-x."""
    return interval(-x.high, -x.low, x.zero, x.above, x.below, x.nan)


def sum_(a: Interval, b: Interval) -> Interval:
    """a + b."""
    nan = a.nan or b.nan or (a.below and b.above) or (a.above and b.below)
    some = lambda x: not x.empty  # noqa: E731
    below = (a.below and (some(b) or b.below)) or (b.below and some(a))
    above = (a.above and (some(b) or b.above)) or (b.above and some(a))
    if a.empty or b.empty:
        return replace(NONE, below=below, above=above, nan=nan)
    same_side = (a.low >= 0 and b.low >= 0) or (a.high <= 0 and b.high <= 0)
    zero = (a.zero and b.zero) if same_side else True
    return interval(a.low + b.low, a.high + b.high, zero, below, above, nan)


def product(a: Interval, b: Interval) -> Interval:
    """a * b."""
    return join(_times(x, y) for x in parts(a) for y in parts(b))


def _times(x: Interval, y: Interval) -> Interval:
    if x.nan or y.nan:
        return NAN
    flip = x.nonpositive != y.nonpositive
    if x.empty or y.empty:
        if ZERO in (x, y):
            return NAN
        return BELOW if flip else ABOVE
    if ZERO in (x, y):
        return ZERO
    (p, q), (r, s) = _size(x), _size(y)
    low = 0.0 if p == 0 or r == 0 else p * r
    return interval(-q * s, -low, False) if flip else interval(low, q * s, False)


def _size(x: Interval) -> tuple[float, float]:
    return (x.low, x.high) if x.low >= 0 else (-x.high, -x.low)


def reciprocal(x: Interval) -> Interval:
    """1 / x; a 0 may have either sign."""
    return join(_inverse(p) for p in parts(x))


def _inverse(x: Interval) -> Interval:
    if x.nan:
        return NAN
    if x.empty:
        return ZERO
    if x is ZERO or x == ZERO:
        return join((BELOW, ABOVE))
    p, q = _size(x)
    low, high = 1 / q if q else INF, 1 / p if p else INF
    return interval(low, high, False) if x.low >= 0 else interval(-high, -low, False)


def quotient(a: Interval, b: Interval) -> Interval:
    """a / b."""
    return product(a, reciprocal(b))


def square(x: Interval) -> Interval:
    """x * x."""
    return join(_times(p, p) for p in parts(x))


def magnitude(x: Interval) -> Interval:
    """|x|."""
    return join(negated(p) if p.negative and not p.nan else p for p in parts(x))


def larger(a: Interval, b: Interval) -> Interval:
    """max(a, b); NaN wins."""
    nan = a.nan or b.nan
    if a.bottom > a.top or b.bottom > b.top:
        return NAN if nan else NONE
    below, above = a.below and b.below, a.above or b.above
    low, high = max(a.bottom, b.bottom), max(p.high for p in (a, b))
    candidates = [p for p in (a, b) if not p.empty]
    if not candidates or low == INF:
        return replace(NONE, below=below, above=above, nan=nan)
    low = max(low, min(p.low for p in candidates))
    zero = (a.zero and not b.positive) or (b.zero and not a.positive)
    return interval(low, high, zero, below, above, nan)


def smaller(a: Interval, b: Interval) -> Interval:
    """min(a, b); NaN wins."""
    return negated(larger(negated(a), negated(b)))


def rising(
    x: Interval,
    f: Callable[[float], float],
    domain: tuple[float, float] = (-INF, INF),
    zero: bool | None = None,
) -> Interval:
    """The image of x under a rising function; outside its domain it is NaN. `zero` says whether it is 0 somewhere on x
    (None: wherever the bounds allow it)."""
    low, high = max(x.low, domain[0]), min(x.high, domain[1])
    nan = x.nan or (x.below and domain[0] > -INF) or (x.above and domain[1] < INF)
    nan = nan or (not x.empty and (x.low < domain[0] or x.high > domain[1]))
    made = [NAN] if nan else []
    if low <= high:
        ends = _value(f, low), _value(f, high)
        open_ends = interval(_outward(ends[0], -INF), _outward(ends[1], INF), True)
        zero_there = open_ends.zero if zero is None else zero
        made.append(interval(open_ends.low, open_ends.high, zero_there))
    for may, at, end in ((x.below, -INF, domain[0]), (x.above, INF, domain[1])):
        if may and end == at:
            made.append(point(_value(f, at)))
    return join(made)


def _value(f: Callable[[float], float], x: float) -> float:
    try:
        return f(x)
    except OverflowError:
        return INF
    except (ValueError, ZeroDivisionError):
        return -INF


def _outward(x: float, to: float) -> float:
    """A neighbour of x in the direction `to`: library functions err by an ulp or so; exact where they are exact."""
    return x if x == int_or(x) or math.isinf(x) else math.nextafter(math.nextafter(x, to), to)


def int_or(x: float) -> float | None:
    """x if it is a whole number, else None."""
    return x if math.isfinite(x) and x == math.floor(x) else None
