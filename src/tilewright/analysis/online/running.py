"""What of the results that a body reads can serve as a statistic while it moves: running extremes and running means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tilewright.ir.expr import Axis, Expr, call, const, is_const, substitute, walk, where
from tilewright.ir.reduction import Reduction
from tilewright.ir.sizes import dims
from tilewright.tuning.search_limits import FACTS

from .terms import RunningStatistic


@dataclass(frozen=True, slots=True)
class Upstream:
    """A reduction that another one reads as `leaf`: `body` folded by `reduction` over the same axes."""

    leaf: Expr
    reduction: Reduction
    body: tuple[Expr, ...]


def statistics_of(body: Expr, upstream: Sequence[Upstream], over: Sequence[Axis]) -> list[RunningStatistic]:
    """The statistics that occur in `body`."""
    found: list[RunningStatistic] = []
    moving = {u.leaf for u in upstream}
    for u in upstream:
        if len(u.body) != 1 or any(x in moving for x in walk(u.body[0])) or not u.leaf.dtype.is_float:
            continue
        if u.reduction.combiner in ("maximum", "minimum"):
            found += _extremes(body, u, u.reduction.combiner, over)
        elif u.reduction.combiner == "add":
            means = [x for x in walk(body) if _is_mean(x, u.leaf, over)]
            found += [RunningStatistic(u.leaf, x, u.body[0], centred=True) for x in means]
    return found


def _extremes(body: Expr, u: Upstream, combiner: str, over: Sequence[Axis]) -> list[RunningStatistic]:
    rising = combiner == "maximum"
    throughs = [
        x for x in walk(body) if is_finite_part(x, u.leaf, rising) or _is_bounded(x, u.leaf, combiner, over)
    ]
    rest = substitute(body, {x: const(0, x.dtype) for x in throughs})
    if any(x is u.leaf for x in walk(rest)):
        throughs.append(u.leaf)
    return [RunningStatistic(u.leaf, x, u.body[0], bounded=x.op == combiner, rising=rising) for x in throughs]


def is_finite_part(x: Expr, leaf: Expr, rising: bool) -> bool:
    """Whether `x` is `leaf` with zero in the place of infinities, or of an extreme's identity."""
    if x.op != "where" or x.args[2] is not leaf or not is_const(x.args[1], 0):
        return False
    test = x.args[0]
    if test.op == "isinf":
        return test.args[0] is leaf
    if test.op == "eq" and test.args[0] is leaf:
        return is_const(test.args[1], -math.inf if rising else math.inf)
    return test.op == "eq" and test.args[0] is call("abs", leaf) and is_const(test.args[1], math.inf)


def _is_bounded(x: Expr, leaf: Expr, combiner: str, over: Sequence[Axis]) -> bool:
    """Whether `x` is the extreme of `leaf` and something that every element sees."""
    if x.op != combiner or leaf not in x.args:
        return False
    other = x.args[1] if x.args[0] is leaf else x.args[0]
    return not any((y.op == "axis" and y.value in over) or y is leaf for y in walk(other))


def _is_mean(x: Expr, leaf: Expr, over: Sequence[Axis]) -> bool:
    """Whether `x` is `leaf` over the number of elements."""
    if x.op not in ("div", "mul") or leaf not in x.args:
        return False
    if x.op == "div" and x.args[0] is not leaf:
        return False
    other = x.args[1] if x.args[0] is leaf else x.args[0]
    count = dims.prod(a.extent for a in over)
    if x.op == "div" and other.op == "cast" and other.args[0].dtype is count.dtype:
        return dims.equal(other.args[0], count)
    size, value = dims.static(count), other.value
    if not size or other.op != "const" or not isinstance(value, (int, float, Fraction)):
        return False
    scale = float(value) if x.op == "div" else 1 / float(value) if value else 0.0
    return abs(scale - size) <= FACTS.inverse_count_error * size


def empty(statistic: RunningStatistic, state: Expr) -> Expr:
    """Whether an extreme has seen nothing but its identity."""
    return call("eq", state, const(-math.inf if statistic.rising else math.inf, state.dtype))


def shown(statistic: RunningStatistic, state: Expr, count: Expr | None, total: Expr | None) -> Expr:
    """What readers see of a statistic whose state is `state`: a mean of the `count` elements so far instead of the
    `total` number, and no infinite extreme of nothing."""
    zero = const(0.0, state.dtype)
    if statistic.centred:
        assert count is not None and total is not None
        return call("mul", state, where(call("eq", count, zero), zero, call("div", total, count)))
    return where(empty(statistic, state), zero, state) if statistic.through is statistic.leaf else state


def gap(statistic: RunningStatistic, state: Expr, old: Expr, new: Expr, falls: bool) -> Expr:
    """How far a statistic has moved since its state was `state`, from what was read of it then (`old`) to `new`. From
    nothing to something: infinitely far if exponentials fall by it (`falls`), else not at all, since nothing has been
    summed."""
    moved = call("sub", old, new)
    if statistic.open and not (falls and statistic.through is statistic.leaf):
        return where(empty(statistic, state), const(0.0, state.dtype), moved)
    return moved


def lost(body: Expr, statistics: Sequence[RunningStatistic]) -> bool:
    """Whether `body` is NaN for sure where an extreme and its elements are still the extreme's identity."""
    for g in statistics:
        if g.through is not g.leaf:
            continue
        for limit in (-math.inf, math.inf):
            value = _value(body, {g.anchor: limit, g.leaf: limit}, {})
            if value is None or not math.isnan(value):
                break
        else:
            return True
    return False


def _value(e: Expr, known: dict[Expr, float], memo: dict[Expr, float | None]) -> float | None:
    """The number that `e` is where `known` holds; None if it is open."""
    if e in known:
        return known[e]
    if e not in memo:
        if e.op == "const":
            memo[e] = float(e.value) if isinstance(e.value, (bool, int, float, Fraction)) else None
        else:
            memo[e] = _applied(e.op, [_value(a, known, memo) for a in e.args])
    return memo[e]


def _applied(op: str, args: Sequence[float | None]) -> float | None:
    if op == "where":
        condition, yes, no = args
        if condition is not None:
            return yes if condition else no
        nothing = yes is not None and no is not None and math.isnan(yes) and math.isnan(no)
        return yes if nothing else None
    if op not in _ARITHMETIC:
        return None
    if any(a is not None and math.isnan(a) for a in args):
        return math.nan
    if any(a is None for a in args):
        return None
    a, *rest = (x for x in args if x is not None)
    match op:
        case "add" | "sub":
            return a + rest[0] if op == "add" else a - rest[0]
        case "mul":
            return a * rest[0]
        case "neg":
            return -a
        case "cast" | "narrow":
            return a
        case _:
            return None


_ARITHMETIC = frozenset(
    {
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "abs",
        "cast",
        "narrow",
        "exp",
        "exp2",
        "log",
        "sqrt",
        "tanh",
        "coarse_tanh",
        "quick_tanh",
        "maximum",
    }
)
