"""One pattern language and one rewrite engine. A rule is data: what it matches, what it makes, and the law
behind it.

Rules over expressions use `Pattern`; rules over other things (ops of a graph) give a function that finds
captures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, Literal, TypeVar

from tilewright.errors import VerifyError
from tilewright.tuning.search_limits import EXPRESSIONS

from .expr import Const, Expr, rebuild, walk

Proof = Literal["ieee", "ring", "field", "exp", "order", "real only"]
"""What shows that a law holds: `ieee` for every float value (NaN, infinities, signed zero included, as torch
computes); the others for exact arithmetic of that kind only; `real only` for finite reals up to rounding."""

Captures = Mapping[str, Expr]
S = TypeVar("S")
M = TypeVar("M")

COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "and", "or", "xor", "eq", "ne"})


@dataclass(frozen=True, slots=True)
class Pattern:
    """A shape of expressions: operation `op` (None = any) over `args`, named `name` if it is to be captured.

    `value` asks for a constant of exactly that value (the sign of a zero counts), `when` for a property. A
    name that occurs twice asks for the same expression. Arguments of commutative operations match in either
    order."""

    op: str | None = None
    args: tuple[Pattern, ...] = ()
    name: str = ""
    value: Const | None = None
    when: Callable[[Expr], bool] | None = None

    def __call__(self, e: Expr) -> Captures | None:
        """The captured parts if `e` has this shape, else None."""
        return _match(self, e, {})


def any_(name: str, when: Callable[[Expr], bool] | None = None) -> Pattern:
    """Any expression (for which `when` holds), captured as `name`."""
    return Pattern(name=name, when=when)


def constant(
    value: Const | None = None, name: str = "", when: Callable[[Expr], bool] | None = None
) -> Pattern:
    """A constant: of this value, or any one captured as `name`."""
    return Pattern("const", name=name, value=value, when=when)


def apply(op: str, *args: Pattern, name: str = "", when: Callable[[Expr], bool] | None = None) -> Pattern:
    """Operation `op` over patterns."""
    return Pattern(op, args, name, when=when)


def _match(p: Pattern, e: Expr, found: Captures) -> Captures | None:
    if p.op is not None and (e.op != p.op or (p.args and len(p.args) != len(e.args))):
        return None
    if p.value is not None and not _same_constant(p.value, e):
        return None
    if p.when is not None and not p.when(e):
        return None
    if p.name:
        if found.get(p.name, e) is not e:
            return None
        found = {**found, p.name: e}
    if not p.args:
        return found
    orders = [e.args]
    if e.op in COMMUTATIVE and e.args[0] is not e.args[1]:
        orders.append((e.args[1], e.args[0]))
    for args in orders:
        result: Captures | None = found
        for part, a in zip(p.args, args, strict=True):
            result = None if result is None else _match(part, a, result)
        if result is not None:
            return result
    return None


def _same_constant(value: Const, e: Expr) -> bool:
    known = e.value
    if not isinstance(known, (bool, int, float, Fraction)) or known != value:
        return False
    return not (e.dtype.is_float and value == 0) or str(float(known)) == str(float(value))


def always(_: object) -> bool:
    """The condition of a rule that has none."""
    return True


@dataclass(frozen=True, slots=True)
class Rule(Generic[S, M]):
    """`match` finds the parts of a subject (None = does not apply); if `when` holds of them, `make` gives
    the subject that replaces it (None = not after all). `law` is the equation, `proof` what it is true by."""

    name: str
    match: Callable[[S], M | None]
    make: Callable[[M], S | None]
    law: str
    proof: Proof
    when: Callable[[M], bool] = always

    def apply(self, subject: S) -> S | None:
        """The replacement of `subject`, or None."""
        found = self.match(subject)
        return None if found is None or not self.when(found) else self.make(found)


ExprRule = Rule[Expr, Captures]


class Rewriter:
    """Applies a set of rules bottom up to a fixpoint; results are remembered across calls.

    Raises VerifyError if the rules do not come to an end."""

    def __init__(self, rules: Sequence[ExprRule]) -> None:
        self.rules = tuple(rules)
        self._by_op: dict[str | None, list[ExprRule]] = {}
        for rule in rules:
            op = rule.match.op if isinstance(rule.match, Pattern) else None
            self._by_op.setdefault(op, []).append(rule)
        self._done: dict[Expr, Expr] = {}
        self.applied: dict[str, int] = {}

    def __call__(self, e: Expr) -> Expr:
        """`e`, of any depth, rewritten until no rule applies anywhere in it."""
        found = self._done.get(e)
        if found is None:
            for x in walk(e):
                found = self._done.get(x)
                found = self._finished(x) if found is None else found
        assert found is not None
        return found

    def _finished(self, e: Expr) -> Expr:
        """`e`, of which all that is inside is done."""
        found = self._to_fixpoint(e)
        if len(self._done) > EXPRESSIONS.memo_rewrites:
            self._done.clear()
        self._done[e] = self._done[found] = found
        return found

    def _to_fixpoint(self, e: Expr) -> Expr:
        for _ in range(EXPRESSIONS.max_rewrites_of_a_node):
            if e.args:
                e = rebuild(e, tuple(self(a) for a in e.args))
            new = self._once(e)
            if new is None:
                return e
            e = new
        raise VerifyError(f"rewriting does not end at {e}", phase="rewrite")

    def _once(self, e: Expr) -> Expr | None:
        for rule in (*self._by_op.get(e.op, ()), *self._by_op.get(None, ())):
            new = rule.apply(e)
            if new is not None and new is not e:
                self.applied[rule.name] = self.applied.get(rule.name, 0) + 1
                return new
        return None


def rewrite(e: Expr, rules: Sequence[ExprRule]) -> Expr:
    """`e` rewritten by `rules`, innermost first, until none applies."""
    return Rewriter(rules)(e)
