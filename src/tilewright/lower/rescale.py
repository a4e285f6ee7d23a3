"""Folds that run beside the folds they read: when a statistic moves, what has been summed so far is rescaled.

A state belongs to the values that its statistics had when it was last advanced. Three times statistics move: at a step,
when lanes come together, and when a level of states is added to the one above. Each time states are brought to the new
values by the law's rescaling, all from the old ones, before any of them is assigned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tilewright.analysis.online.running import empty, gap, shown
from tilewright.analysis.online.terms import RunningStatistic
from tilewright.form.companions import Merge
from tilewright.form.lane_softmax import merge_exponentials, weight
from tilewright.ir.expr import Expr, call, const, substitute, transform, where
from tilewright.ir.form import Item
from tilewright.ir.program import Compute, Declare, Dot, Update, Var, value_of

from .passes import Merges
from .states import States

Values = Mapping[int, tuple[Expr, ...]]
"""States of folds."""

Gaps = dict[tuple[Expr, bool], Expr]
"""Names of gaps (by what is read of a statistic, and whether exponentials fall by it) and of their exponentials."""


class Rescale(States):
    """States that may depend on other states of the same pass."""

    def moving(self, merges: Merges) -> set[int]:
        """Folds whose new values others need within the step."""
        counts = {m.count for m in merges.values() if m.count is not None}
        return {g for m in merges.values() for g in m.statistics} | counts

    def now(self, folds: Sequence[int]) -> Values:
        """The states of folds as they stand."""
        return {f: tuple(value_of(v) for v in self.states[f]) for f in folds}

    def step(self, targets: Sequence[Item], merges: Merges) -> None:
        """Advance the states of `targets`, all of whose classes are bound, by the elements of a step."""
        moving = self.moving({t.id: merges[t.id] for t in targets if t.id in merges})
        before = self.now([t.id for t in targets])
        ahead = {t.id: self.run_ahead(t) for t in targets if t.id in moving}
        follows = [merges[t.id] for t in targets if t.id in merges]
        self.expose(follows, ahead)
        gaps = self.single_powers(targets, follows, before, ahead)
        rescaled = {m.states[0]: self.brought(m, before, gaps) for m in follows}
        for t in targets:
            if t.id not in moving:
                self.update(t, rescaled.get(t.id))
        for f, new in ahead.items():
            self.out.append(Update(self.states[f], new))

    def single_powers(
        self, targets: Sequence[Item], follows: Sequence[Merge], before: Values, ahead: Values
    ) -> Gaps:
        """How far maxima have moved that each lane has for itself: elements and states share an exponential."""
        known: Gaps = {}
        folds = {t.id: t for t in targets}
        for merge in () if self.schedule.math.exp2 else follows:
            for k, (statistic, f) in enumerate(zip(merge.law.statistics, merge.statistics, strict=True)):
                t = folds[f]
                own = self.schedule.per_lane(f) and all(a in self.states[f][0].axes for a in t.reduce)
                plain = statistic.rising and not statistic.bounded and statistic.through is statistic.leaf
                if not (own and plain and merge.law.falls(k)) or (statistic.through, True) in known:
                    continue
                old = before[f][0]
                of_state, of_element = merge_exponentials(
                    old, self.eval(t.body[0]), ahead[f][0], "exp2" in self.schedule.math.fast
                )
                moved = call("sub", old, self.scope.results[f, 0])
                known[statistic.through, True] = moved
                known[call("exp", moved), False] = self.named(of_state)
                self.scope.memo[weight(t.body[0], statistic.leaf), None] = self.named(of_element)
        return known

    def run_ahead(self, t: Item) -> tuple[Expr, ...]:
        """The state of a statistic after this step, before it is assigned."""
        assert t.reduction is not None
        old = [value_of(v) for v in self.states[t.id]]
        elements, mask = self.elements(t)
        moved = t.reduction.merged(old, elements)
        if mask is not None:
            moved = tuple(call("where", mask, m, o) for m, o in zip(moved, old, strict=True))
        return tuple(self.named(m) for m in moved)

    def expose(self, merges: Sequence[Merge], values: Values) -> None:
        """Let the statistics of `merges` be read with the states `values`."""
        found: dict[int, Expr] = {}
        for merge in merges:
            for statistic, f in zip(merge.law.statistics, merge.statistics, strict=True):
                if f not in found or statistic.through is statistic.leaf:
                    found[f] = self.shown(merge, statistic, values[f][0], values)
        self.scope.results |= {(f, 0): self.named(e) for f, e in found.items()}

    def shown(self, merge: Merge, statistic: RunningStatistic, state: Expr, values: Values) -> Expr:
        """What readers see of a statistic whose state is `state`."""
        if merge.count is None:
            return shown(statistic, state, None, None)
        return shown(statistic, state, values[merge.count][0], merge.whole)

    def brought(self, merge: Merge, old: Values, gaps: Gaps) -> Expr:
        """The first state of `merge` out of `old`, brought to the statistics that are exposed. `gaps` holds those
        known."""
        law, count = merge.law, merge.count
        shifts: list[Expr] = []
        for k, (statistic, f) in enumerate(zip(law.statistics, merge.statistics, strict=True)):
            key = (statistic.through, law.falls(k))
            if key not in gaps:
                counted = {} if count is None else {count: old[count]}
                gaps[key] = self.named(self.gap(merge, statistic, {f: old[f], **counted}, f, key[1]))
            shifts.append(gaps[key])
        states = [old[f][0] for f in merge.states]
        return transform(law.rescaled(0, states, shifts), lambda x: self.factor(x, gaps))

    def factor(self, x: Expr, known: Gaps) -> Expr | None:
        """A name for an exponential of a gap, which several folds share."""
        if x.op not in ("exp", "exp2"):
            return None
        if (x, False) not in known:
            known[x, False] = self.named(x)
        return known[x, False]

    def gap(self, merge: Merge, statistic: RunningStatistic, old: Values, fold: int, falls: bool) -> Expr:
        """How far a statistic has moved from `old`."""
        state = old[fold][0]
        before = state if statistic.through is statistic.leaf else self.shown(merge, statistic, state, old)
        through = self.eval(substitute(statistic.through, {statistic.leaf: self.named(before)}))
        return gap(statistic, state, through, self.eval(statistic.through), falls)

    def update(self, t: Item, rescaled: Expr | None) -> None:
        """state = merge(state or what it was `rescaled` to, element)."""
        assert t.reduction is not None
        if t.scan is not None:
            self.advance(t)
            return
        names = self.states[t.id]
        old: list[Expr] = [value_of(v) for v in names] if rescaled is None else [rescaled]
        product = self.contractions.get(t.id)
        if product is None and self.one_each(t):
            new = t.reduction.stepped(old, [self.eval(b) for b in t.body])
            self.out.append(Update(names, new, self.tail(t.reduce)))
            return
        if product is None:
            elements, mask = self.elements(t)
            self.out.append(Update(names, t.reduction.merged(old, elements), mask))
            return
        operands = self.operands(product)
        if rescaled is not None:
            self.out.append(Update(names, (rescaled,)))
        if not self.schedule.reductions.blockwise:
            self.out.append(Dot(names[0], *operands, product.k))
            return
        step = self.var(names[0].dtype, names[0].axes)
        self.out += [Declare((step,), t.reduction.identity), Dot(step, *operands, product.k)]
        self.out.append(Update(names, t.reduction.merged([value_of(names[0])], [value_of(step)])))

    def finish(self, targets: Sequence[Item], merges: Merges) -> None:
        """After the loops: merge the lanes of states and compute results. Lanes ran with statistics of their own: each
        is brought to the common ones before they are added."""
        lanes = self.now([t.id for t in targets])
        gaps: Gaps = {}
        for t in targets:
            if t.scan is not None:
                continue
            merge, parts = merges.get(t.id), self.states[t.id]
            if merge is not None:
                parts = self.common(t, merge, lanes, gaps)
            state = [value_of(v) for v in self.collapse(t, parts)]
            self.result(t, [self.defined(merge, state[0])] if merge is not None else state)

    def common(self, t: Item, merge: Merge, lanes: Values, gaps: Gaps) -> tuple[Var, ...]:
        """The lanes of a state with the statistics of the whole."""
        (name,) = self.states[t.id]
        if not any(a in t.reduce for f in merge.statistics for a in self.states[f][0].axes):
            return (name,)
        final = {f: self.scope.results[f, 0] for f in merge.statistics}
        for statistic, f in zip(merge.law.statistics, merge.statistics, strict=True):
            if statistic.open and statistic.through is statistic.leaf:
                self.scope.results[f, 0] = self.named(self.shown(merge, statistic, final[f], {}))
        memo, self.scope.memo = self.scope.memo, {}
        brought = self.brought(merge, lanes, gaps)
        self.scope.memo = memo
        self.scope.results |= {(f, 0): e for f, e in final.items()}
        var = self.var(name.dtype, tuple(dict.fromkeys((*name.axes, *self.blocks(brought)))))
        self.out.append(Compute(var, brought))
        return (var,)

    def defined(self, merge: Merge, state: Expr) -> Expr:
        """A result as the program has it where an extreme has seen nothing but its identity: often NaN."""
        if not merge.law.states[0].lost:
            return state
        for statistic, f in zip(merge.law.statistics, merge.statistics, strict=True):
            if statistic.through is statistic.leaf:
                top = self.scope.results[f, 0]
                state = where(empty(statistic, top), const(math.nan, state.dtype), state)
        return state

    def add_level(
        self, targets: Sequence[Item], above: Mapping[int, tuple[Var, ...]], merges: Merges
    ) -> None:
        """Merge the states of a level, which has ended, into those `above`."""
        own = self.now([t.id for t in targets])
        upper: Values = {f: tuple(value_of(v) for v in above[f]) for f in own}
        follows = [merges[t.id] for t in targets if t.id in merges]
        joint: dict[int, tuple[Expr, ...]] = {}
        outer, self.scope = self.scope, self.scope.child()
        for t in targets:
            assert t.reduction is not None
            if t.id not in merges:
                sides = upper[t.id], own[t.id]
                joint[t.id] = t.reduction.merged(*sides)
                if follows:
                    joint[t.id] = tuple(self.named(e) for e in joint[t.id])
        self.expose(follows, joint)
        up: Gaps = {}
        down: Gaps = {}
        for t in targets:
            if t.id in merges:
                assert t.reduction is not None
                both = [[self.brought(merges[t.id], side, gaps)] for side, gaps in ((upper, up), (own, down))]
                joint[t.id] = tuple(self.named(e) for e in t.reduction.merged(*both))
        for f, new in joint.items():
            self.out.append(Update(above[f], new))
        self.scope = outer
