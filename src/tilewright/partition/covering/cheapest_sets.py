"""The cheapest sets of kernels that make a region's results: shortest paths over the sets of values made so far."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Kernel


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A kernel that reads `cuts` besides what the region reads, and its modelled seconds."""

    kernel: Kernel
    cuts: frozenset[Value]
    seconds: float

    @property
    def stores(self) -> frozenset[Value]:
        """The values that it makes for others."""
        return frozenset(self.kernel.outputs)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Kernels that together make the results of a region, in an order in which they may run; modelled seconds."""

    kernels: tuple[Candidate, ...]
    seconds: float


def choices(region: Graph, kernels: Sequence[Candidate], most: int = 1) -> list[Choice]:
    """The `most` cheapest sets of kernels that make the results of a region, cheapest first; none if there is none."""
    left = Left(kernels, required_results(region))
    if math.isinf(left(0)):
        return []
    found: list[Choice] = []
    seen: set[frozenset[int]] = set()
    queue: list[tuple[float, int, float, tuple[int, ...], int]] = [(0.0, 0, 0.0, (), 0)]
    count = 0
    while queue and len(found) < most:
        _, _, seconds, used, made = heapq.heappop(queue)
        if not left.required & ~made:
            found.append(Choice(tuple(kernels[k] for k in used), seconds))
            continue
        for k, after, more in left.next(made):
            key = frozenset((*used, k))
            rest = left(after)
            if key not in seen and not math.isinf(rest):
                seen.add(key)
                count += 1
                ahead = seconds + more
                heapq.heappush(queue, (ahead + rest, count, ahead, (*used, k), after))
    return found


class Left:
    """The least seconds in which the rest is made, by what is made already: sets of values as the bits of a number."""

    def __init__(self, kernels: Sequence[Candidate], required: frozenset[Value]) -> None:
        self.bits: dict[Value, int] = {}
        self.required = self.number(required)
        self.steps = [
            (k, self.number(c.cuts), self.number(c.kernel.outputs), c.seconds) for k, c in enumerate(kernels)
        ]
        self.known: dict[int, float] = {}
        self.ahead: dict[int, list[tuple[int, int, float]]] = {}

    def number(self, values: Iterable[Value]) -> int:
        """A set of values."""
        return functools.reduce(int.__or__, (self.bits.setdefault(v, 1 << len(self.bits)) for v in values), 0)

    def __call__(self, made: int) -> float:
        if not self.required & ~made:
            return 0.0
        least = self.known.get(made)
        if least is None:
            least = math.inf
            for _, after, seconds in self.next(made):
                rest = self.known.get(after)
                least = min(least, seconds + (self(after) if rest is None else rest))
            self.known[made] = least
        return least

    def next(self, made: int) -> list[tuple[int, int, float]]:
        """The kernels that can run and that make something new: the number of each, what is made then, its seconds."""
        found = self.ahead.get(made)
        if found is None:
            missing = ~made
            found = self.ahead[made] = [
                (k, made | stores, seconds)
                for k, cuts, stores, seconds in self.steps
                if not cuts & missing and stores & missing
            ]
        return found


def least_seconds(region: Graph, found: Sequence[Candidate]) -> list[float]:
    """For each kernel the least seconds of a set that it stands in and that makes what is required."""
    left = Left(found, required_results(region))
    left(0)
    soonest: dict[int, float] = {0: 0.0}
    todo: list[tuple[int, int]] = [(0, 0)]
    least = [math.inf] * len(found)
    while todo:  # fewer values first: all ways to a set are known before it is left
        _, made = heapq.heappop(todo)
        here = soonest[made]
        for k, after, seconds in left.next(made):
            ahead = here + seconds
            whole = ahead + left.known.get(after, 0.0)  # nothing is left where all that is required is made
            if whole < least[k]:
                least[k] = whole
            before = soonest.get(after)
            if before is None:
                heapq.heappush(todo, (after.bit_count(), after))
            if before is None or ahead < before:
                soonest[after] = ahead
    return least


def required_results(region: Graph) -> frozenset[Value]:
    """What a region has to make."""
    return frozenset(v for v in region.outputs if isinstance(v, Value))
