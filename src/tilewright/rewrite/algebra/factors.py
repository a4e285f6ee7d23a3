"""Writing an element as a product, or a sum, of a part that is wanted and the rest, through the pointwise ops that make
it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain

from tilewright.ir.dtype import DType
from tilewright.ir.expr import Expr, axes_of, axis, both, call, cast, const, read, substitute
from tilewright.ir.tensor import TensorExpr
from tilewright.rewrite.normal.identities import holds_exactly

from .bounds import LARGEST_FINITE, Bounds
from .region import Program, Step, operand


class Draft:
    """Where rules make steps: a program, what is known of its elements, and fresh ids, which no other step of the same
    search has."""

    def __init__(
        self, program: Program, limit: float | None = None, round_intermediates: bool = False
    ) -> None:
        self.program = program
        self.bounds = Bounds(program, limit)
        self.round_intermediates = round_intermediates
        self.refusals: list[tuple[Expr, str]] = []
        """Parts that a rule would have moved, and the conditions that they do not meet, since somebody cleared it."""
        self._next = program.fresh
        self._made: dict[int, Step] = {}

    def allows(self, part: Expr, why: str) -> bool:
        """Whether nothing (no `why`) keeps a rule from moving a part; a reason is noted."""
        if why:
            self.refusals.append((part, why))
        return not why

    def step(self, id: int) -> Step | None:
        """The step of a value in the program, or one in the making."""
        return self.program.steps.get(id) or self._made.get(id)

    def make(self, like: Step, expr: TensorExpr, dtype: DType, name: str = "") -> Step:
        """A new step with this expression, which stems from where `like` does and has its name if none is given."""
        value = replace(like.value, id=self._next, shape=expr.shape, dtype=dtype)
        self._next += 1
        step = self._made[value.id] = Step(value, expr, like.source, name or like.name)
        self.bounds.steps[value.id] = step
        return step

    def pointwise(self, e: Expr) -> Step | None:
        """The step of a read of a pointwise result."""
        step = self.step(operand(e)) if e.op == "read" else None
        return step if step is not None and step.expr.is_pointwise else None

    def seen(self, e: Expr) -> Expr:
        """`e`, and if it reads a pointwise result, what computes it."""
        while (step := self.pointwise(e)) is not None:
            e = step.expr.at(e.args)
        return e


@dataclass(frozen=True, slots=True)
class Rounding:
    """A conversion to, or arithmetic in, half precision that the rest passes: whether it is exact for it, and whether
    it cannot overflow there."""

    exact: bool
    fits: bool


@dataclass(frozen=True, slots=True)
class Factored:
    """An element is rest * part, rest / part if it `divides`, or rest + part for terms. `exponential` says that the
    part is an exponential taken out of another. `made` are new steps that the
    rest reads, producers first. `mask` admits the elements that have the term; the others are 0."""

    rest: Expr
    part: Expr
    divides: bool = False
    made: tuple[Step, ...] = ()
    rounded: tuple[Rounding, ...] = ()
    mask: Expr | None = None
    exponential: bool = False


Without = tuple[Expr, tuple[Step, ...], tuple[Rounding, ...]]
"""What is left, the steps made for it, and the roundings that it passes."""


def constant_value(e: Expr) -> Fraction | None:
    """The value of a constant that is finite and not 0."""
    v = e.value
    if e.op != "const" or not isinstance(v, (int, float, Fraction)) or not v or not math.isfinite(v):
        return None
    return Fraction(v)


def number(value: Fraction, dtype: DType) -> Expr:
    """A constant, as a float if it is one."""
    as_float = float(value)
    return const(as_float if Fraction(as_float) == value else value, dtype)


def constant(f: Expr, divides: bool) -> Factored | None:
    """A constant factor as a multiplier in the type that kernels compute in (the rest is left open), else None."""
    value = constant_value(f)
    if value is None:
        return None
    return Factored(f, number(1 / value if divides else value, f.dtype.compute))


def factors(d: Draft, e: Expr, banned: frozenset[Expr], constants: bool = False) -> Iterator[Factored]:
    """The ways to take out of `e` one factor that reads none of the axes `banned` (with `constants`: a constant)."""
    return _Factors(d, banned, constants).of(e)


@dataclass(frozen=True, slots=True)
class _Factors:
    d: Draft
    banned: frozenset[Expr]
    constants: bool
    inner: bool = False
    """Whether this is about what an op makes that the reduction reads."""

    def _stays(self, f: Expr, e: Expr) -> bool:
        """Whether a factor of `e` is spread over some of its axes, but reads those of the sum."""
        return f.op == "read" and bool(axes_of(f) & self.banned) and axes_of(f) < axes_of(e)

    def _free(self, e: Expr) -> bool:
        return constant_value(e) is not None or not (
            self.constants or e.op == "const" or axes_of(e) & self.banned
        )

    def of(self, e: Expr) -> Iterator[Factored]:
        """See `factors`."""
        if not e.dtype.is_float:
            return
        if e.op == "read":
            yield from self._of_read(e)
        elif e.op in ("mul", "div"):
            yield from self._of_product(e)
        elif e.op == "neg":
            yield from (replace(p, rest=call("neg", p.rest)) for p in self.of(e.args[0]))
        elif e.op in ("cast", "narrow"):
            yield from (self._rebuilt(p, lambda x: call(e.op, x, dtype=e.dtype)) for p in self.of(e.args[0]))
        elif e.op in ("add", "sub"):
            yield from self._common(e, 0, 1)
        elif e.op == "where":
            yield from self._common(e, 1, 2)
            yield from self._common(e, 2, 1)
        elif e.op == "exp" and not self.constants:
            yield from self._of_exp(e)

    def _of_product(self, e: Expr) -> Iterator[Factored]:
        x, y = e.args
        divides = e.op == "div"
        for rest, f in ((x, y),) if divides else ((x, y), (y, x)):
            if not self.constants and self.inner and self._stays(f, e):
                self.d.allows(f, "it reads the axis of the sum")
            if self._free(f):
                found = constant(f, divides)
                yield Factored(rest, f, divides) if found is None else replace(found, rest=rest)
        for p in self.of(x):
            yield self._rebuilt(p, lambda r: call(e.op, r, y))
        for p in self.of(y):
            p = self._rebuilt(p, lambda r: call(e.op, x, r))
            value = constant_value(p.part)
            if divides and value is not None:
                yield replace(p, part=number(1 / value, p.part.dtype))
            else:
                yield replace(p, divides=p.divides is not divides)

    def _of_exp(self, e: Expr) -> Iterator[Factored]:
        """exp(t + u) = exp(t) * exp(u), neither of which is beyond it in magnitude if t and u have one sign."""
        for p in terms(self.d, e.args[0], self.banned, "add"):
            t, u = self.d.bounds.of(p.rest), self.d.bounds.of(p.part)
            alike = (t.high <= 0 and u.high <= 0) or (t.low >= 0 and u.low >= 0)
            if p.mask is not None or p.rounded:
                continue
            if self.d.allows(
                p.part, "" if alike else "one exponential may overflow where their product does not"
            ):
                yield replace(p, rest=call("exp", p.rest), part=call("exp", p.part), exponential=True)

    def _common(self, e: Expr, one: int, other: int) -> Iterator[Factored]:
        """A factor of one argument that the other has too, or does not notice."""
        for p in self.of(e.args[one]):
            for rest, made, rounded in self._without(e.args[other], p, e.op == "where"):
                args = list(e.args)
                args[one], args[other] = p.rest, rest
                joined = replace(p, made=(*p.made, *made), rounded=(*p.rounded, *rounded))
                yield self._rebuilt(joined, lambda x, args=args: call(e.op, *args))

    def _without(self, e: Expr, like: Factored, chosen: bool) -> Iterator[Without]:
        """What `e` is without a factor that its neighbour has. An element that does not notice the factor stays as it
        is; but if one of the two is `chosen`, it would notice NaN, which only a constant cannot be."""
        known, f = self.d.bounds.of(e), self.d.bounds.of(like.part)
        harmless = not f.zero and f.least > 0 if like.divides else f.finite
        nothing = known.absorbs and known.low == known.high == 0
        is_number = not chosen or constant_value(like.part) is not None
        if is_number and ((nothing and harmless) or (known.absorbs and f.positive and f.finite)):
            yield e, (), ()
            return
        value, by = constant_value(e), constant_value(like.part)
        if value is not None and by is not None:
            if abs(value / by) <= LARGEST_FINITE[e.dtype.name]:
                yield number(value / by, e.dtype), (), ()
            return
        for p in self.of(e):
            if p.part is like.part and p.divides is like.divides:
                yield p.rest, p.made, p.rounded
                return

    def _of_read(self, e: Expr) -> Iterator[Factored]:
        step = self.d.pointwise(e)
        if step is None:
            return
        places = {axis(a): i for a, i in zip(step.expr.axes, e.args, strict=True)}
        inner = frozenset(a for a, i in places.items() if axes_of(i) & self.banned)
        for p in _Factors(self.d, inner, self.constants, True).of(step.body):
            yield _copied(self.d, step, e, p)

    def _rebuilt(self, p: Factored, build: Callable[[Expr], Expr]) -> Factored:
        rest = build(p.rest)
        return replace(p, rest=rest, rounded=(*p.rounded, *_roundings(self.d, rest)))


def _copied(d: Draft, step: Step, e: Expr, p: Factored) -> Factored:
    """A part of the element that `e` reads, where the rest is computed by a copy of the step."""
    places = {axis(a): i for a, i in zip(step.expr.axes, e.args, strict=True)}
    new = d.make(step, replace(step.expr, body=(p.rest,)), step.value.dtype)
    mask = None if p.mask is None else substitute(p.mask, places)
    return replace(
        p, rest=read(new.id, e.args, e.dtype), part=substitute(p.part, places), made=(*p.made, new), mask=mask
    )


def _roundings(d: Draft, e: Expr) -> tuple[Rounding, ...]:
    """The rounding that the outermost operation of `e` does, if it does one in half precision."""
    if not e.dtype.is_half or (e.op in ("cast", "narrow") and holds_exactly(e.dtype, e.args[0].dtype)):
        return ()
    if e.op in ("cast", "narrow"):
        before = e.args[0]
    else:
        before = call(e.op, *(cast(a, a.dtype.compute) if a.dtype.is_half else a for a in e.args))
    fits = d.bounds.of(before).largest <= LARGEST_FINITE[e.dtype.name]
    return (Rounding(exact(d, e, e.dtype), fits),)


def exact(d: Draft, e: Expr, dtype: DType) -> bool:
    """Whether `e` computes a number of type `dtype` without rounding it to that."""
    if e.op in ("cast", "narrow"):
        return holds_exactly(dtype, e.args[0].dtype) or exact(d, e.args[0], dtype)
    if e.op in ("neg", "abs"):
        return exact(d, e.args[0], dtype)
    if e.op == "where":
        return all(exact(d, a, dtype) for a in e.args[1:])
    if e.op in ("add", "sub"):
        return any(exact(d, x, dtype) and d.bounds.of(y).absorbs for x, y in (e.args, e.args[::-1]))
    if e.op == "const":
        return d.bounds.of(e).absorbs
    return e.op == "read" and holds_exactly(dtype, e.dtype)


def terms(d: Draft, e: Expr, banned: frozenset[Expr], op: str) -> Iterator[Factored]:
    """The ways to take out of `e` one operand of `op` ("add", "and", "or", "maximum", "minimum") that reads none of the
    axes `banned`."""
    if e.op == op:
        for x, y in (e.args, e.args[::-1]):
            if not axes_of(y) & banned:
                yield Factored(x, y)
            for p in terms(d, x, banned, op):
                yield _built(d, p, call(op, p.rest, y))
    elif e.op == "sub" and op == "add":
        x, y = e.args
        if not axes_of(y) & banned:
            yield Factored(x, call("neg", y))
        if not axes_of(x) & banned:
            yield Factored(call("neg", y), x)
        for p in terms(d, x, banned, op):
            yield _built(d, p, call("sub", p.rest, y))
        for p in terms(d, y, banned, op):
            yield _built(d, replace(p, part=call("neg", p.part)), call("sub", x, p.rest))
    elif e.op in ("cast", "narrow") and e.dtype.is_float and e.args[0].dtype.is_float:
        for p in terms(d, e.args[0], banned, op):
            rounds = Rounding(holds_exactly(e.dtype, e.args[0].dtype), True)
            rest, part = (call(e.op, x, dtype=e.dtype) for x in (p.rest, p.part))
            yield replace(p, rest=rest, part=part, rounded=(*p.rounded, *([] if rounds.exact else [rounds])))
    elif e.op == "where" and op == "add" and _only_infinite(d, e.args[2]):
        for p in terms(d, e.args[1], banned, op):
            if p.mask is None and constant_value(p.part) is not None:
                yield replace(p, rest=call("where", e.args[0], p.rest, e.args[2]))
    elif e.op == "where" and op == "add" and e.args[2].op == "const" and e.args[2].value == 0:
        for p in terms(d, e.args[1], banned, op):
            mask = both(e.args[0], p.mask)
            yield replace(p, rest=call("where", e.args[0], p.rest, e.args[2]), mask=mask)
    elif (step := d.pointwise(e)) is not None:
        places = {axis(a): i for a, i in zip(step.expr.axes, e.args, strict=True)}
        inner = frozenset(a for a, i in places.items() if axes_of(i) & banned)
        for p in terms(d, step.body, inner, op):
            yield _copied(d, step, e, p)


def _only_infinite(d: Draft, e: Expr) -> bool:
    """Whether elements are infinities, which no finite term changes."""
    known = d.bounds.of(e)
    return known.absorbs and not known.zero


def _built(d: Draft, p: Factored, rest: Expr) -> Factored:
    rounded = [r for r in _roundings(d, rest) if not r.exact]
    return replace(p, rest=rest, rounded=tuple(chain(p.rounded, rounded)))
