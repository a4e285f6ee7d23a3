"""What of an expression that may fail is needed wherever the expression is, not on one side of a choice alone.

What may fail is computed under the condition of the side that asks for it. Where both sides, or the condition and a
side, are made of one thing, that is needed under the condition of the whole choice: it is computed there once. Else
each of K steps of `y = where(c, f(y), g(y))` would compute the steps before it twice, 2^K times in all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from tilewright.errors import IllegalSchedule
from tilewright.ir.expr import Expr, walk
from tilewright.ir.sizes import dims
from tilewright.tuning.search_limits import FACTS

from .runtime_checks import divisor

Needed = Mapping[Expr, frozenset[Expr]]


def unsafe_parts(roots: Iterable[Expr], sizes: Sequence[Expr]) -> set[Expr]:
    """The expressions that `checks.unsafe` tells, for parameters of these sizes."""
    found: set[Expr] = set()
    seen: set[Expr] = set()
    for x in (x for r in roots for x in walk(r)):
        if x in seen:
            continue
        seen.add(x)
        if any(a in found for a in x.args) or divisor(x) is not None or _is_outside(x, sizes):
            found.add(x)
    return found


def _is_outside(x: Expr, sizes: Sequence[Expr]) -> bool:
    """Whether a read is not proved to lie in its parameter."""
    if x.op != "read" or not isinstance(x.value, int):
        return False
    return not (dims.at_least(x.args[0], 0) and dims.at_least(dims.sub(sizes[x.value], x.args[0]), 1))


def repeated_parts(roots: Sequence[Expr], sizes: Sequence[Expr]) -> set[Expr]:
    """The computed expressions that may fail and are used more than once, if there are choices at all."""
    if all(x.op != "where" for r in roots for x in walk(r)):
        return set()
    unsafe = unsafe_parts(roots, sizes)
    uses: dict[Expr, int] = {}
    for x in {x for r in roots for x in walk(r)}:
        for a in x.args:
            uses[a] = uses.get(a, 0) + 1
    return {x for x, n in uses.items() if n > 1 and x.op != "read" and x in unsafe}


def needed_parts(
    e: Expr, among: set[Expr], asked: Callable[[Expr], Expr], is_known: Callable[[Expr], bool]
) -> Needed:
    """For the parts of `e`, those `among` some that are computed wherever the part is. `asked` says what a choice still
    tests, and what `is_known` is not computed."""
    found: dict[Expr, frozenset[Expr]] = {}
    for x in walk(e):
        if is_known(x):
            found[x] = frozenset()
            continue
        if x.op == "where":
            below = _of_choice(x, asked(x.args[0]), found)
        elif x.op == "checked":
            below = found[x.args[0]]  # its test has no condition
        else:
            below = frozenset[Expr]().union(*(found[a] for a in x.args))
        found[x] = below | {x} if x in among else below
    return found


def _of_choice(x: Expr, condition: Expr, found: Needed) -> frozenset[Expr]:
    tested, yes, no = (found[a] for a in x.args)
    if condition.op == "const":
        return yes if condition.value else no
    return (tested if condition is x.args[0] else frozenset[Expr]()) | (yes & no)


def check_repeated(roots: Sequence[Expr], sizes: Sequence[Expr]) -> None:
    """Raises IllegalSchedule if what may fail would be computed too often under different conditions."""
    among = repeated_parts(roots, sizes)
    if among:
        _Count(roots, among).of(roots)


_Choices = tuple[tuple[Expr, int], ...]
"""Choices, outermost first, with the sides taken."""


class _Count:
    """Counts what evaluation computes again: as `evaluate.Evaluator.eval`, but without a program."""

    def __init__(self, roots: Sequence[Expr], among: set[Expr]) -> None:
        self.again = 0
        self.needed: dict[Expr, frozenset[Expr]] = {}
        self.seen: dict[Expr, set[_Choices]] = {}
        self.holding = set(among)
        """Expressions with some of those below them. One that is used twice may fail, and is one of them."""
        for r in roots:
            self.needed |= needed_parts(r, among, lambda c: c, lambda x: x.op == "value")
            self.holding.update(x for x in walk(r) if not self.holding.isdisjoint(x.args))

    def of(self, roots: Sequence[Expr]) -> None:
        """Raises IllegalSchedule if it is too often."""
        todo: list[tuple[Expr, _Choices]] = [(r, ()) for r in roots if r in self.holding]
        while todo:
            todo += self.sides(*todo.pop())

    def sides(self, e: Expr, under: _Choices) -> list[tuple[Expr, _Choices]]:
        """The sides of choices that computing `e` under these choices asks for."""
        needed = self.needed[e]
        todo = [x for x in needed if self.is_new(x, under)]
        if e not in needed:
            todo.append(e)
        seen: set[Expr] = set()
        found: list[tuple[Expr, _Choices]] = []
        while todo:
            x = todo.pop()
            if x in seen:
                continue
            seen.add(x)
            parts = x.args
            if x.op == "where":
                parts = x.args[:1]
                found += [
                    (side, (*under, (x, k))) for k, side in enumerate(x.args[1:]) if side in self.holding
                ]
            todo += [a for a in parts if a in self.holding and a not in needed]
        return found

    def is_new(self, x: Expr, under: _Choices) -> bool:
        """Whether `x` is not yet computed under these choices, or some of them; counts how often it is again."""
        before = self.seen.setdefault(x, set())
        if any(under[:k] in before for k in range(len(under) + 1)):
            return False
        self.again += bool(before)
        if self.again > FACTS.max_repeated_checks:
            raise IllegalSchedule(
                f"what may fail would be computed again under more than {FACTS.max_repeated_checks} conditions",
                law="a kernel ends",
            )
        before.add(under)
        return True
