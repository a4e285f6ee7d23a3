"""Folds that run beside the running maximum they read: when it moves, what they have summed is repaired."""

from __future__ import annotations

from fractions import Fraction

from ..ir.expr import Expr, call, const
from ..ir.program import Compute, Dot, Update, Var, value_of
from .form import Item
from .states import States
from .transport import degree


class Repair(States):
    """States that may depend on other states of the same pass."""

    def update(self, t: Item, upstream: int | None) -> None:
        """state = merge(state, element), after repair if the upstream maximum has just moved."""
        assert t.reduction is not None
        if t.scan is not None:
            self.advance(t)
            return
        names = self.states[t.id]
        old: list[Expr] = [value_of(v) for v in names]
        product = self.contractions.get(t.id)
        operands = self.operands(product) if product is not None else None
        elements, mask = self.elements(t) if product is None else ((), None)
        if upstream is not None:
            k = degree(t, self.form.items[upstream])
            assert k is not None
            old = [call("mul", old[0], self.factor(upstream, k))]
        if product is None or operands is None:
            self.out.append(Update(names, t.reduction.merged(old, elements), mask))
            return
        if upstream is not None:
            self.out.append(Update(names, tuple(old)))
        self.out.append(Dot(names[0], *operands, product.k))

    def run_ahead(self, t: Item) -> tuple[tuple[Var, ...], tuple[Expr, ...]]:
        """The new running maximum, before its state is assigned: dependents of this pass read it guarded
        against -inf."""
        (name,) = self.states[t.id]
        (element,), mask = self.elements(t)
        moved = call("maximum", value_of(name), element)
        new = self.named(moved if mask is None else call("where", mask, moved, value_of(name)))
        infinite = call("eq", new, const(float("-inf"), new.dtype))
        self.scope.results[t.id, 0] = self.named(call("where", infinite, const(0.0, new.dtype), new))
        return (name,), (new,)

    def factor(self, upstream: int, k: Fraction) -> Expr:
        (name,) = self.states[upstream]
        gap = call("sub", value_of(name), self.scope.results[upstream, 0])
        return self.named(call("exp", gap if k == 1 else call("mul", gap, const(k, gap.dtype))))

    def finish(self, t: Item, merged: dict[int, int]) -> None:
        """After the loops: merge the lanes of a state and compute its results."""
        assert t.reduction is not None
        if t.scan is not None:
            return
        parts = self.states[t.id]
        if t.id in merged:
            parts = (self.rescaled(t, merged[t.id]),)
        self.result(t, [value_of(v) for v in self.collapse(t, parts)])

    def rescaled(self, t: Item, upstream: int) -> Var:
        """Lanes ran with maxima of their own: bring every lane to the common one before they are added."""
        (name,), (lane,) = self.states[t.id], self.states[upstream]
        if not lane.axes:
            return name
        k = degree(t, self.form.items[upstream])
        assert k is not None
        top = self.scope.results[upstream, 0]
        zero, empty = const(0.0, name.dtype), call("eq", top, const(float("-inf"), top.dtype))
        gap = call("sub", value_of(lane), call("where", empty, zero, top))
        scaled = call("mul", value_of(name), call("exp", call("mul", gap, const(k, gap.dtype))))
        var = self.var(name.dtype, name.axes)
        self.out.append(Compute(var, scaled))
        return var
