"""The range of a loop: cut where conditions change (index-set splitting), then into whole tiles and a masked rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.ir.dtype import i64
from tilewright.ir.expr import Axis, Expr, axes_of, axis, both, call, cast, walk
from tilewright.ir.form import Item
from tilewright.ir.sizes import dims

from .condition_ranges import ClassRange, Ends, KnownRanges, Spans, Steps, known, unless, visible
from .predicate import Truths, conditions, constant_under, is_neutral, ordered, slack_of, tested, threshold

_EXPONENTIALS = ("exp", "exp2")


@dataclass(frozen=True, slots=True)
class Entries:
    """A list of tiles of a class, each walked in `parts`: entry e, a value of `axis`, stands for part e % parts of the
    tile of `length` values whose number `tile` is, a read at e."""

    axis: Axis
    tile: Expr
    length: int
    parts: int

    def first(self, tile: Expr) -> Expr:
        """Where the class begins at an entry whose tile has this number."""
        part = dims.mod(axis(self.axis), dims.integer(self.parts))
        step = dims.integer(self.length // self.parts)
        return dims.add(dims.mul(cast(tile, i64), dims.integer(self.length)), dims.mul(part, step))


@dataclass(frozen=True, slots=True)
class LoopSegment:
    """A loop over start <= class < stop: the mask of lanes that count (None: all), and the conditions known there.
    With `left_out`, its folds take only identities, and what later passes find in scratch is constant. There is one
    step at most if it runs `once`. With `entries`, start <= entry < stop, and the class begins where the entry says."""

    start: Expr
    stop: Expr
    mask: Expr | None = None
    truths: Mapping[Expr, bool] = field(default_factory=dict)
    left_out: bool = False
    once: bool = False
    entries: Entries | None = None


@dataclass(frozen=True, slots=True)
class RangePiece:
    """start <= class < stop, the conditions that are known there, and `LoopSegment.left_out`."""

    start: Expr
    stop: Expr
    truths: Mapping[Expr, bool] = field(default_factory=dict)
    left_out: bool = False


@dataclass(frozen=True, slots=True)
class Hidden:
    """What must hold of an element, each of `shown`, or folds take only their identities for it; and the numbers of
    which none may be negative where the rest is left out (see `_needed`). With `behind`, only what lies behind all that
    is shown is left out: a running fold takes elements before it that others do not."""

    shown: tuple[Expr, ...] = ()
    needed: tuple[Expr, ...] | None = ()
    behind: bool = False


def hidden_by(roots: Sequence[Expr], trimmed: Sequence[Item], c: Axis) -> Hidden:
    """What hides elements of a loop over `c` that evaluates `roots` from all of the folds `trimmed`."""
    shown = _hiding(roots, trimmed)
    if not shown and any(t.scan is not None for t in trimmed):
        trimmed = [t for t in trimmed if t.scan is None]
        shown = _hiding(roots, trimmed)
        return Hidden(tuple(shown), _needed(shown, trimmed, c), behind=True)
    return Hidden(tuple(shown), _needed(shown, trimmed, c))


def split_range(
    c: Axis, bounds: tuple[Expr, Expr], tile: int, roots: Sequence[Expr], scalars: frozenset[Axis],
    trimmed: Sequence[Item], in_scratch: Sequence[Expr], known: Truths,
) -> list[RangePiece]:  # fmt: skip
    """The range `bounds` of `c`, cut where the conditions in `roots` change, given the bound `scalars`. Pieces in which
    every fold of `trimmed` (if any) takes only its identity are left out; where cutting serves nothing, one piece.
    Expressions `in_scratch`, for later passes, must be constant in such pieces, which then stand in the list.

    Scalar loops are only cut to leave pieces out: there a condition costs one branch. Where a value of the class may
    see nothing at all (`_needed`), what else would be left out runs."""
    start, stop = bounds
    found = [threshold(x, c, scalars) for x in conditions(roots)]
    thresholds = ordered([t for t in found if t is not None])
    if not thresholds:
        return [RangePiece(start, stop)]
    places = list(dict.fromkeys(t.at for t in thresholds))
    edges = [start]
    for place in places:
        edges.append(dims.minimum(dims.maximum(place, edges[-1]), stop))
    edges.append(stop)
    pieces: list[RangePiece] = []
    needed, again = _needed(_hiding(roots, trimmed), trimmed, c), 0
    for k, (first, last) in enumerate(zip(edges, edges[1:], strict=False)):
        truths = {t.condition: (places.index(t.at) < k) == t.rising for t in thresholds}
        now = {**known, **truths}
        left_out = all(is_neutral(t, now) for t in trimmed) and all(
            constant_under(x, now) is not None for x in in_scratch
        )
        if not trimmed or not left_out or needed is None or (in_scratch and needed):
            pieces.append(RangePiece(first, last, truths))
        elif in_scratch:
            pieces.append(RangePiece(first, last, truths, True))
        elif needed:
            pieces.append(RangePiece(first, unless(needed, first, last), truths))
            again += 1
    useful = tile > 1 or sum(not p.left_out for p in pieces) - again <= len(places)
    return pieces if useful else [RangePiece(start, stop)]


def segments(c: Axis, tile: int, piece: RangePiece, exact: bool, peel: bool) -> list[LoopSegment]:
    """Whole tiles without a mask, then a masked rest if there may be one; all in one without `peel`. `exact` says that
    the length is a multiple of the tile although its expression does not show it."""
    start, stop, truths, left_out = piece.start, piece.stop, piece.truths, piece.left_out
    length = dims.sub(stop, start)
    if dims.static(length) == 0:
        return []
    if tile == 1 or exact or dims.divisible(length, tile):
        return [LoopSegment(start, stop, None, truths, left_out)]
    step = dims.integer(tile)
    tail = dims.add(start, dims.mul(dims.floordiv(length, step), step))
    mask = call("lt", axis(c), stop)
    if not peel or (dims.static(length) is not None and tail is start):
        return [LoopSegment(start, stop, mask, truths, left_out)]
    return [LoopSegment(start, tail, None, truths, left_out), LoopSegment(tail, stop, mask, truths, left_out)]


def tiled_segments(
    steps: Steps, roots: Sequence[Expr], spans: Spans, hidden: Hidden, split: bool, ends: Ends
) -> list[LoopSegment]:
    """Loops over whole tiles while other classes range over `spans`: tiles that are `hidden` are left out, and with
    `split` those in which no lane is masked run apart, without masks. Numbers from memory count if they may be put
    into `ends`."""
    stop = steps.stop
    even = steps.exact or dims.divisible(dims.sub(stop, steps.start), steps.tile)
    mask = None if even else call("lt", axis(steps.axis), stop)
    seen, region = _mask(steps, spans, hidden, ends)
    parts = _parts(steps, region)
    scalars = frozenset(a for a, (low, high) in spans.items() if low is high)
    edge = threshold(seen, steps.axis, scalars) if seen is not None else None
    once = mask is None and len(parts) == 1 and edge is not None
    nearer = _nearer(seen, roots, steps, spans) if seen is not None and split else {}
    made: list[LoopSegment] = []
    for low, high, inside in parts:
        interior = inside if split else None
        for region in nearer.values():
            interior = None if interior is None else interior.meet(region)
        if mask is not None and interior is not None:
            interior = interior.meet(ClassRange(high=steps.down(stop)))
        if interior is None or (seen is None and mask is None):
            made.append(LoopSegment(low, high, mask))
            continue
        last = high if mask is None else dims.minimum(high, dims.maximum(steps.down(stop), low))
        first = low if interior.low is None else dims.minimum(dims.maximum(interior.low, low), last)
        end = high if interior.high is None else dims.minimum(dims.maximum(interior.high, first), high)
        truths_inside = dict(_implied(seen, True)) if seen is not None else {}
        truths_inside |= dict.fromkeys(nearer, True)
        made += [
            LoopSegment(low, first),
            LoopSegment(first, end, None, truths_inside),
            LoopSegment(end, high, mask, once=once),
        ]
    return [s for s in made if s.start is not s.stop]


def _nearer(seen: Expr, roots: Sequence[Expr], steps: Steps, spans: Spans) -> dict[Expr, ClassRange]:
    """Conditions in `roots` that hold up to one place less than `seen` does, and where: what has only a part of its
    elements at the last place is whole before."""
    slack = slack_of(seen)
    found: dict[Expr, ClassRange] = {}
    for x in conditions(roots) if slack is not None else ():
        own = slack_of(x)
        if own is not None and slack is not None and dims.sub(slack, own) is dims.ONE:
            region = known(x, steps, spans).holds
            found |= {x: region[0]} if region else {}
    return found


def _mask(steps: Steps, spans: Spans, hidden: Hidden, ends: Ends) -> tuple[Expr | None, KnownRanges]:
    """What must hold of an element that is not `hidden` (as far as loops can end by it; None: nothing is known), and
    where it is known.

    Where rows that see nothing must not be left out, the intervals that are left out are empty if there are any."""
    regions = [known(x, steps, spans, ends) for x in hidden.shown]
    seen = _all(x for x, region in zip(hidden.shown, regions, strict=True) if region.holds or region.fails)
    if seen is None:
        return None, KnownRanges((ClassRange(),))
    region = known(seen, steps, spans, ends)
    if hidden.needed is None:
        return seen, KnownRanges(region.holds)
    left_out = [i for i in region.fails if i.high is None or not hidden.behind]
    return seen, KnownRanges(region.holds, tuple(steps.unless(hidden.needed, i) for i in left_out))


def _hiding(roots: Sequence[Expr], trimmed: Sequence[Item]) -> list[Expr]:
    """What each `where` asks for, if every fold of `trimmed` takes its identity where that does not hold."""
    found: list[Expr] = []
    for x in tested(roots) if trimmed else ():
        if all(is_neutral(t, {x: False}) for t in trimmed):
            found.append(x)
        if all(is_neutral(t, {x: True}) for t in trimmed):
            found.append(call("not", x))
    return found


def _all(wanted: Iterable[Expr]) -> Expr | None:
    seen: Expr | None = None
    for x in wanted:
        seen = both(seen, x)
    return seen


def _needed(hiding: Sequence[Expr], trimmed: Sequence[Item], c: Axis) -> tuple[Expr, ...] | None:
    """Numbers of which none may be negative where what does not fulfil all of `hiding` is left out of folds over `c`;
    None: it may never be.

    Where an exponential takes off a number that belongs to values of the class (the log of a row's sum or a row's
    maximum, while columns are folded), that number is infinite for a row that sees nothing: such rows must not be left
    out. What tests the exponential itself comes too late to hide anything from the row."""
    seen = _all(x for x in hiding if not any(y.op in _EXPONENTIALS for y in walk(x)))
    if seen is None or not any(shifted_by_rows(t, seen, c) for t in trimmed):
        return ()
    return visible(seen, True, c)


def shifted_by_rows(fold: Item, condition: Expr, c: Axis) -> list[Expr]:
    """The numbers, from memory or of folds, that exponentials of a fold take off, that belong to values of `c`, and
    that are the same for all that the condition hides or shows of these, or for several elements: each may be a fold
    of what is hidden."""
    others = axes_of(condition) - {axis(c)}
    powers = [x for root in fold.body for x in walk(root) if x.op in _EXPONENTIALS]
    numbers = ((x, y) for x in powers for y in _read(x) if axis(c) in axes_of(y))
    return [y for x, y in numbers if others - axes_of(y) or axes_of(y) < axes_of(x)]


def _read(e: Expr) -> list[Expr]:
    """What a value reads from memory or of folds; conditions only choose."""
    seen: dict[Expr, None] = {}
    todo = [e]
    while todo:
        x = todo.pop()
        if x not in seen:
            seen[x] = None
            todo += x.args[1:] if x.op == "where" else x.args
    return [x for x in seen if x.op in ("read", "value")]


def _parts(steps: Steps, region: KnownRanges) -> list[tuple[Expr, Expr, ClassRange | None]]:
    """(start, stop, what is not masked there): the range without its ends and without one hole where nothing counts."""
    low, high = steps.start, steps.stop
    hole: ClassRange | None = None
    inside = region.holds
    for empty in region.fails:
        if empty.low is None and empty.high is not None:
            low = dims.maximum(low, empty.high)
        elif empty.high is None and empty.low is not None:
            high = dims.minimum(high, empty.low)
        else:
            hole = hole or empty
    low = dims.minimum(low, steps.stop)
    high = dims.maximum(high, low)
    if hole is None or hole.low is None or hole.high is None:
        return [(low, high, inside[0] if len(inside) == 1 else None)]
    first = dims.minimum(dims.maximum(hole.low, low), high)
    second = dims.minimum(dims.maximum(hole.high, first), high)
    before = next((i for i in inside if i.low is None), None)
    after = next((i for i in inside if i.low is not None), None)
    return [(low, first, before), (second, high, after)]


def growth(items: Sequence[Item], a: Axis) -> int:
    """Positive if masks leave the loops over other classes more to do at larger values of `a`, negative if less."""
    balance = 0
    for condition, sign in _signed([r for i in items for r in i.body]):
        slack = slack_of(condition)
        mine = None if slack is None else dims.static(dims.coefficient(slack, axis(a)) or dims.ZERO)
        if slack is None or not mine:
            continue
        for other in axes_of(slack) - {axis(a)}:
            factor = dims.static(dims.coefficient(slack, other) or dims.ZERO)
            more = (mine > 0) - (mine < 0)
            balance += sign * more if factor else 0
    return balance


def _signed(roots: Sequence[Expr]) -> list[tuple[Expr, int]]:
    """Single conditions of `where`s, with -1 where it is the first side that is constant."""
    found = {x: x.args[1].op == "const" for r in roots for x in walk(r) if x.op == "where"}
    return [(a, -1 if left else 1) for x, left in found.items() for a in conditions([x])]


def _implied(condition: Expr, truth: bool) -> list[tuple[Expr, bool]]:
    """Conditions that are decided where `condition` is, itself first."""
    found = [(condition, truth)]
    if condition.op == "not":
        found += _implied(condition.args[0], not truth)
    elif condition.op == ("and" if truth else "or"):
        found += [x for a in condition.args for x in _implied(a, truth)]
    return found
