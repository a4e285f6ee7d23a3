"""Predicates in a normal form: a disjunction of conjunctions of literals, so that most ways to write one meet.

A literal is a comparison of index expressions (`linear >= 0`, `linear == 0`, `linear != 0`), or a test that reads data,
or the negation of one. Equality of normal forms is enough for equality of predicates, not necessary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache, reduce
from math import gcd

from tilewright.ir.dtype import bool_, i64
from tilewright.ir.expr import Expr, call, const, substitute, walk
from tilewright.ir.sizes import dims
from tilewright.tuning.search_limits import FACTS

Term = frozenset[Expr]
Condition = frozenset[Term]
"""Holds where all literals of one of the terms do."""

TRUE: Condition = frozenset({frozenset[Expr]()})
FALSE: Condition = frozenset()


class TooManyTerms(Exception):
    """A condition has more terms than are worth keeping."""


def literal(e: Expr) -> Condition:
    """The condition of one test that reads data, or stands for one (a slot)."""
    return frozenset({frozenset({e})})


def data_comparison(op: str, a: Expr, b: Expr) -> Condition:
    """`a op b` for data, as one literal."""
    if op in ("gt", "ge"):
        a, b, op = b, a, _TURNED[op]
    if op in ("lt", "le"):
        return literal(call(op, a, b))
    if a is b and not a.dtype.is_float:
        return TRUE if op == "eq" else FALSE
    same = literal(call("eq", *sorted((a, b), key=repr)))
    return same if op == "eq" else negation(same)


def comparison(op: str, a: Expr, b: Expr) -> Condition:
    """`a op b` for index expressions over axes and sizes."""
    for x, y, o in ((a, b, op), (b, a, _TURNED[op])):
        if x.op == "abs":
            return _of_magnitude(o, x.args[0], y)
    gap = dims.sub(a, b)
    if op in ("eq", "ne"):
        same = _equal_to_zero(gap)
        return same if op == "eq" else negation(same)
    if op in ("lt", "le"):
        gap = dims.mul(gap, dims.integer(-1))
    return _at_least_zero(dims.sub(gap, dims.ONE) if op in ("lt", "gt") else gap)


_TURNED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


def _of_magnitude(op: str, x: Expr, y: Expr) -> Condition:
    """`|x| op y` without the magnitude."""
    minus = dims.mul(x, dims.integer(-1))
    if op in ("lt", "le"):
        return conjunction((comparison(op, x, y), comparison(op, minus, y)))
    if op in ("gt", "ge"):
        return disjunction((comparison(op, x, y), comparison(op, minus, y)))
    same = disjunction(
        conjunction((comparison("eq", v, y), comparison("ge", y, dims.ZERO))) for v in (x, minus)
    )
    return same if op == "eq" else negation(same)


def _at_least_zero(slack: Expr) -> Condition:
    form = dims.linear(slack)
    factor = reduce(gcd, (abs(c) for m, c in form.items() if m), 0)
    if factor > 1:
        slack = dims.floordiv(slack, dims.integer(factor))
    if dims.at_least(slack, 0):
        return TRUE
    if dims.at_least(dims.sub(dims.integer(-1), slack), 0):
        return FALSE
    return frozenset({frozenset({call("ge", slack, dims.ZERO)})})


def _equal_to_zero(gap: Expr) -> Condition:
    minus = dims.mul(gap, dims.integer(-1))
    if dims.equal(gap, dims.ZERO):
        return TRUE
    if dims.at_least(gap, 1) or dims.at_least(minus, 1):
        return FALSE
    return frozenset({frozenset({call("eq", min(gap, minus, key=repr), dims.ZERO)})})


def _inverse(x: Expr) -> Expr:
    """The negation of a literal, as a literal. Comparisons of floats may both fail (NaN), so they keep their not."""
    if x.op == "not":
        return x.args[0]
    if x.op in ("eq", "ne"):
        return call("ne" if x.op == "eq" else "eq", *x.args)
    if is_inequality(x):
        return call("ge", dims.sub(dims.integer(-1), x.args[0]), dims.ZERO)
    if x.op in ("lt", "le") and not x.args[0].dtype.is_float:
        return call("le" if x.op == "lt" else "lt", x.args[1], x.args[0])
    return call("not", x)


def is_inequality(x: Expr) -> bool:
    """Whether a literal is `linear >= 0` over axes and sizes."""
    return x.op == "ge" and x.args[1] is dims.ZERO and x.args[0].dtype is i64 and not _reads(x)


@lru_cache(1 << 14)
def _reads(x: Expr) -> bool:
    return any(n.op == "read" for n in walk(x))


@lru_cache(1 << 16)
def implies(p: Expr, q: Expr) -> bool:
    """Whether literal p is seen to imply literal q."""
    if p is q:
        return True
    if is_inequality(q):
        if is_inequality(p):
            return dims.at_least(dims.sub(q.args[0], p.args[0]), 0)
        if p.op == "eq" and p.args[0].dtype is i64:
            return any(dims.at_least(f(q.args[0], p.args[0]), 0) for f in (dims.sub, dims.add))
    return False


def _follows(term: Term, q: Expr) -> bool:
    return any(implies(p, q) for p in term)


def _covers(t: Term, s: Term) -> bool:
    """Whether term s implies term t."""
    return all(_follows(s, q) for q in t)


def _tidy(term: Term) -> Term | None:
    """Without literals that others imply; None if two contradict each other."""
    if any(implies(p, _inverse(q)) for p in term for q in term if p is not q):
        return None
    literals = set(term)
    for q in sorted(term, key=repr):
        if any(implies(p, q) for p in literals if p is not q):
            literals.remove(q)
    return frozenset(literals)


def disjunction(parts: Iterable[Condition]) -> Condition:
    """Holds where one of the parts does."""
    terms = {t for part in parts for t in part}
    if len(terms) > 8 * FACTS.max_condition_terms:
        raise TooManyTerms
    current = {t for t in map(_tidy, terms) if t is not None}
    while True:
        shorter = {_shortened(t, current) for t in current}
        uncovered = _uncovered(shorter)
        if uncovered == current:
            break
        current = uncovered
    if len(current) > FACTS.max_condition_terms:
        raise TooManyTerms
    return frozenset(current)


def _shortened(t: Term, terms: set[Term]) -> Term:
    """t without literals that do not matter: where one fails but the rest of t holds, another term holds."""
    for x in sorted(t, key=repr):
        rest = t - {x}
        otherwise = _tidy(rest | {_inverse(x)})
        if otherwise is None or any(_covers(u, otherwise) for u in terms if u != t):
            return rest
    return t


def _uncovered(terms: set[Term]) -> set[Term]:
    uncovered: list[Term] = []
    for t in sorted(terms, key=lambda t: (len(t), sorted(map(repr, t)))):
        if not any(_covers(u, t) for u in uncovered):
            uncovered = [u for u in uncovered if not _covers(t, u)]
            uncovered.append(t)
    return set(uncovered)


def conjunction(parts: Iterable[Condition]) -> Condition:
    """Holds where all parts do."""
    total = TRUE
    for part in parts:
        total = disjunction([frozenset(s | t for s in total for t in part)])
    return total


def negation(c: Condition) -> Condition:
    """Holds where c does not."""
    return conjunction(frozenset(frozenset({_inverse(x)}) for x in t) for t in c)


def at(c: Condition, table: Mapping[Expr, Expr]) -> Condition:
    """The condition with axes replaced."""
    return disjunction(conjunction(_moved(x, table) for x in t) for t in c)


def _moved(x: Expr, table: Mapping[Expr, Expr]) -> Condition:
    if x.op == "not":
        return negation(_moved(x.args[0], table))
    new = substitute(x, table)
    if new is x or new.op not in _TURNED:
        return TRUE if new.op == "const" and new.value else FALSE if new.op == "const" else literal(new)
    if new.args[0].dtype is i64 and not _reads(new):
        return comparison(new.op, *new.args)
    return data_comparison(new.op, *new.args)


def as_expr(c: Condition) -> Expr:
    """A condition as one bool expression."""
    made = [_chain("and", sorted(t, key=repr), True) for t in c]
    return _chain("or", sorted(made, key=repr), False)


def _chain(op: str, terms: list[Expr], unit: bool) -> Expr:
    total = const(unit, bool_)
    for t in terms:
        total = call(op, total, t)
    return total
