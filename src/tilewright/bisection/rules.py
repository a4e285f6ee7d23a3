"""Which rules of scalar expressions do not keep the meaning: each application in a graph, tried on numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewright.interp.algebra import FLOATS, to_numpy
from tilewright.interp.evaluate import Evaluator
from tilewright.ir.dtype import Kind
from tilewright.ir.expr import Expr, const, transform, walk
from tilewright.ir.graph import Graph
from tilewright.ir.pattern import ExprRule, Rewriter
from tilewright.rewrite.normal.normalise import compose_views, rules_in_use
from tilewright.tuning.search_limits import BISECTION

LEAVES = ("read", "axis", "symbol", "slot")


class _Watching(Rewriter):
    """Keeps each application: the rule's name, and the expression before and after."""

    def __init__(self, rules: Sequence[ExprRule]) -> None:
        super().__init__(rules)
        self.seen: list[tuple[str, Expr, Expr]] = []

    def _once(self, e: Expr) -> Expr | None:
        new = super()._once(e)
        if new is not None:
            name = next((r.name for r in self.rules if r.apply(e) is new), "?")
            self.seen.append((name, e, new))
        return new


def wrong_rules(graph: Graph) -> tuple[str, ...]:
    """Rules with an application in `graph` (or in it with its views composed) whose two sides differ for some numbers,
    each with one such application."""
    watching = _Watching(rules_in_use())
    for seen in (graph, compose_views(graph)):
        for op in seen.ops:
            for body in op.expr.body if op.expr is not None else ():
                watching(body)
    found: dict[str, str] = {}
    for name, old, new in watching.seen:
        if name not in found and _differ(old, new):
            found[name] = f"{name}: {old} -> {new}"
    return tuple(found.values())


def _differ(old: Expr, new: Expr) -> bool:
    rng = np.random.default_rng(0)
    leaves = list(dict.fromkeys(x for e in (old, new) for x in walk(e) if x.op in LEAVES))
    for _ in range(BISECTION.rule_samples):
        numbers = {x: _number(x, rng) for x in leaves}
        try:
            a, b = (
                to_numpy(Evaluator(FLOATS).value(transform(e, lambda x, n=numbers: n.get(x))))
                for e in (old, new)
            )
        except (ArithmeticError, KeyError, ValueError, IndexError):
            continue  # outside what the rule is asked about, such as a divisor of 0
        if not np.allclose(a, b, rtol=1e-2, atol=1e-6, equal_nan=True):
            return True
    return False


def _number(leaf: Expr, rng: np.random.Generator) -> Expr:
    if leaf.op in ("axis", "symbol") and not leaf.dtype.is_float:
        return const(int(rng.integers(1, 8)), leaf.dtype)
    if leaf.dtype.kind is Kind.BOOL:
        return const(bool(rng.integers(0, 2)), leaf.dtype)
    if leaf.dtype.is_float:
        return const(float(rng.normal()), leaf.dtype)
    return const(int(rng.integers(1, 8)), leaf.dtype)
