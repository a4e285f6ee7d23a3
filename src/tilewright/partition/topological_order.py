"""A topological order of groups of ops that follows as groups are merged.

Whether a path leaves one group and enters another through a third is asked at each attempt to merge. Such a path runs
only over groups that stand between the two in a topological order, so both ends search there, in turns; what the end
that finishes first has found is all that the merged group passes when it takes its place (the dynamic order of Pearce
and Kelly, with labels that leave room in place of consecutive numbers).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from tilewright.errors import VerifyError
from tilewright.ir.graph import Graph, Op, Value, symbols_in
from tilewright.tuning.search_limits import GROUPS


class Standing(Enum):
    """Why two groups cannot become one."""

    BETWEEN = "another kernel or library call stands between"
    TOO_FAR = f"further apart than a search along {GROUPS.max_path_edges} edges tells"


@dataclass(frozen=True, slots=True)
class Clear:
    """No path leads from the group `low` to the group `high` through others. The merged group stands in the place of
    one, and `passed` (all that follow `low`, or all that lead to `high`, in between) moves to its other side."""

    low: int
    high: int
    up: bool
    passed: frozenset[int]


class Order:
    """Groups of places 0 .. n - 1 in a topological order. A group is called by the number that `group_of` gives for its
    places; it may change when groups are merged. `visits` counts the edges that searches looked along."""

    def __init__(self, followers: Sequence[Sequence[int]], groups: Iterable[Sequence[int]] = ()) -> None:
        """At first each place is a group, but for `groups`. Raises VerifyError if they depend on each other in
        a cycle."""
        self.after = followers
        self.before: list[list[int]] = [[] for _ in followers]
        for place, later in enumerate(followers):
            for other in later:
                self.before[other].append(place)
        self.group_of = list(range(len(followers)))
        self.members: dict[int, list[int]] = {n: [n] for n in self.group_of}
        for first, *others in groups:
            for other in others:
                self._gather(first, other)
        self.visits = 0
        self.label: dict[int, int] = {}
        self.next: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self._line_up(self._sorted())

    def between(self, a: int, b: int) -> Clear | Standing:
        """Whether two groups may become one."""
        low, high = sorted((a, b), key=self.label.__getitem__)
        ahead: set[int] = set()
        behind: set[int] = set()
        sides = (
            (True, self._search(low, high, self.after, ahead, behind), ahead),
            (False, self._search(high, low, self.before, behind, ahead), behind),
        )
        for _ in range(GROUPS.max_path_edges):
            for up, search, found in sides:
                self.visits += 1
                met = next(search, None)
                if met is None:
                    return Clear(low, high, up, frozenset(found))
                if met:
                    return Standing.BETWEEN
        return Standing.TOO_FAR

    def merge(self, clear: Clear) -> None:
        """Make one group of the two that `between` was asked about last."""
        stays, goes = (clear.high, clear.low) if clear.up else (clear.low, clear.high)
        passed = sorted(clear.passed, key=self.label.__getitem__)
        for group in (goes, *passed):
            self._take_out(group)
        self._put_in(self.last[stays] if not clear.up else stays, passed)
        self._gather(stays, goes)
        del self.label[goes]

    def _search(
        self, start: int, end: int, edges: Sequence[Sequence[int]], found: set[int], others: set[int]
    ) -> Generator[bool]:
        """Collect all groups on this side of `end` to which edges lead from `start`; say at each edge whether it leads
        to `end`, other than directly, or to what the search from there has found."""
        forward = self.label[start] < self.label[end]
        todo = [start]
        while todo:
            group = todo.pop()
            for place in self.members[group]:
                for neighbour in edges[place]:
                    other = self.group_of[neighbour]
                    yield other in others or (other == end and group != start)
                    within = (self.label[other] < self.label[end]) is forward
                    if other not in (start, end) and within and other not in found:
                        found.add(other)
                        todo.append(other)

    def _gather(self, stays: int, goes: int) -> None:
        moved = self.members.pop(goes)
        self.members[stays] += moved
        for place in moved:
            self.group_of[place] = stays

    def _sorted(self) -> list[int]:
        """The groups in an order that is topological, otherwise by their first places."""
        waiting = dict.fromkeys(self.members, 0)
        for place, later in enumerate(self.after):
            for other in later:
                if self.group_of[place] != self.group_of[other]:
                    waiting[self.group_of[other]] += 1
        ready = [group for group, count in waiting.items() if not count]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            group = heapq.heappop(ready)
            order.append(group)
            for place in self.members[group]:
                for other in map(self.group_of.__getitem__, self.after[place]):
                    if other != group:
                        waiting[other] -= 1
                        if not waiting[other]:
                            heapq.heappush(ready, other)
        if len(order) != len(self.members):
            raise VerifyError("groups depend on each other in a cycle", phase="partition")
        return order

    # -- the list of groups, with -1 before the first and behind the last

    def _line_up(self, order: Sequence[int]) -> None:
        self.label |= {group: n * GROUPS.label_distance for n, group in enumerate(order, 1)}
        ring = (-1, *order, -1)
        for one, other in zip(ring, ring[1:], strict=False):
            self.next[one], self.last[other] = other, one

    def _take_out(self, group: int) -> None:
        one, other = self.last.pop(group), self.next.pop(group)
        self.next[one], self.last[other] = other, one

    def _put_in(self, one: int, groups: Sequence[int]) -> None:
        """Put groups behind `one`, in this order."""
        other = self.next[one]
        low = self.label[one] if one >= 0 else 0
        high = self.label[other] if other >= 0 else low + GROUPS.label_distance * (len(groups) + 1)
        step = (high - low) // (len(groups) + 1)
        for n, group in enumerate(groups, 1):
            self.label[group] = low + n * step
            self.next[one], self.last[group] = group, one
            one = group
        self.next[one], self.last[other] = other, one
        if not step:
            self._relabel()

    def _relabel(self) -> None:
        group, n = self.next[-1], 1
        while group >= 0:
            self.label[group] = n * GROUPS.label_distance
            group, n = self.next[group], n + 1


def followers(graph: Graph, consumers: Mapping[Value, Sequence[Op]]) -> list[list[int]]:
    """By the place of an op, those of the ops that cannot start before it is done: they read its results, or a size or
    number that only it tells, or, as calls with side effects keep their order, are the next such call."""
    position = {op: n for n, op in enumerate(graph.ops)}
    found = [[position[r] for v in op.outputs for r in consumers.get(v, ())] for op in graph.ops]
    if tells := graph.found_by_calls():
        for n, op in enumerate(graph.ops):
            makers = {position[tells[s]] for s in symbols_in(op) if s in tells}
            for maker in sorted(makers - {n}):
                found[maker].append(n)
    effects = [n for n, op in enumerate(graph.ops) if op.call is not None and not op.call.pure]
    for first, second in itertools.pairwise(effects):
        found[first].append(second)
    return found


def passing_through(later: Sequence[Sequence[int]], inlined: Collection[int]) -> list[list[int]]:
    """The same where the `inlined` places are computed by each place that follows them: they wait for nothing, and who
    leads to one leads to those behind it."""
    behind: dict[int, list[int]] = {}
    for n in sorted(inlined, reverse=True):
        behind[n] = _reached(later[n], behind)
    return [[] if n in behind else _reached(places, behind) for n, places in enumerate(later)]


def _reached(places: Sequence[int], behind: Mapping[int, Sequence[int]]) -> list[int]:
    """The places, those that are not themselves in `behind`, and what stands there of the others."""
    return list(dict.fromkeys(m for n in places for m in behind.get(n, (n,))))


def in_some_order(graph: Graph, sets: Sequence[Collection[Op]]) -> list[int]:
    """The numbers of disjoint sets of ops that can run one after the other, among the kernels that were chosen before:
    the first ones, and of the others each that waits for nothing that waits for it. Two sets may wait for each other
    although no path leads out of one and back into it: each reads a result of the other."""
    place = {op: n for n, op in enumerate(graph.ops)}
    later = followers(graph, graph.consumers())
    chosen: dict[int, list[int]] = {}
    for op, n in place.items():
        if op.kernel >= 0:
            chosen.setdefault(op.kernel, []).append(n)

    def run(numbers: Sequence[int]) -> bool:
        try:
            Order(later, [*chosen.values(), *(sorted(place[op] for op in sets[k]) for k in numbers)])
        except VerifyError:
            return False
        return True

    kept, left = list[int](), list(range(len(sets)))
    while left and not run([*kept, *left]):
        good, bad = 0, len(left)
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if run([*kept, *left[:middle]]) else (good, middle)
        kept, left = [*kept, *left[:good]], left[good + 1 :]
    return [*kept, *left]
