"""Which kernels of a region are worth a price, which costs a solution of the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from tilewright.analysis.dependence.properties import DimClasses, classes_of, parallelism
from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.kernel import Kernel
from tilewright.tuning.search_limits import CANDIDATES

from .cheapest_sets import Candidate, Left, least_seconds, required_results


class Width:
    """Whether a kernel has a tile for every core, or as many as others that store one of its values."""

    def __init__(self, kernels: Sequence[Kernel], cores: int, hints: SizeHints) -> None:
        self.cores, self.hints = cores, hints
        self.degrees: dict[Kernel, int] = {}
        self.classes: dict[tuple[Op, ...], DimClasses] = {}
        self.most: dict[Value, int] = {}
        least: dict[Value, Kernel] = {}
        for k in kernels:
            for v in k.outputs:
                if v not in least or len(k.ops) < len(least[v].ops):
                    least[v] = k  # fewer ops leave more dims to run side by side
        for v, k in least.items():
            self.most[v] = self.degree(k)

    def degree(self, kernel: Kernel) -> int:
        """How many tiles of it may run side by side."""
        if kernel not in self.degrees:
            if kernel.ops not in self.classes:  # kernels that store other values have the same ops
                self.classes[kernel.ops] = classes_of(kernel.ops)
            degree = parallelism(kernel.ops, kernel.outputs, found=self.classes[kernel.ops])
            self.degrees[kernel] = self.hints.estimate(degree)
        return self.degrees[kernel]

    def __call__(self, kernel: Kernel) -> bool:
        return self.degree(kernel) >= min(self.cores, *(self.most[v] for v in kernel.outputs))


class Rounds:
    """Which kernels to price next: all of few; of many those in the best sets, by what is known and else guessed. Only
    what may be next is asked whether it is `wide`: the answer takes as long as a form."""

    def __init__(
        self,
        region: Graph,
        kernels: Sequence[tuple[Kernel, frozenset[Value]]],
        wide: Callable[[Kernel], bool],
        guess: Callable[[Kernel], float] | None,
    ) -> None:
        self.region, self.kernels, self.wide = region, kernels, wide
        self.left = dict.fromkeys(range(len(kernels)))
        self.narrow: list[int] = []
        self.priced = self.spent = 0
        """How many kernels were priced or refused, and how many ops those have that were asked for."""
        self.ended: set[int] = set()
        """Kernels that are refused because smaller ones were."""
        many = self.more_than(len(kernels) if guess is None else CANDIDATES.max_priced_kernels)
        self.guessed = [guess(kernel) for kernel, _ in kernels] if many and guess is not None else None
        self.seconds: dict[int, float] = {}
        """Prices of kernels that were not refused."""

    def more_than(self, most: int) -> bool:
        """Whether more than so many kernels are wide enough. If not, all others are gone."""
        found = 0
        for k in sorted(self.left, key=lambda k: len(self.kernels[k][0].ops)):
            found += self.keeps(k)
            if found > most:
                return True
        return False

    def end_larger(self, k: int) -> list[Kernel]:
        """What is left that computes and stores as much as a kernel that was refused: it is refused, too, once its turn
        comes, but nobody is asked for its price."""
        ops, stores = (frozenset(part) for part in (self.kernels[k][0].ops, self.kernels[k][0].outputs))
        larger = [
            n
            for n in self.left
            if n not in self.ended
            and stores.issubset(self.kernels[n][0].outputs)
            and ops.issubset(self.kernels[n][0].ops)
        ]
        self.ended.update(larger)
        return [self.kernels[n][0] for n in larger]

    def keeps(self, k: int) -> bool:
        """Whether a kernel is wide enough, or refused anyway; else it is gone."""
        if k in self.ended or self.wide(self.kernels[k][0]):
            return True
        del self.left[k]
        self.narrow.append(k)
        return False

    def __iter__(self) -> Iterator[int]:
        """The kernels that are worth a price: who gets one tells it before the next."""
        while batch := list(self.left) if self.guessed is None else self.best(self.guessed):
            for k in batch:
                del self.left[k]
                self.priced += 1
                if k not in self.ended:
                    self.spent += len(self.kernels[k][0].ops)
                    yield k

    def best(self, guessed: Sequence[float]) -> list[int]:
        """The unpriced kernels of the best sets."""
        # Masks hide as much of one kernel as of others; what all kernels before had in common may not hold of the next.
        rate = min((seconds / guessed[k] for k, seconds in self.seconds.items()), default=1.0)
        rate = min(rate, CANDIDATES.max_guess_rate_ratio)
        room = min(self.room(), CANDIDATES.priced_per_round)
        while room:
            promising = self.promising(self.seconds | {k: rate * guessed[k] for k in self.left})
            batch = promising[:room]
            # Sets of narrow kernels may be as fast as that of the last one, which then has a slower one, or none.
            near = [k for s, k in promising if batch and s <= batch[-1][0]]
            if sum(map(self.keeps, near)) == len(near):
                return [k for _, k in batch]
        return []

    def room(self) -> int:
        """How many more kernels may be priced."""
        priced = [Candidate(*self.kernels[k], seconds) for k, seconds in self.seconds.items()]
        if math.isinf(Left(priced, required_results(self.region))(0)):
            # what was priced so far makes not all that is required
            return 0 if self.spent > CANDIDATES.max_refused_ops else CANDIDATES.priced_per_round
        ops = (CANDIDATES.max_priced_ops - self.spent) // len(self.region.ops)
        return max(0, min(CANDIDATES.max_priced_kernels - self.priced, ops))

    def promising(self, known: Mapping[int, float]) -> list[tuple[float, int]]:
        """The unpriced kernels that stand in good sets, and the seconds of the best of these, best first."""
        numbers = sorted(known)
        least = least_seconds(self.region, [Candidate(*self.kernels[k], known[k]) for k in numbers])
        most = CANDIDATES.max_set_slowdown_ratio * min(least, default=math.inf)
        if math.isinf(most):
            return []
        return sorted((s, k) for s, k in zip(least, numbers, strict=True) if k in self.left and s <= most)
