"""What elements can be: bounds from the expressions that compute them, for the conditions of algebraic rules.

Unlike `sign`, which is about exact numbers, these bounds hold of computed ones: what overflows is infinite, what
underflows is 0. Besides intervals this knows one relation: x - max(x) is at most 0, and somewhere 0. So the exponents
of a safe softmax are bounded, and its denominator is at least 1, which is what lets it move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from tilewright.ir.dtype import DType, Kind, i64
from tilewright.ir.expr import Axis, Expr, axes_of, axis, substitute
from tilewright.ir.graph import Value
from tilewright.ir.sizes import dims
from tilewright.rewrite.normal.identities import holds_exactly
from tilewright.rewrite.normal.normalise import map_reads
from tilewright.tuning.input_limits import MODELS

from .region import Program, Step, operand

LARGEST_FINITE = {"f16": 65504.0, "bf16": 3.3895e38, "f32": 3.4028e38, "f64": 1.7976e308}
"""The largest finite number of each floating type (rounded down)."""
SMALLEST_POSITIVE = {"f16": 2.0**-24, "bf16": 2.0**-133, "f32": 2.0**-149, "f64": 5e-324}


@dataclass(frozen=True, slots=True)
class Range:
    """An element that is neither NaN nor infinite lies in [low, high]. It is 0 only if `zero`, and else at least
    `least` in magnitude; with `finite` it is never infinite, whatever the inputs are."""

    low: float = -math.inf
    high: float = math.inf
    least: float = 0.0
    zero: bool = True
    finite: bool = False

    @property
    def largest(self) -> float:
        """The largest magnitude of a finite element."""
        return max(abs(self.low), abs(self.high))

    @property
    def positive(self) -> bool:
        """Whether elements are above 0 (or NaN)."""
        return self.low >= 0 and not self.zero

    @property
    def absorbs(self) -> bool:
        """Whether elements are only 0 and infinities (and NaN), which no positive factor changes."""
        return self.least == math.inf

    def extended(self) -> Range:
        """With infinities inside the interval, if there may be any."""
        return self if self.finite else replace(self, low=-math.inf, high=math.inf)


def _point(x: float) -> Range:
    if math.isnan(x):
        return Range()
    return Range(x, x, abs(x) if x else math.inf, not x, math.isfinite(x))


def union(a: Range, b: Range) -> Range:
    """What may be either."""
    return Range(
        min(a.low, b.low), max(a.high, b.high), min(a.least, b.least), a.zero or b.zero, a.finite and b.finite
    )


class Bounds:
    """Bounds of the elements of a program, and of all that rules make of it: a value keeps its meaning, so that the
    first of its `steps` tells as much as any. `limit` is a magnitude that its float leaves are trusted to stay within
    (None: they may be anything that their type holds, and infinite)."""

    def __init__(self, program: Program, limit: float | None = None) -> None:
        self.program = program
        self.limit = limit
        self.steps = dict(program.steps)
        self._values: dict[int, Range] = {}
        self._memo: dict[Expr, Range] = {}
        self._inlined: dict[Expr, Expr] = {}

    def of(self, e: Expr) -> Range:
        """The bounds of an element."""
        known = self._memo.get(e)
        if known is None:
            known = self._memo[e] = self._expr(e)
        return known

    def value(self, id: int) -> Range:
        """The bounds of the elements of a value."""
        known = self._values.get(id)
        if known is None:
            step = self.steps.get(id)
            known = self._values[id] = (
                self._leaf(self.program.leaves[id]) if step is None else self._step(step)
            )
        return known

    def inline(self, e: Expr) -> Expr:
        """`e` with pointwise results replaced by what computes them: reads of leaves and reductions remain."""
        known = self._inlined.get(e)
        if known is None:
            known = self._inlined[e] = map_reads(e, self._inline_read)
        return known

    def _inline_read(self, r: Expr) -> Expr | None:
        step = self.steps.get(operand(r))
        return self.inline(step.expr.at(r.args)) if step is not None and step.expr.is_pointwise else None

    def _leaf(self, v: Value) -> Range:
        known = self.program.constants.get(v.id)
        if isinstance(known, Range) and v.dtype.is_float:
            return known
        if not v.dtype.is_float:
            return _integers(v.dtype)
        if self.limit is not None:
            return Range(-self.limit, self.limit, finite=True)
        return Range(-LARGEST_FINITE[v.dtype.name], LARGEST_FINITE[v.dtype.name])

    def _step(self, step: Step) -> Range:
        if step.expr.is_pointwise:
            return self.of(step.body)
        if not step.value.dtype.is_float:
            return _integers(step.value.dtype)
        if step.simple in ("maximum", "minimum"):
            some = all(dims.at_least(a.extent, 1) for a in step.expr.reduce)
            return replace(self.of(step.body), finite=some and self.of(step.body).finite)
        return self._sum(step) if step.simple == "add" else Range()

    def _sum(self, step: Step) -> Range:
        each, n = self.of(step.body), 1
        some = all(dims.at_least(a.extent, 1) for a in step.expr.reduce)
        for a in step.expr.reduce:
            high = dims.int_range(a.extent)[1]
            n *= MODELS.max_assumed_tensor_elements if high is None else max(high, 0)
        n = min(n, MODELS.max_assumed_tensor_elements)
        low = (each.low if some else 0.0) if each.low >= 0 else _times(n, each.low)
        total = Range(low, max(_times(n, each.high), 0.0), finite=each.finite)
        if each.low >= 0 and some:
            total = replace(total, least=each.least, zero=each.zero)
        gap = self._exponents(step) if some else None
        if gap is not None:
            total = replace(total, low=0.0 if gap.shifted else 1.0, least=1.0, zero=gap.shifted)
        return _in_type(total, step.value.dtype)

    def _exponents(self, step: Step) -> Gap | None:
        """For a sum of exp(x - max x) over everything that the maximum runs over: that difference."""
        e = _plain(self.inline(step.body))
        gap = self.gap(e.args[0]) if e.op == "exp" else None
        if gap is None or set(gap.over) != {axis(a) for a in step.expr.reduce if a.extent is not dims.ONE}:
            return None
        return gap

    def gap(self, e: Expr) -> Gap | None:
        """`e` (inlined) as x - m, or a positive multiple, where m is the maximum of x over some axes."""
        e = _plain(e)
        if e.op in ("mul", "div") and _positive_constant(e.args[1]):
            return self.gap(e.args[0])
        if e.op != "sub":
            return None
        x, m, shifted = e.args[0], _plain(e.args[1]), False
        if m.op == "where" and m.args[0].op == "eq" and _plain(m.args[0].args[0]) is _plain(m.args[2]):
            floor = m.args[0].args[1]
            if floor.op != "const" or floor.value != -math.inf:
                return None
            m, shifted = _plain(m.args[2]), True
        step = self.steps.get(operand(m)) if m.op == "read" else None
        if step is None or step.simple != "maximum":
            return None
        places = {axis(a): i for a, i in zip(step.expr.axes, m.args, strict=True)}
        inner = {axis(a): axis(Axis(f"over {a.name}", a.extent)) for a in step.expr.reduce}
        over = dict.fromkeys(inner.values())
        bound = _unified(_plain(substitute(self.inline(step.body), {**places, **inner})), _plain(x), over)
        if bound is None or any(axes_of(i) & set(bound.values()) for i in m.args):
            return None
        return Gap(tuple(bound.values()), shifted)

    def _expr(self, e: Expr) -> Range:
        if not e.dtype.is_float:
            return _integers(e.dtype) if e.dtype is not i64 else _index(e)
        if e.op == "const":
            assert isinstance(e.value, (bool, int, float, Fraction))
            return _point(float(e.value))
        if e.op == "read":
            return self.value(operand(e))
        if e.op == "exp":
            below = self.gap(self.inline(e.args[0]))
            if below is not None:
                return Range(0.0, 1.0, finite=True)
        if e.op == "where":
            return self._where(e)
        if e.op in ("cast", "narrow"):
            inner = self.of(e.args[0])
            return (
                inner
                if holds_exactly(e.dtype, e.args[0].dtype)
                else _in_type(_rounded(inner, e.dtype), e.dtype)
            )
        if e.op == "mul" and e.args[0] is e.args[1]:
            x = self.of(e.args[0])
            return _in_type(
                Range(0.0, _times(x.largest, x.largest), _times(x.least, x.least), x.zero, x.finite), e.dtype
            )
        rule = _RULES.get(e.op)
        return Range() if rule is None else _in_type(rule(*[self.of(a) for a in e.args]), e.dtype)

    def _where(self, e: Expr) -> Range:
        """With the test of the kind x == 0 known on the side where it fails."""
        condition, yes, no = e.args
        a, b = self.of(yes), self.of(no)
        if condition.op == "eq" and condition.args[0] is no and condition.args[1].op == "const":
            if condition.args[1].value == 0:
                b = replace(b, zero=False)
                b = replace(b, low=max(b.low, b.least)) if b.low >= 0 else b
        return union(a, b)


@dataclass(frozen=True, slots=True)
class Gap:
    """A difference x - max x: the axes over which the maximum runs, in terms of x, and whether -inf is taken for 0."""

    over: tuple[Expr, ...]
    shifted: bool


def _plain(e: Expr) -> Expr:
    """Without conversions that lose nothing."""
    while e.op in ("cast", "narrow") and holds_exactly(e.dtype, e.args[0].dtype):
        e = e.args[0]
    return e


def _positive_constant(e: Expr) -> bool:
    return e.op == "const" and isinstance(e.value, (int, float, Fraction)) and 0 < e.value < math.inf


def _unified(pattern: Expr, e: Expr, over: Mapping[Expr, Expr | None]) -> dict[Expr, Expr] | None:
    """For which axes in place of the keys of `over` the pattern is `e`; None if for none. Each runs as far as its
    key."""
    found: dict[Expr, Expr] = {}

    def go(p: Expr, x: Expr) -> bool:
        if p in over:
            if p in found:
                return found[p] is x
            if not isinstance(x.value, Axis) or not isinstance(p.value, Axis) or x in found.values():
                return False
            found[p] = x
            return dims.equal(x.value.extent, p.value.extent)
        if p is x:
            return not axes_of(p) & set(over)
        if (
            p.op != x.op
            or p.dtype != x.dtype
            or p.value != x.value
            or len(p.args) != len(x.args)
            or not p.args
        ):
            return False
        return all(go(a, b) for a, b in zip(p.args, x.args, strict=True))

    used = axes_of(pattern)
    return found if go(pattern, e) and all(k in found for k in over if k in used) else None


def of_tensor(t: torch.Tensor) -> Range:
    """What the elements of a frozen tensor may be, coarsely, so that the weights of equal layers are alike: only 0 and
    infinities, as in a mask, or finite numbers of some order of magnitude."""
    if not t.numel() or not t.dtype.is_floating_point:
        return Range()
    low, high = float(t.detach().amin()), float(t.detach().amax())
    if math.isnan(low) or math.isnan(high):
        return Range()
    if math.isinf(low) or math.isinf(high):
        other = t.detach()[t.detach() != 0]
        return Range(low, high, math.inf, other.numel() < t.numel()) if bool(other.isinf().all()) else Range()
    top = max(-low, high)
    if not top:
        return _point(0.0)
    bound = 2.0 ** (16 * max(1, math.ceil(math.log2(top) / 16))) if top > 1 else 1.0
    return Range(0.0 if low >= 0 else -bound, bound, finite=True)


def _integers(dtype: DType) -> Range:
    if dtype.kind is Kind.BOOL:
        return Range(0.0, 1.0, 1.0, finite=True)
    bits = 8 * dtype.bytes - (dtype.kind is Kind.INT)
    return Range(-(2.0**bits) if dtype.kind is Kind.INT else 0.0, 2.0**bits, 1.0, finite=True)


def _index(e: Expr) -> Range:
    low, high = dims.int_range(e)
    return Range(
        -(2.0**63) if low is None else low,
        2.0**63 if high is None else high,
        1.0,
        low is None or low <= 0,
        True,
    )


def _in_type(r: Range, dtype: DType) -> Range:
    """What overflows is infinite; what underflows is 0."""
    top = LARGEST_FINITE[dtype.name]
    if r.least < SMALLEST_POSITIVE[dtype.name]:
        r = replace(r, least=0.0, zero=True) if r.least or not r.zero else r
    if r.low < -top or r.high > top:
        r = replace(r, low=max(r.low, -top), high=min(r.high, top), finite=False)
    return r


def _rounded(r: Range, dtype: DType) -> Range:
    slack = 2.0**-7 if dtype.bytes == 2 else 2.0**-23
    return replace(r, least=r.least * (1 - slack), low=_outward(r.low, -slack), high=_outward(r.high, slack))


def _outward(x: float, by: float) -> float:
    """A bound that a rounded number keeps too; whole numbers up to 256 stay what they are in every type."""
    return x if x in (0.0, 1.0, -1.0) or math.isinf(x) else x + abs(x) * by


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def _add(a: Range, b: Range) -> Range:
    low, high = a.low + b.low, a.high + b.high
    if math.isnan(low) or math.isnan(high):
        return Range()
    least, zero = 0.0, True
    if a.low >= 0 and b.low >= 0 or a.high <= 0 and b.high <= 0:
        least = max([r.least for r in (a, b) if not r.zero], default=min(a.least, b.least))
        zero = a.zero and b.zero
    return Range(low, high, least, zero, a.finite and b.finite)


def _negative(a: Range) -> Range:
    return replace(a, low=-a.high, high=-a.low)


def _mul(a: Range, b: Range) -> Range:
    corners = [_times(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    least = _times(a.least, b.least)
    return Range(min(corners), max(corners), least, a.zero or b.zero, a.finite and b.finite)


def _reciprocal(a: Range) -> Range:
    if a.zero or a.least <= 0:
        return Range(0.0 if a.low >= 0 else -math.inf, math.inf)
    top = 1 / a.least
    infinite = not a.finite
    low = 0.0 if infinite or not a.largest else 1 / a.largest
    return Range(low if a.low >= 0 else -top, -low if a.high <= 0 else top, low, infinite, True)


def _sqrt(a: Range) -> Range:
    low, least = math.sqrt(max(a.low, 0.0)), math.sqrt(a.least)
    return Range(low, math.sqrt(max(a.high, 0.0)), least, a.zero, a.finite)


def _abs(a: Range) -> Range:
    low = a.low if a.low >= 0 else -a.high if a.high <= 0 else 0.0
    return Range(low, a.largest, a.least, a.zero, a.finite)


def _exp(a: Range) -> Range:
    a = a.extended()
    low = math.exp(min(a.low, 709.0)) if a.low > -700 else 0.0
    high = math.exp(a.high) if a.high < 709 else math.inf
    return Range(low, high, low, low == 0, high < math.inf)


def _bounded(low: float, high: float) -> Callable[[Range], Range]:
    return lambda a: Range(low, high, finite=True)


def _extreme(pick: Callable[..., float]) -> Callable[[Range, Range], Range]:
    def rule(a: Range, b: Range) -> Range:
        a, b = a.extended(), b.extended()
        low, high = pick(a.low, b.low), pick(a.high, b.high)
        finite = math.isfinite(low) and math.isfinite(high)
        away = max(low, -high, 0.0)
        return Range(
            low, high, min(a.least, b.least) if not away else away, (a.zero or b.zero) and not away, finite
        )

    return rule


_RULES: dict[str, Callable[..., Range]] = {
    "add": _add, "sub": lambda a, b: _add(a, _negative(b)), "mul": _mul, "neg": _negative, "abs": _abs,
    "div": lambda a, b: _mul(a, _reciprocal(b)), "reciprocal": _reciprocal, "sqrt": _sqrt,
    "rsqrt": lambda a: _reciprocal(_sqrt(a)), "exp": _exp, "maximum": _extreme(max), "minimum": _extreme(min),
    "tanh": _bounded(-1, 1), "erf": _bounded(-1, 1), "sigmoid": _bounded(0, 1), "sin": _bounded(-1, 1),
    "cos": _bounded(-1, 1),
}  # fmt: skip
