"""An expression as a choice between cases: under which predicate over axes is it which simpler expression?

Masks come in many spellings: `where`, comparisons of positions, sums with 0 and -inf, products with 0 and 1, bools
taken apart and put together. All are one thing: a case distinction whose sides are constants here and data there. Tests
of data that are no masks (scores above a threshold) become opaque literals, so that they cannot hide the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from tilewright.interp.algebra import FLOATS, Array
from tilewright.ir.dtype import DType, bool_, i64
from tilewright.ir.expr import Const, Expr, call, const, rebuild, slot, walk
from tilewright.ir.sizes import dims
from tilewright.tuning.search_limits import FACTS

from . import conditions
from .conditions import FALSE, TRUE, Condition, TooManyTerms
from .sign import Signs

_MANTISSA = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}


@dataclass(frozen=True, slots=True)
class Case:
    """The expression is `value` where `condition` holds."""

    condition: Condition
    value: Expr


Cases = tuple[Case, ...]
"""Their conditions exclude each other and cover everything."""


class Chooser:
    """Cases of expressions under one set of facts about reads."""

    def __init__(self, signs: Signs) -> None:
        self.signs = signs
        self.memo: dict[Expr, Cases] = {}
        self.opaque: dict[Expr, Expr] = {}

    def cases(self, e: Expr) -> Cases:
        """The cases of `e`; one, the expression itself, where nothing simpler is known."""
        found = self.memo.get(e)
        if found is None:
            try:
                found = self.merged(self.node(e))
            except TooManyTerms:
                found = ()
            found = self.memo[e] = found if 0 < len(found) <= FACTS.max_cases else (Case(TRUE, e),)
        return found

    def node(self, e: Expr) -> Sequence[Case]:
        if e.dtype is bool_ and e.op != "const":
            holds = self.truth(e)
            return [Case(holds, const(True, bool_)), Case(conditions.negation(holds), const(False, bool_))]
        if not e.args or e.op in ("read", "checked") or as_index(e) is not None:
            return [Case(TRUE, e)]
        if e.op == "where":
            return self.choice(e)
        return self.over(e, e.args)

    def choice(self, e: Expr) -> list[Case]:
        holds = self.truth(e.args[0])
        sides = ((holds, e.args[1]), (conditions.negation(holds), e.args[2]))
        return [
            Case(conditions.conjunction((c, k.condition)), k.value)
            for c, side in sides
            if c != FALSE
            for k in self.cases(side)
        ]

    def over(self, e: Expr, args: Sequence[Expr]) -> list[Case]:
        """A scalar operation, case by case of its arguments."""
        split = [self.cases(a) for a in args]
        if all(len(c) == 1 and c[0].value is a for c, a in zip(split, args, strict=True)):
            return [Case(TRUE, self.fold_constant(e))]
        if math.prod(map(len, split)) > FACTS.max_cases**2:
            raise TooManyTerms
        made: list[Case] = []
        for chosen in product(*split):
            condition = conditions.conjunction(c.condition for c in chosen)
            if condition != FALSE:
                made.append(Case(condition, self.fold_constant(rebuild(e, tuple(c.value for c in chosen)))))
        return made

    def fold_constant(self, e: Expr) -> Expr:
        """`e`, or the constant that it is whatever its data are."""
        if e.op == "const" or not any(a.op == "const" for a in e.args):
            return e
        if all(a.op == "const" for a in e.args) and e.dtype is not i64:
            return folded(e)
        only = self.signs.of(e).constant if e.dtype.is_float else None
        return e if only is None else const(only, e.dtype)

    def merged(self, cases: Sequence[Case]) -> Cases:
        by_value: dict[Expr, list[Condition]] = {}
        for c in cases:
            if c.condition != FALSE:
                by_value.setdefault(c.value, []).append(c.condition)
        return tuple(Case(conditions.disjunction(cs), v) for v, cs in by_value.items())

    # --- bools

    def truth(self, e: Expr) -> Condition:
        """Where a bool expression holds. Raises TooManyTerms."""
        if e.op == "const":
            return TRUE if e.value else FALSE
        if e.op in _LOGIC:
            return _LOGIC[e.op](*map(self.truth, e.args))
        if e.op in ("eq", "ne") and e.args[0].dtype is bool_:
            differ = _differ(*map(self.truth, e.args))
            return differ if e.op == "ne" else conditions.negation(differ)
        if e.op == "where":
            c, yes, no = map(self.truth, e.args)
            return conditions.disjunction(
                (conditions.conjunction((c, yes)), conditions.conjunction((conditions.negation(c), no)))
            )
        if e.op in _COMPARISONS:
            return self.comparison(e.op, *e.args)
        if e.op == "cast":
            x = e.args[0]
            return self.truth(x) if x.dtype is bool_ else self.comparison("ne", x, const(0, x.dtype))
        if e.op in ("isnan", "isinf"):
            return self.test(e)
        return self.opaque_or(e)

    def test(self, e: Expr) -> Condition:
        """A test of one number, case by case."""
        parts: list[Condition] = []
        for c in self.cases(e.args[0]):
            here = rebuild(e, (c.value,))
            decided = self.signs.of(here).constant
            known = self.opaque_or(here) if decided is None else TRUE if decided else FALSE
            parts.append(conditions.conjunction((c.condition, known)))
        return conditions.disjunction(parts)

    def comparison(self, op: str, a: Expr, b: Expr) -> Condition:
        """Where `a op b` holds, case by case of both."""
        split = [self.cases(a), self.cases(b)]
        if math.prod(map(len, split)) > FACTS.max_cases**2:
            raise TooManyTerms
        parts: list[Condition] = []
        for x, y in product(*split):
            condition = conditions.conjunction((x.condition, y.condition))
            if condition != FALSE:
                parts.append(conditions.conjunction((condition, self.compared(op, x.value, y.value))))
        return conditions.disjunction(parts)

    def compared(self, op: str, a: Expr, b: Expr) -> Condition:
        left, right = as_index(a), as_index(b)
        if left is not None and right is not None:
            return conditions.comparison(op, left, right)
        test = call(op, a, b)
        if test.op == "const":
            return TRUE if test.value else FALSE
        if a.op == b.op == "const":
            return TRUE if folded(test).value else FALSE
        decided = self.signs.of(test).constant
        if decided is not None:
            return TRUE if decided else FALSE
        if a.dtype.is_float or not self.small(test):
            return self.opaque_or(test)
        return conditions.data_comparison(op, a, b)

    def opaque_or(self, e: Expr) -> Condition:
        """A literal: the test itself if it reads integers or bools, else a slot that stands for it."""
        if self.small(e) and not any(x.dtype.is_float for x in walk(e)):
            return conditions.literal(e)
        return conditions.literal(self.opaque.setdefault(e, slot("test", len(self.opaque), bool_)))

    def small(self, e: Expr) -> bool:
        for count, _ in enumerate(walk(e)):
            if count > FACTS.max_test_nodes:
                return False
        return True


_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def _differ(a: Condition, b: Condition) -> Condition:
    return conditions.disjunction(
        (
            conditions.conjunction((a, conditions.negation(b))),
            conditions.conjunction((conditions.negation(a), b)),
        )
    )


_LOGIC = {
    "and": lambda a, b: conditions.conjunction((a, b)),
    "or": lambda a, b: conditions.disjunction((a, b)),
    "xor": _differ,
    "not": conditions.negation,
}


def folded(e: Expr) -> Expr:
    """An operation on constants, computed as the program computes it."""
    with np.errstate(all="ignore"):
        args = [_loaded(a) for a in e.args]
        value = FLOATS.apply(e.op, args, e.args[1 if e.op == "where" else 0].dtype, e.dtype)
    return const(
        np.asarray(value, np.float64).item() if e.dtype.is_float else np.asarray(value).item(), e.dtype
    )


def _loaded(e: Expr) -> Array:
    assert isinstance(e.value, Const)
    return FLOATS.constant(e.value, e.dtype)


def as_index(e: Expr) -> Expr | None:
    """The index expression over axes and sizes that always equals `e`, of whatever type; None if there is none."""
    if e.op == "const":
        value = e.value
        if isinstance(value, (int, float)) and math.isfinite(value) and value == math.floor(value):
            return dims.integer(int(value)) if e.dtype is not bool_ else None
        return None
    if e.dtype is i64 and _is_index(e):
        return e
    if e.op == "abs" and e.dtype is not i64:
        inner = as_index(e.args[0])
        return None if inner is None else call("abs", inner)
    if e.op in ("cast", "narrow") and e.args[0].dtype is not bool_:
        inner = as_index(e.args[0])
    elif e.op in _RING and e.dtype is not i64 and e.dtype is not bool_:
        parts = [as_index(a) for a in e.args]
        known = [p for p in parts if p is not None]
        if len(known) < len(parts) or (
            e.op in _DIVISIONS and not (not e.dtype.is_float and _positive(known[1]))
        ):
            return None
        inner = _RING[e.op](*known)
    else:
        return None
    return inner if inner is not None and holds_range(e.dtype, inner) else None


_RING = {
    "add": dims.add,
    "sub": dims.sub,
    "mul": dims.mul,
    "neg": lambda a: dims.mul(a, dims.integer(-1)),
    "floordiv": dims.floordiv,
    "mod": dims.mod,
}
_DIVISIONS = ("floordiv", "mod")


def _positive(e: Expr) -> bool:
    return (dims.static(e) or 0) > 0


_INDEX_OPS = frozenset(
    ("const", "axis", "symbol", "add", "sub", "mul", "neg", "floordiv", "mod", "maximum", "minimum", "abs")
)


def _is_index(e: Expr) -> bool:
    return all(x.op in _INDEX_OPS and x.dtype is i64 for x in walk(e))


def holds_range(dtype: DType, e: Expr) -> bool:
    """Whether every value of an index expression is a value of `dtype`."""
    low, high = dims.int_range(e)
    if low is None or high is None:
        return dtype is i64
    if dtype.is_float:
        limit = 1 << _MANTISSA[dtype.name]
        return -limit <= low and high <= limit
    bits = 8 * dtype.bytes - 1
    return (
        -(1 << bits) <= low and high < (1 << bits) if dtype.kind.value == "int" else 0 <= low and high < 256
    )
