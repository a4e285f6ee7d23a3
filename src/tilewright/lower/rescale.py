"""Folds that run beside the folds they read: when a statistic moves, what has been summed so far is rescaled.

A state belongs to the values that its statistics had when it was last advanced. Three times statistics move: at a step,
when lanes come together, and when a level of states is added to the one above. Each time states are brought to the new
values by the law's rescaling, all from the old ones, before any of them is assigned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.online.running import empty, gap, shown
from tilewright.analysis.online.terms import RunningStatistic
from tilewright.form.companions import Merge
from tilewright.form.lane_softmax import merge_exponentials, weight
from tilewright.ir.expr import Expr, call, const, substitute, transform, where
from tilewright.ir.form import Item
from tilewright.ir.program import Compute, Declare, Dot, Update, Var, value_of

from .evaluate import Evaluator
from .passes import Merges, moving_folds
from .plan import takes_one_each
from .states import advance_scan, eval_operands, merge_lanes, name_results, step_elements

Values = Mapping[int, tuple[Expr, ...]]
"""States of folds."""

Gaps = dict[tuple[Expr, bool], Expr]
"""Names of gaps (by what is read of a statistic, and whether exponentials fall by it) and of their exponentials."""


def current_states(ev: Evaluator, folds: Sequence[int]) -> Values:
    """The states of folds as they stand."""
    return {f: tuple(value_of(v) for v in ev.states[f]) for f in folds}


def advance_states(ev: Evaluator, targets: Sequence[Item], merges: Merges) -> None:
    """Advance the states of `targets`, all of whose classes are bound, by the elements of a step: running folds first,
    whose values others read."""
    for t in targets:
        if t.scan is not None:
            advance_scan(ev, t)
    targets = [t for t in targets if t.scan is None]
    moving = moving_folds({t.id: merges[t.id] for t in targets if t.id in merges})
    before = current_states(ev, [t.id for t in targets])
    ahead = {t.id: advance_statistic(ev, t) for t in targets if t.id in moving}
    follows = [merges[t.id] for t in targets if t.id in merges]
    expose_statistics(ev, follows, ahead)
    gaps = share_exponentials(ev, targets, follows, before, ahead)
    rescaled = {m.states[0]: rescale_state(ev, m, before, gaps) for m in follows}
    for t in targets:
        if t.id not in moving:
            update_state(ev, t, rescaled.get(t.id))
    for f, new in ahead.items():
        ev.out.append(Update(ev.states[f], new))


def share_exponentials(
    ev: Evaluator, targets: Sequence[Item], follows: Sequence[Merge], before: Values, ahead: Values
) -> Gaps:
    """How far maxima have moved that each lane has for itself: elements and states share an exponential."""
    known: Gaps = {}
    folds = {t.id: t for t in targets}
    for merge in () if ev.schedule.math.exp2 else follows:
        for k, (statistic, f) in enumerate(zip(merge.law.statistics, merge.statistics, strict=True)):
            t = folds[f]
            own = ev.schedule.per_lane(f) and all(a in ev.states[f][0].axes for a in t.reduce)
            plain = statistic.rising and not statistic.bounded and statistic.through is statistic.leaf
            if not (own and plain and merge.law.falls(k)) or (statistic.through, True) in known:
                continue
            old = before[f][0]
            of_state, of_element = merge_exponentials(
                old, ev.eval(t.body[0]), ahead[f][0], "exp2" in ev.schedule.math.fast
            )
            moved = call("sub", old, ev.scope.results[f, 0])
            known[statistic.through, True] = moved
            known[call("exp", moved), False] = ev.named(of_state)
            ev.scope.memo[weight(t.body[0], statistic.leaf), None] = ev.named(of_element)
    return known


def advance_statistic(ev: Evaluator, t: Item) -> tuple[Expr, ...]:
    """The state of a statistic after this step, before it is assigned."""
    assert t.reduction is not None
    old = [value_of(v) for v in ev.states[t.id]]
    elements, mask = step_elements(ev, t)
    moved = t.reduction.merged(old, elements)
    if mask is not None:
        moved = tuple(call("where", mask, m, o) for m, o in zip(moved, old, strict=True))
    return tuple(ev.named(m) for m in moved)


def expose_statistics(ev: Evaluator, merges: Sequence[Merge], values: Values) -> None:
    """Let the statistics of `merges` be read with the states `values`."""
    found: dict[int, Expr] = {}
    for merge in merges:
        for statistic, f in zip(merge.law.statistics, merge.statistics, strict=True):
            if f not in found or statistic.through is statistic.leaf:
                found[f] = show_statistic(ev, merge, statistic, values[f][0], values)
    ev.scope.results.update({(f, 0): ev.named(e) for f, e in found.items()})


def show_statistic(
    ev: Evaluator, merge: Merge, statistic: RunningStatistic, state: Expr, values: Values
) -> Expr:
    """What readers see of a statistic whose state is `state`."""
    if merge.count is None:
        return shown(statistic, state, None, None)
    return shown(statistic, state, values[merge.count][0], merge.total)


def rescale_state(ev: Evaluator, merge: Merge, old: Values, gaps: Gaps) -> Expr:
    """The first state of `merge` out of `old`, brought to the statistics that are exposed. `gaps` holds those
    known."""
    law, count = merge.law, merge.count
    shifts: list[Expr] = []
    for k, (statistic, f) in enumerate(zip(law.statistics, merge.statistics, strict=True)):
        key = (statistic.through, law.falls(k))
        if key not in gaps:
            counted = {} if count is None else {count: old[count]}
            gaps[key] = ev.named(measure_gap(ev, merge, statistic, {f: old[f], **counted}, f, key[1]))
        shifts.append(gaps[key])
    states = [old[f][0] for f in merge.states]
    return transform(law.rescaled(0, states, shifts), lambda x: name_factor(ev, x, gaps))


def name_factor(ev: Evaluator, x: Expr, known: Gaps) -> Expr | None:
    """A name for an exponential of a gap, which several folds share."""
    if x.op not in ("exp", "exp2"):
        return None
    if (x, False) not in known:
        known[x, False] = ev.named(x)
    return known[x, False]


def measure_gap(
    ev: Evaluator, merge: Merge, statistic: RunningStatistic, old: Values, fold: int, falls: bool
) -> Expr:
    """How far a statistic has moved from `old`."""
    state = old[fold][0]
    before = (
        state if statistic.through is statistic.leaf else show_statistic(ev, merge, statistic, state, old)
    )
    through = ev.eval(substitute(statistic.through, {statistic.leaf: ev.named(before)}))
    return gap(statistic, state, through, ev.eval(statistic.through), falls)


def update_state(ev: Evaluator, t: Item, rescaled: Expr | None) -> None:
    """state = merge(state or what it was `rescaled` to, element)."""
    assert t.reduction is not None
    names = ev.states[t.id]
    old: list[Expr] = [value_of(v) for v in names] if rescaled is None else [rescaled]
    product = ev.contractions.get(t.id)
    if product is None and takes_one_each(ev.schedule, t):
        new = t.reduction.stepped(old, [ev.eval(b) for b in t.body])
        ev.out.append(Update(names, new, ev.tail(t.reduce)))
        return
    if product is None:
        elements, mask = step_elements(ev, t)
        new = t.reduction.merged(old, elements)
        new = tuple(map(_one_by_one, new)) if ev.schedule.reductions.term_by_term else new
        ev.out.append(Update(names, new, mask))
        return
    operands = eval_operands(ev, product)
    if rescaled is not None:
        ev.out.append(Update(names, (rescaled,)))
    if not ev.schedule.reductions.blockwise:
        ev.out.append(Dot(names[0], *operands, product.k))
        return
    step = ev.var(names[0].dtype, names[0].axes)
    ev.out += [Declare((step,), t.reduction.identity), Dot(step, *operands, product.k)]
    ev.out.append(Update(names, t.reduction.merged([value_of(names[0])], [value_of(step)])))


def _one_by_one(e: Expr) -> Expr:
    """a + (b + c) as (a + b) + c."""
    if e.op != "add" or e.args[1].op != "add":
        return e
    first, rest = e.args
    return call("add", _one_by_one(call("add", first, rest.args[0])), rest.args[1])


def finish_states(ev: Evaluator, targets: Sequence[Item], merges: Merges) -> None:
    """After the loops: merge the lanes of states and compute results. Lanes ran with statistics of their own: each
    is brought to the common ones before they are added."""
    lanes = current_states(ev, [t.id for t in targets])
    gaps: Gaps = {}
    for t in targets:
        if t.scan is not None:
            continue
        merge, parts = merges.get(t.id), ev.states[t.id]
        if merge is not None:
            parts = bring_together(ev, t, merge, lanes, gaps)
        state = [value_of(v) for v in merge_lanes(ev, t, parts)]
        name_results(ev, t, [mark_empty(ev, merge, state[0])] if merge is not None else state)


def bring_together(ev: Evaluator, t: Item, merge: Merge, lanes: Values, gaps: Gaps) -> tuple[Var, ...]:
    """The lanes of a state with the statistics of the whole."""
    (name,) = ev.states[t.id]
    if not any(a in t.reduce for f in merge.statistics for a in ev.states[f][0].axes):
        return (name,)
    final = {f: ev.scope.results[f, 0] for f in merge.statistics}
    for statistic, f in zip(merge.law.statistics, merge.statistics, strict=True):
        if statistic.open and statistic.through is statistic.leaf:
            ev.scope.results[f, 0] = ev.named(show_statistic(ev, merge, statistic, final[f], {}))
    outer, ev.scope = ev.scope, replace(ev.scope, memo={})
    brought = rescale_state(ev, merge, lanes, gaps)
    ev.scope = outer
    ev.scope.results.update({(f, 0): e for f, e in final.items()})
    var = ev.var(name.dtype, tuple(dict.fromkeys((*name.axes, *ev.blocks(brought)))))
    ev.out.append(Compute(var, brought))
    return (var,)


def mark_empty(ev: Evaluator, merge: Merge, state: Expr) -> Expr:
    """A result as the program has it where an extreme has seen nothing but its identity: often NaN."""
    if not merge.law.states[0].lost:
        return state
    for statistic, f in zip(merge.law.statistics, merge.statistics, strict=True):
        if statistic.through is statistic.leaf:
            top = ev.scope.results[f, 0]
            state = where(empty(statistic, top), const(math.nan, state.dtype), state)
    return state


def add_level(
    ev: Evaluator, targets: Sequence[Item], above: Mapping[int, tuple[Var, ...]], merges: Merges
) -> None:
    """Merge the states of a level, which has ended, into those `above`."""
    own = current_states(ev, [t.id for t in targets])
    upper: Values = {f: tuple(value_of(v) for v in above[f]) for f in own}
    follows = [merges[t.id] for t in targets if t.id in merges]
    joint: dict[int, tuple[Expr, ...]] = {}
    outer, ev.scope = ev.scope, ev.scope.child()
    for t in targets:
        assert t.reduction is not None
        if t.id not in merges:
            sides = upper[t.id], own[t.id]
            joint[t.id] = t.reduction.merged(*sides)
            if follows:
                joint[t.id] = tuple(ev.named(e) for e in joint[t.id])
    expose_statistics(ev, follows, joint)
    up: Gaps = {}
    down: Gaps = {}
    for t in targets:
        if t.id in merges:
            assert t.reduction is not None
            both = [
                [rescale_state(ev, merges[t.id], side, gaps)] for side, gaps in ((upper, up), (own, down))
            ]
            joint[t.id] = tuple(ev.named(e) for e in t.reduction.merged(*both))
    for f, new in joint.items():
        ev.out.append(Update(above[f], new))
    ev.scope = outer
