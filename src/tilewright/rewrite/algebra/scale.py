"""Bringing a factor to where it costs least: into an operand of a sum, or into a constant that is there already."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

from tilewright.ir.expr import Axis, Expr, axes_of, axis, call, cast, narrow, read, substitute
from tilewright.ir.graph import Value
from tilewright.ir.tensor import TensorExpr, output_axes
from tilewright.tuning.input_limits import MODELS

from .bounds import LARGEST_FINITE
from .factors import Draft, Factored, constant_value, number
from .region import Step, operand, position


def scaled(d: Draft, e: Expr, factor: Factored, into: str) -> tuple[Expr, tuple[Step, ...]] | None:
    """`e` times (or divided by) `factor.part`, where no element of `e` itself is multiplied: the factor goes `into` an
    operand of every "sum" that `e` is made of, or into a "constant" factor. Second are the steps made for it, producers
    first. None if some part of `e` cannot take it."""
    scaling = _Scaling(d, into)
    new = scaling.of(e, factor) if _harmless(d, factor) else None
    return None if new is None or not scaling.taken else (new, tuple(scaling.made))


def scaled_operand(d: Draft, step: Step, e: Expr, factor: Factored) -> tuple[Expr, tuple[Step, ...]] | None:
    """The operand `e` of the products that `step` sums, read from a copy that is scaled; None if it cannot be."""
    scaling = _Scaling(d, "sum")
    new = scaling.operand(step, e, factor) if _harmless(d, factor) else None
    return None if new is None else (new, tuple(scaling.made))


def _harmless(d: Draft, p: Factored) -> bool:
    """Whether the factor makes no infinity of a finite element, of which terms would make NaN."""
    f = d.bounds.of(p.part)
    return not f.zero and f.least > 0 if p.divides else f.finite


@dataclass(slots=True)
class _Scaling:
    d: Draft
    into: str
    made: list[Step] = field(default_factory=list[Step])
    taken: bool = False

    def of(self, e: Expr, p: Factored) -> Expr | None:
        """See `scaled`."""
        if e.op == "read":
            return self._read(e, p)
        if e.op == "const":
            value, by = constant_value(e), constant_value(p.part)
            if value is None or by is None or abs(value * by) > LARGEST_FINITE[e.dtype.name]:
                return e if self._unmoved(e, p) else None
            return number(value * by, e.dtype)
        if self._unmoved(e, p):
            return e
        if e.op in ("cast", "narrow") and e.args[0].dtype.is_float:
            inner = self.of(e.args[0], p) if not e.dtype.is_half or self._shrinks(p) else None
            return None if inner is None else call(e.op, inner, dtype=e.dtype)
        if e.op in ("mul", "div"):
            return self._product(e, p)
        if e.op in ("add", "sub", "where", "neg"):
            first = 1 if e.op == "where" else 0
            args = [self.of(a, p) for a in e.args[first:]]
            known = [a for a in args if a is not None]
            return call(e.op, *e.args[:first], *known) if len(known) == len(args) else None
        return None

    def _unmoved(self, e: Expr, p: Factored) -> bool:
        """Whether the factor changes nothing: elements are 0 or infinite, and it is a positive number (not NaN)."""
        value = constant_value(p.part)
        return value is not None and value > 0 and self.d.bounds.of(e).absorbs

    def _shrinks(self, p: Factored) -> bool:
        f = self.d.bounds.of(p.part)
        return not f.zero and f.least >= 1 if p.divides else f.largest <= 1

    def _product(self, e: Expr, p: Factored) -> Expr | None:
        by = constant_value(p.part)
        for k, c in enumerate(e.args):
            value = constant_value(c)
            if self.into == "constant" and by is not None and value is not None and (e.op == "mul" or k == 1):
                total = by / value if e.op == "div" else by * value
                if 1 / MODELS.max_assumed_tensor_elements <= abs(total) <= MODELS.max_assumed_tensor_elements:
                    self.taken = True
                    return self._times(e.args[1 - k], total)
        for k, a in enumerate(e.args if e.op == "mul" else e.args[:1]):
            other = e.args[1 - k]
            new = self.of(a, p) if constant_value(a) is None else None
            if new is not None:
                return call(e.op, new, other) if k == 0 else call(e.op, other, new)
        return None

    def _times(self, e: Expr, by: Fraction) -> Expr:
        """`e` times a constant, in the type that kernels compute in."""
        wide = e.dtype.compute
        return narrow(call("mul", cast(e, wide), number(by, wide)), e.dtype)

    def _read(self, e: Expr, p: Factored) -> Expr | None:
        step = self.d.step(operand(e))
        if step is None:
            return None
        if self._unmoved(e, p):
            return e
        inside = self._inside(p, e.args, step.expr.axes)
        if inside is None:
            return None
        if step.expr.is_pointwise:
            body = self.of(step.body, inside)
        elif (
            step.simple == "add"
            and self.into == "sum"
            and (step.has_terms or constant_value(p.part) is not None)
        ):
            body = self._summand(step, step.body, inside)
        else:
            body = None
        if body is None:
            return None
        new = self.d.make(step, replace(step.expr, body=(body,)), step.value.dtype)
        self.made.append(new)
        return read(new.id, e.args, e.dtype)

    def _inside(self, p: Factored, index: tuple[Expr, ...], axes: tuple[Axis, ...]) -> Factored | None:
        """The factor in terms of `axes`, of which `index` are the places outside; None if it needs others."""
        table = {i: axis(a) for i, a in zip(index, axes, strict=True) if isinstance(i.value, Axis)}
        if axes_of(p.part) - set(table):
            return None
        return replace(p, part=substitute(p.part, table))

    def _summand(self, step: Step, e: Expr, p: Factored) -> Expr | None:
        """The body of a sum of products with the factor in the smaller operand that has its axes."""
        if e.op == "where" and self._unmoved(e.args[2], p):
            inner = self._summand(step, e.args[1], p)
            return None if inner is None else call("where", e.args[0], inner, e.args[2])
        if e.op != "mul":
            return None
        order = sorted((0, 1), key=lambda k: self._weight(e.args[k]))
        for k in order:
            new = self.operand(step, e.args[k], p)
            if new is not None:
                self.taken = True
                return call("mul", new, e.args[1]) if k == 0 else call("mul", e.args[0], new)
        return None

    def _weight(self, e: Expr) -> int:
        while e.op in ("cast", "narrow"):
            e = e.args[0]
        return self.d.program.bytes(self._value(operand(e))) if e.op == "read" else 1 << 62

    def _value(self, id: int) -> Value:
        step = self.d.step(id)
        return self.d.program.leaves[id] if step is None else step.value

    def operand(self, step: Step, e: Expr, p: Factored) -> Expr | None:
        """An operand of a product, read from a scaled copy; not in half precision, where that rounds anew."""
        if e.op in ("cast", "narrow"):
            inner = self.operand(step, e.args[0], p)
            return None if inner is None else call(e.op, inner, dtype=e.dtype)
        if e.op != "read" or not e.dtype.is_float or e.dtype.is_half:
            return None
        merged = _Scaling(self.d, "constant")
        found = merged.of(e, p)
        if found is not None and merged.taken:
            self.made += merged.made
            return found
        v = self._value(operand(e))
        axes = output_axes(v.shape)
        inside = self._inside(p, e.args, axes)
        if inside is None:
            return None
        wide = e.dtype.compute
        element = cast(read(v.id, [position(a) for a in axes], v.dtype), wide)
        product = call("div" if p.divides else "mul", element, cast(inside.part, wide))
        if not self._shrinks(p) and self.d.bounds.of(product).largest > LARGEST_FINITE[v.dtype.name] / 2:
            return None
        new = self.d.make(step, TensorExpr(axes, (narrow(product, v.dtype),)), v.dtype, "scale")
        self.made.append(new)
        return read(new.id, e.args, e.dtype)
