"""Values that only ever hold indices (the place of a maximum, ...): they take no more bits than indices do."""

from __future__ import annotations

from collections.abc import Mapping, Set

from tilewright.ir.dtype import i64
from tilewright.ir.expr import Expr, Slot
from tilewright.ir.program import Collapse, Compute, Declare, Prefix, Stmt, TileProgram, Update, Var
from tilewright.lower.variants import is_index

_CHOICES = {"where": 1, "minimum": 0, "maximum": 0}
"""Operations whose result is one of their arguments -> the first of those."""


class Indices:
    """Which expressions are index expressions, or choose among such: their values are within `reach`."""

    def __init__(self, values: Set[int], slots: Set[int] = frozenset()) -> None:
        self.values, self.slots = values, slots
        self.known: dict[Expr, bool] = {}

    def holds(self, e: Expr) -> bool:
        """Whether `e` is surely an index."""
        found = self.known.get(e)
        if found is None:
            found = self.known[e] = e.dtype is i64 and self._decide(e)
        return found

    def _decide(self, e: Expr) -> bool:
        if e.op == "const":
            return isinstance(e.value, int) and abs(e.value) < 1 << 31
        if e.op == "var":
            return e.value in self.values
        if isinstance(e.value, Slot):
            return e.value.index in self.slots
        first = _CHOICES.get(e.op)
        return is_index(e) or (first is not None and all(map(self.holds, e.args[first:])))


def index_values(program: TileProgram) -> frozenset[int]:
    """Numbers of the values and states of `program` that hold nothing but indices."""
    candidates = {v.id for s in program.statements() for v in _made(s) if v.dtype is i64}
    while True:
        indices = Indices(candidates)
        wrong = {v for s in program.statements() for v, fits in _fits(s, indices).items() if not fits}
        if not wrong & candidates:
            return frozenset(candidates)
        candidates = candidates - wrong


def _made(s: Stmt) -> tuple[Var, ...]:
    if isinstance(s, Compute):
        return (s.var,)
    return s.vars if isinstance(s, (Declare, Collapse, Prefix)) else ()


def _fits(s: Stmt, indices: Indices) -> Mapping[int, bool]:
    """For each value that `s` makes or changes: whether it gets an index here."""
    if isinstance(s, Compute):
        return {s.var.id: indices.holds(s.expr)}
    if isinstance(s, (Declare, Update)):
        return {v.id: indices.holds(e) for v, e in zip(s.vars, s.values, strict=True)}
    if isinstance(s, (Collapse, Prefix)):
        inner = Indices(frozenset(), {k for k, p in enumerate(s.parts) if p.id in indices.values})
        return {v.id: inner.holds(e) for v, e in zip(s.vars, s.reduction.merge, strict=True)}
    return {}
