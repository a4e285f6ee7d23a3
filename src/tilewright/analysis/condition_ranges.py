"""Where along a class a condition surely holds and where it surely fails, while other classes range over blocks.

A comparison linear in a class c has the form +-c + rest >= 0. Where the other classes of `rest` range over intervals
(a block of a grid point, or a whole extent), it holds in every lane on one side of a first place, fails in every lane
on the far side of a second one, and is mixed in between. Places are rounded to whole tiles, so that what is cut off or
left unmasked is whole tiles; conjunctions, disjunctions and negations combine the intervals. Where `rest` has whole
numbers from memory, their least and greatest one in the block stand for them, which a run finds before the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tilewright.ir.dtype import bool_, i64
from tilewright.ir.expr import Axis, Expr, axes_of, axis, slot, walk
from tilewright.ir.sizes import dims

from .predicate import slack_of

Spans = Mapping[Axis, tuple[Expr, Expr]]
"""First and last value of a class where it is bound; a class that is missing ranges over its whole extent."""


@dataclass(frozen=True, slots=True)
class ClassRange:
    """low <= class < high; None where it has no end."""

    low: Expr | None = None
    high: Expr | None = None

    def meet(self, other: ClassRange) -> ClassRange:
        """What both have."""
        return ClassRange(
            _either(self.low, other.low, dims.maximum), _either(self.high, other.high, dims.minimum)
        )


@dataclass(frozen=True, slots=True)
class KnownRanges:
    """Intervals in which a condition holds for every lane, and such in which it fails for every lane."""

    holds: tuple[ClassRange, ...] = ()
    fails: tuple[ClassRange, ...] = ()


@dataclass(frozen=True, slots=True)
class Steps:
    """A loop over `axis` from `start` to `stop` in steps of `tile`. `exact` says that the length is a multiple of the
    tile although its expression does not show it."""

    axis: Axis
    start: Expr
    stop: Expr
    tile: int
    exact: bool = False

    def down(self, place: Expr) -> Expr:
        """The last edge between tiles that is not beyond `place`."""
        return self._rounded(dims.sub(place, self.start))

    def up(self, place: Expr) -> Expr:
        """The first edge between tiles that is not before `place`."""
        return self._rounded(dims.add(dims.sub(place, self.start), dims.integer(self.tile - 1)))

    def all_if(self, number: Expr) -> Expr:
        """The end of the loop if `number` is positive, else its start."""
        return _chosen(number, self.up(self.stop), self.start)

    def unless(self, numbers: Sequence[Expr], interval: ClassRange) -> ClassRange:
        """The interval, empty if one of the `numbers` is negative."""
        for n in numbers:
            ok = dims.add(n, dims.ONE)
            low = None if interval.low is None else _chosen(ok, interval.low, self.up(self.stop))
            high = None if interval.high is None else _chosen(ok, interval.high, self.start)
            interval = ClassRange(low, high)
        return interval

    def _rounded(self, length: Expr) -> Expr:
        step = dims.integer(self.tile)
        return dims.add(self.start, dims.mul(dims.floordiv(length, step), step))


@dataclass(frozen=True, slots=True)
class End:
    """The least (`low`) or greatest value of `number`, which comes from memory, over a block. Values beyond `limit`
    from 0 count as that: they are on one side of all places of the class."""

    number: Expr
    low: bool
    limit: Expr


class Ends:
    """Numbers from memory that a loop ends at, as far as they are `safe` to evaluate ahead of it."""

    def __init__(self, safe: Callable[[Expr], bool]) -> None:
        self.safe = safe
        self.found: list[End] = []

    def stand_in(self, end: End) -> Expr:
        """The leaf that stands for `end` until its number is computed."""
        if end not in self.found:
            self.found.append(end)
        return slot("end", self.found.index(end), i64)

    def put_in(self, e: Expr, spans: Spans, low: bool, c: Axis) -> Expr | None:
        """`e`, which a loop over `c` compares with its places, with its number from memory as the end that makes it
        least (`low`) or greatest; None if there are several, or they depend on what is not bound."""
        data = [(m, k) for m, k in dims.linear(e).items() if any(x.op == "read" for a in m for x in walk(a))]
        if not data:
            return e
        (number, *more), factor = data[0]
        if (
            more
            or len(data) > 1
            or any(a.value not in spans for a in axes_of(number))
            or not self.safe(number)
        ):
            return None
        rest = dims.sub(e, dims.mul(number, dims.integer(factor)))
        least, most = dims.bounds(rest)
        if least is None or most is None:
            return None
        limit = dims.add(c.extent, dims.maximum(most, _negative(least)), dims.ONE)
        end = self.stand_in(End(number, low == (factor > 0), limit))
        return dims.add(rest, dims.mul(end, dims.integer(factor)))


def unless(numbers: Sequence[Expr], holds: Expr, fails: Expr) -> Expr:
    """`holds`, or `fails` if one of the `numbers` is negative."""
    for n in numbers:
        holds = _chosen(dims.add(n, dims.ONE), holds, fails)
    return holds


def known(condition: Expr, steps: Steps, spans: Spans, ends: Ends | None = None) -> KnownRanges:
    """Where `condition` is known, in whole tiles of a loop; that which numbers from memory say only with `ends`."""
    if condition.op == "implied":
        return KnownRanges((ClassRange(),), known(condition.args[0], steps, spans, ends).fails)
    if condition.dtype is bool_ and condition.op == "not":
        inner = known(condition.args[0], steps, spans, ends)
        return KnownRanges(inner.fails, inner.holds)
    if condition.dtype is bool_ and condition.op in ("and", "or"):
        parts = [known(x, steps, spans, ends) for x in condition.args]
        all_hold = _common([p.holds for p in parts]), _joined([p.fails for p in parts])
        one_holds = _joined([p.holds for p in parts]), _common([p.fails for p in parts])
        return KnownRanges(*(all_hold if condition.op == "and" else one_holds))
    slack = slack_of(condition, ends is not None)
    if slack is None:
        return KnownRanges()
    rises = dims.static(dims.coefficient(slack, axis(steps.axis)) or dims.ZERO)
    if rises not in (1, -1, 0):
        return KnownRanges()
    rest = dims.sub(slack, dims.mul(axis(steps.axis), dims.integer(rises)))
    low, high = (
        rest if ends is None else ends.put_in(rest, spans, side, steps.axis) for side in (True, False)
    )
    least = None if low is None else extreme(low, spans, low=True)
    most = None if high is None else extreme(high, spans, low=False)
    if rises == 0:
        # All of the loop or nothing of it, which only a run knows.
        holds = None if least is None else ClassRange(high=steps.all_if(dims.add(least, dims.ONE)))
        fails = None if most is None else ClassRange(high=steps.all_if(_negative(most)))
    elif rises == 1:
        holds = None if least is None else ClassRange(low=steps.up(_negative(least)))
        fails = None if most is None else ClassRange(high=steps.down(_negative(most)))
    else:
        holds = None if least is None else ClassRange(high=steps.down(dims.add(least, dims.ONE)))
        fails = None if most is None else ClassRange(low=steps.up(dims.add(most, dims.ONE)))
    return KnownRanges(() if holds is None else (holds,), () if fails is None else (fails,))


def extreme(e: Expr, spans: Spans, low: bool) -> Expr | None:
    """The least (`low`) or greatest value of an index expression while its classes range over `spans`; None if it is
    not linear in them."""
    for leaf in sorted(axes_of(e), key=repr):
        a, factor = leaf.value, dims.static(dims.coefficient(e, leaf) or leaf)
        if not isinstance(a, Axis):
            return None
        first, last = spans.get(a, (dims.ZERO, dims.sub(a.extent, dims.ONE)))
        if first is leaf and last is leaf:
            continue
        if factor is None:
            return None
        end = first if (factor > 0) == low else last
        e = dims.add(e, dims.mul(dims.sub(end, leaf), dims.integer(factor)))
    return e


def visible(condition: Expr, truth: bool, c: Axis) -> tuple[Expr, ...] | None:
    """Numbers that, if none is negative, prove that at each value of `c` the condition has `truth` somewhere along the
    one other class that it tests; None if that cannot be said."""
    best: tuple[Expr, ...] | None = None
    for atoms in _alternatives(condition, truth):
        found = _satisfied(atoms, c)
        if found is not None and (best is None or len(found) < len(best)):
            best = found
    return best


def _satisfied(atoms: Sequence[tuple[Expr, bool]], c: Axis) -> tuple[Expr, ...] | None:
    """`visible` for a conjunction: each half-line along the other class meets its extent, and each two meet."""
    slacks: list[Expr] = []
    for condition, truth in atoms:
        slack = slack_of(condition)
        if slack is None:
            return None
        slacks.append(slack if truth else dims.sub(dims.integer(-1), slack))
    others = {x for s in slacks for x in axes_of(s) if x.value != c}
    if len(others) != 1:
        return None
    (d,) = others
    ends: list[Expr | None] = []
    for s in slacks:
        factor = dims.static(dims.coefficient(s, d) or dims.ZERO)
        if factor not in (-1, 0, 1):
            return None
        best = s if not factor else extreme(s, {c: (axis(c), axis(c))}, low=False)
        ends.append(None if best is None else extreme(best, {}, low=True))
        for t in slacks:
            if factor == 1 and dims.static(dims.coefficient(t, d) or dims.ZERO) == -1:
                ends.append(extreme(dims.add(s, t), {}, low=True))
    if any(e is None for e in ends):
        return None
    return tuple(e for e in ends if e is not None and not dims.at_least(e, 0))


def _alternatives(condition: Expr, truth: bool) -> list[list[tuple[Expr, bool]]]:
    """Conjunctions of single comparisons, any of which makes the condition have `truth`."""
    if condition.dtype is bool_ and condition.op == "not":
        return _alternatives(condition.args[0], not truth)
    if condition.dtype is bool_ and condition.op in ("and", "or"):
        left, right = (_alternatives(x, truth) for x in condition.args)
        if (condition.op == "or") == truth:
            return left + right
        return [a + b for a in left for b in right]
    return [[(condition, truth)]]


def _chosen(number: Expr, yes: Expr, no: Expr) -> Expr:
    """`yes` if `number` is positive, else `no`."""
    holds = dims.minimum(dims.maximum(number, dims.ZERO), dims.ONE)
    return dims.add(no, dims.mul(holds, dims.sub(yes, no)))


def _negative(e: Expr) -> Expr:
    return dims.mul(e, dims.integer(-1))


def _either(a: Expr | None, b: Expr | None, pick: Callable[[Expr, Expr], Expr]) -> Expr | None:
    return b if a is None else a if b is None else pick(a, b)


def _common(parts: Sequence[tuple[ClassRange, ...]]) -> tuple[ClassRange, ...]:
    found = [ClassRange()]
    for part in parts:
        found = [a.meet(b) for a in found for b in part]
    return tuple(found)


def _joined(parts: Sequence[tuple[ClassRange, ...]]) -> tuple[ClassRange, ...]:
    """All of them; half-lines in one direction are one."""
    indices = [i for part in parts for i in part]
    below = [i.high for i in indices if i.low is None and i.high is not None]
    above = [i.low for i in indices if i.high is None and i.low is not None]
    found = [i for i in indices if i.low is not None and i.high is not None or i == ClassRange()]
    if above:
        found.insert(0, ClassRange(low=_folded(above, dims.minimum)))
    if below:
        found.insert(0, ClassRange(high=_folded(below, dims.maximum)))
    return tuple(found)


def _folded(ends: Sequence[Expr], pick: Callable[[Expr, Expr], Expr]) -> Expr:
    result = ends[0]
    for e in ends[1:]:
        result = pick(result, e)
    return result
