"""What is known of an expression when single conditions are assumed true or false: truth, thresholds, neutrality.

One abstract evaluator serves index-set splitting (where does a condition change along a class?), trimming (is a fold's
element its identity there?) and the choice of a side of a `where`. It works conjunct by conjunct: that one conjunct is
true says nothing about the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from tilewright.analysis.value.interval import point
from tilewright.analysis.value.sign import sign_of
from tilewright.ir.dtype import bool_, i64
from tilewright.ir.expr import Axis, Expr, axes_of, axis, call, const, walk
from tilewright.ir.form import Item
from tilewright.ir.sizes import dims

Truths = Mapping[Expr, bool]

Facts = Mapping[object, bool]
"""Truths of comparisons, by what they compare (see `_compared`)."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """Condition `condition` holds for values of a class on one side of `at`: from there on (`rising`), or before it."""

    condition: Expr
    at: Expr
    rising: bool


def slack_of(condition: Expr, data: bool = False) -> Expr | None:
    """An index expression that is not negative exactly where the comparison `condition` holds; None if it is none of
    classes and sizes (and, with `data`, of whole numbers from memory, which are trusted not to wrap)."""
    if condition.op not in ("lt", "le", "gt", "ge") or condition.args[0].dtype is not i64:
        return None
    left, right = condition.args
    if condition.op in ("gt", "ge"):
        left, right = right, left
    slack = dims.sub(right, left)
    if condition.op in ("lt", "gt"):
        slack = dims.sub(slack, dims.ONE)
    foreign = ("value", "var") if data else ("read", "value", "var")
    return None if any(x.op in foreign for x in walk(slack)) else slack


def threshold(condition: Expr, c: Axis, scalars: frozenset[Axis]) -> Threshold | None:
    """Where a comparison linear in `c` changes; None if it depends on other than sizes and the bound `scalars`."""
    slack = slack_of(condition)
    if slack is None:
        return None
    factor = dims.coefficient(slack, axis(c))
    if factor is None or dims.static(factor) not in (1, -1):
        return None
    rest = dims.sub(slack, dims.mul(axis(c), factor))
    if any(a.value not in scalars for a in axes_of(rest)):
        return None
    if dims.static(factor) == 1:
        return Threshold(condition, dims.mul(rest, dims.integer(-1)), True)
    return Threshold(condition, dims.add(rest, dims.ONE), False)


def tested(roots: Sequence[Expr]) -> list[Expr]:
    """The conditions that the `where`s of expressions test, in order of first use."""
    return list(dict.fromkeys(x.args[0] for r in roots for x in walk(r) if x.op == "where"))


def conditions(roots: Sequence[Expr]) -> list[Expr]:
    """The single conditions of which those are made that the `where`s of expressions test, in order of first use."""
    return list(dict.fromkeys(a for x in tested(roots) for a in _atoms(x)))


def _atoms(condition: Expr) -> list[Expr]:
    if condition.op in ("and", "or") and condition.dtype is bool_:
        return [a for x in condition.args for a in _atoms(x)]
    if condition.op == "not" and condition.dtype is bool_:
        return _atoms(condition.args[0])
    return [condition]


def decide(condition: Expr, truths: Truths) -> Expr:
    """The condition with what is known put in: a bool constant, or what remains to be tested."""
    if not truths:
        return condition
    known = truths.get(condition)
    if known is not None:
        return const(known, bool_)
    if condition.op in ("and", "or", "not") and condition.dtype is bool_:
        return call(condition.op, *(decide(x, truths) for x in condition.args))
    return condition


def constant_under(e: Expr, truths: Truths) -> float | None:
    """The value of `e` if it is one constant under `truths`, else None. Values from memory are taken as finite:
    -inf minus one is -inf, zero times one is zero."""
    if e.op == "const":
        return float(e.value) if isinstance(e.value, (bool, int, float, Fraction)) else None
    if e.op == "where":
        side = decide(e.args[0], truths)
        chosen = side.value if side.op == "const" else constant_under(side, truths)
        if chosen is not None:
            return constant_under(e.args[1] if chosen else e.args[2], truths)
        a, b = constant_under(e.args[1], truths), constant_under(e.args[2], truths)
        return a if a is not None and a == b else None
    if e.op in ("cast", "narrow") and e.dtype.is_float:
        return constant_under(e.args[0], truths)
    if e.op in ("exp", "exp2"):
        a = constant_under(e.args[0], truths)
        return 0.0 if a == -math.inf else None
    if e.op in _COMPARISONS or (e.op in ("and", "or", "not") and e.dtype is bool_):
        return _decided(e, truths)
    if e.op in ("add", "sub", "mul", "div"):
        return _arithmetic(e.op, constant_under(e.args[0], truths), constant_under(e.args[1], truths))
    return None


_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})


def _decided(e: Expr, truths: Truths) -> float | None:
    """The truth (0 or 1) of a condition over numbers of which some are constant: by the numbers that the others may
    be."""
    known = ((a, constant_under(a, truths)) for a in e.args)
    facts = {a: point(c) for a, c in known if c is not None}
    return sign_of(e, facts).constant if facts else None


def _arithmetic(op: str, a: float | None, b: float | None) -> float | None:
    if op == "mul":
        for x, y in ((a, b), (b, a)):
            if x == 0:
                return None if y is not None and math.isinf(y) else 0.0
        return None if a is None or b is None else a * b
    if op == "div":
        if a is not None and math.isinf(a) and b is not None and math.isfinite(b) and b != 0:
            return a / b
        return 0.0 if a == 0 and (b is None or (b != 0 and not math.isnan(b))) else None
    if a is not None and math.isinf(a) and b is None:
        return a
    if b is not None and math.isinf(b) and a is None:
        return b if op == "add" else -b
    if a is None or b is None:
        return None
    return a + b if op == "add" else a - b


def is_neutral(fold: Item, truths: Truths) -> bool:
    """Whether every element of a fold is the identity of its reduction under `truths` (so its part may be left out, a
    running fold's where nobody reads it)."""
    assert fold.reduction is not None
    if fold.reduction.combiner is None:
        known = [constant_under(b, truths) for b in fold.body]
        state = fold.reduction.lifted([const(k or 0, b.dtype) for k, b in zip(known, fold.body, strict=True)])
        return None not in known and state == fold.reduction.identity
    value, identity = constant_under(fold.body[0], truths), fold.reduction.identity[0].value
    return value is not None and isinstance(identity, (bool, int, float)) and value == float(identity)


def ordered(found: Sequence[Threshold]) -> list[Threshold]:
    """Thresholds in ascending order as far as it can be proved (the rest is left out); at most two places."""
    chain: list[Threshold] = []
    places: set[Expr] = set()
    for t in found:
        if t.at not in places and len(places) == 2:
            continue
        if all(_comparable(t.at, u.at) for u in chain):
            chain.append(t)
            places.add(t.at)
    rank = {t.at: sum(dims.at_least(dims.sub(t.at, u), 0) for u in places) for t in chain}
    return sorted(chain, key=lambda t: rank[t.at])


def _comparable(a: Expr, b: Expr) -> bool:
    return dims.at_least(dims.sub(a, b), 0) or dims.at_least(dims.sub(b, a), 0)


def decided_by(visible: Expr, roots: Sequence[Expr]) -> dict[Expr, bool]:
    """What is known of the single conditions of `roots` where `visible` holds."""
    facts: dict[object, bool] = {}
    size = -1
    while len(facts) > size:
        size = len(facts)
        facts |= dict(_follows(visible, True, facts))
    found: dict[Expr, bool] = {}
    for x in conditions(roots):
        what, truth = _compared(x)
        if what in facts:
            found[x] = facts[what] == truth
    return found


def _follows(e: Expr, truth: bool, facts: Facts) -> Iterator[tuple[object, bool]]:
    """What follows from the truth of `e` and other facts: of the sides of a disjunction, one that is left."""
    if e.dtype is bool_ and e.op == "not":
        yield from _follows(e.args[0], not truth, facts)
    elif e.dtype is bool_ and e.op in ("and", "or"):
        open_ = [a for a in e.args if (e.op == "and") == truth or _truth(a, facts) is not (not truth)]
        if (e.op == "and") == truth or len(open_) == 1:
            for a in open_:
                yield from _follows(a, truth, facts)
    else:
        what, same = _compared(e)
        yield what, truth == same


def _truth(e: Expr, facts: Facts) -> bool | None:
    """The truth of a condition, as far as it is known."""
    if e.dtype is bool_ and e.op == "not":
        inner = _truth(e.args[0], facts)
        return None if inner is None else not inner
    if e.dtype is bool_ and e.op in ("and", "or"):
        sides = [_truth(a, facts) for a in e.args]
        if (e.op == "or") in sides:
            return e.op == "or"
        return None if None in sides else e.op == "and"
    what, same = _compared(e)
    return None if what not in facts else facts[what] == same


def _compared(x: Expr) -> tuple[object, bool]:
    """What a comparison of whole numbers is about, and its truth where that is so: equal for all ways to write it."""
    if x.op == "not" and x.dtype is bool_:
        what, truth = _compared(x.args[0])
        return what, not truth
    if x.op not in ("eq", "ne", "lt", "le", "gt", "ge") or x.args[0].dtype.is_float:
        return x, True
    a, b = x.args
    if x.op in ("eq", "ne"):
        if a.dtype is i64:
            gap = dims.sub(a, b)
            return ("eq", frozenset({gap, dims.sub(b, a)})), x.op == "eq"
        return ("eq", frozenset({a, b})), x.op == "eq"
    slack = slack_of(x, data=True)
    if slack is not None:
        opposite = dims.sub(dims.integer(-1), slack)
        return ("ge", frozenset({slack, opposite})), repr(slack) < repr(opposite)
    if x.op in ("gt", "ge"):
        a, b = b, a
    return (("lt", a, b), True) if x.op in ("lt", "gt") else (("lt", b, a), False)
