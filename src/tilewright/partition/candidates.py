"""Kernels of a region, not necessarily convex, of which the cheapest set is sought that makes the region's results.

A kernel is given by the values it stores and the ones it reads although the region makes them (its *cuts*): its ops are
all that lies between, computed again where another kernel computes them too. Only small values are stored or cut. As in
FlashTensor (PPoPP 2025), section on kernel mapping, and Korch (ASPLOS 2024), a cover may compute an op several times;
unlike there, the cheapest one is found as a shortest path over the sets of values made so far, which is exact and never
cyclic.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tilewright.analysis.dependence.properties import NO_CLASS, classes_of
from tilewright.analysis.size_hints import SizeHints
from tilewright.errors import IllegalSchedule
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.kernel import Kernel, Price
from tilewright.tuning.search_limits import CANDIDATES
from tilewright.tuning.text_limits import TEXTS
from tilewright.tuning.thresholds import REGION_STORES, SIZES

from .covering.cheapest_sets import Candidate, Choice, least_seconds, required_results
from .covering.rounds import Rounds, Width
from .recompute import RefoldedProducts
from .regions import is_product, makes_as_much

T = TypeVar("T")
TWICE = "a small product is added up anew beside a value folded of it"
"""What is told of kernels that `RefoldedProducts` forbids."""
NARROW = "too few tiles run side by side"
"""What is told of kernels that do not fill a machine."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The kernels that may stand in the best set; how many pairs of stores and cuts were tried; which laws refused
    others, and what ops these would have ended in; and those that no other one makes needless, however slow."""

    kept: tuple[Candidate, ...]
    tried: int
    refused: tuple[str, ...]
    fit: tuple[Candidate, ...] = ()


def candidates(
    region: Graph,
    price: Price,
    cores: int,
    hints: SizeHints,
    name: Callable[[Op], str] = lambda op: op.name,
    guess: Callable[[Kernel], float] | None = None,
) -> Candidates:
    """The kernels of a region that have a legal form, fill `cores` with tiles if others that store the same do, and
    that no other one makes needless. `name` says how ops are called in reasons. A price costs a solution of its
    kernel: of many kernels only those are priced that stand in good sets if the others take what `guess` says."""
    refolded = RefoldedProducts(region, hints)
    tried, kernels = _kernels(region, hints, refolded.products)
    found: list[Candidate] = []
    refused: dict[str, dict[Value, None]] = {}
    twice = [kernel for kernel, given in kernels if refolded.are_in(kernel, given)]
    if twice:
        refused[TWICE] = dict.fromkeys(v for k in twice for v in k.outputs)
    kernels = [(kernel, given) for kernel, given in kernels if not refolded.are_in(kernel, given)]
    rounds = Rounds(region, kernels, Width([kernel for kernel, _ in kernels], cores, hints), guess)
    narrow = refused.setdefault(NARROW, {})
    for k in rounds:
        kernel, given = kernels[k]
        try:
            rounds.seconds[k] = price(kernel, region.layouts)
            found.append(Candidate(kernel, given, rounds.seconds[k]))
        except IllegalSchedule as problem:
            why = problem.about(name(kernel.ops[problem.source])) if problem.source >= 0 else str(problem)
            alike = (kernel, *rounds.end_larger(k)) if problem.lasts else (kernel,)
            refused.setdefault(why, {}).update(dict.fromkeys(v for k in alike for v in k.outputs))
    narrow |= dict.fromkeys(v for k in sorted(rounds.narrow) for v in kernels[k][0].outputs)
    fit = _undominated(found)
    useful = _useful(region, fit)
    maker = region.producer()
    reasons = tuple(
        f"{why} (for {_listed(name(maker[v]) for v in made)})" for why, made in refused.items() if made
    )
    return Candidates(tuple(_trimmed(region, useful, found)), tried, reasons, tuple(fit))


def _kernels(
    region: Graph, hints: SizeHints, products: Sequence[Value]
) -> tuple[int, list[tuple[Kernel, frozenset[Value]]]]:
    """How many pairs of stores and cuts (`products` among them) there are, and the different kernels among them with
    what these use of the cuts."""
    cuts = list(dict.fromkeys((*_cuts(region, hints), *products)))[: CANDIDATES.max_cuts]
    units = _units(region, cuts)
    while cuts and _pairs(units, cuts) > CANDIDATES.max_tried_pairs:
        cuts = cuts[:-1]
        units = _units(region, cuts)
    paths = _Paths(region)
    order = {v: n for n, v in enumerate(v for op in region.ops for v in op.outputs)}
    shapes: dict[tuple[int, frozenset[Value]], frozenset[Value]] = {}
    tried = 0
    for some in _subsets(units, least=1):
        stores = frozenset[Value]().union(*some)
        for given in _subsets([v for v in cuts if v not in stores], least=0):
            tried += 1
            ops, used = paths.between(stores, given)
            if used == given and paths.connected(ops):
                shapes.setdefault((ops, stores), given)
    return tried, [
        (Kernel(paths.ops(ops), tuple(sorted(stores, key=order.__getitem__))), given)
        for (ops, stores), given in shapes.items()
    ]


def _pairs(units: Sequence[frozenset[Value]], cuts: Sequence[Value]) -> int:
    """How many pairs of stores and cuts there are: a cut is stored, given or neither."""
    return 2 ** (len(units) - len(cuts)) * 3 ** len(cuts)


def _units(region: Graph, cuts: Sequence[Value]) -> list[frozenset[Value]]:
    """What is stored together or not at all: each cut and each result, but of many results those along the same dims,
    which the same loops make."""
    required = required_results(region)
    ends = [v for op in region.ops for v in op.outputs if v in required and v not in cuts]
    classes = classes_of(region.ops).classes if len(ends) > CANDIDATES.max_separate_results else {}
    groups: dict[object, list[Value]] = {}
    for v in ends:
        groups.setdefault(tuple(c for c in classes[v] if c != NO_CLASS) if classes else v, []).append(v)
    return [*map(frozenset, groups.values()), *(frozenset((v,)) for v in cuts)]


def _listed(names: Iterable[str]) -> str:
    """The distinct names of ops, the first few of them."""
    some = list(dict.fromkeys(names))
    return ", ".join(some[: TEXTS.max_named_ops]) + (" and others" if len(some) > TEXTS.max_named_ops else "")


def cut_at(region: Graph, cuts: frozenset[Value], price: Price) -> Choice | None:
    """A kernel that makes the values `cuts`, and those that make of them the results of the region: one, or one for
    each shape, which is cheaper; None if a kernel has no legal form, or a result would begin elsewhere too. What is
    made of nothing is made where it is needed."""
    producer = region.producer()
    required = required_results(region)
    first, _ = _between(cuts, frozenset(), producer)
    second, used = _between(required, cuts, producer)
    if used != cuts or any(op.inputs for op in first & second):
        return None
    shapes: dict[tuple[Expr, ...], set[Value]] = {}
    for v in required:
        shapes.setdefault(v.shape, set()).add(v)
    ends = [[required], [frozenset(vs) for vs in shapes.values()]]
    made: list[list[Candidate]] = []
    try:
        begin = _kernel(region, cuts, frozenset(), price)
    except IllegalSchedule:
        return None
    for groups in ends if len(shapes) > 1 else ends[:1]:
        with contextlib.suppress(IllegalSchedule):
            made.append([begin, *(_kernel(region, g, cuts, price) for g in groups)])
    totals = [Choice(tuple(kernels), sum(c.seconds for c in kernels)) for kernels in made]
    return min(totals, key=lambda c: c.seconds, default=None)


def _kernel(region: Graph, stores: frozenset[Value], cuts: frozenset[Value], price: Price) -> Candidate:
    """The kernel that makes `stores` of the region's inputs and `cuts`. Raises IllegalSchedule if it has no form."""
    ops, used = _between(stores, cuts, region.producer())
    inside = tuple(op for op in region.ops if op in ops)
    kernel = Kernel(inside, tuple(v for op in inside for v in op.outputs if v in stores))
    return Candidate(kernel, used, price(kernel, region.layouts))


def _useful(region: Graph, found: Sequence[Candidate]) -> list[Candidate]:
    """The kernels that stand in some set which makes what is required in little more than the least time."""
    least = least_seconds(region, found)
    best = min(least, default=math.inf)
    return [
        c
        for c, seconds in zip(found, least, strict=True)
        if seconds <= CANDIDATES.max_set_slowdown_ratio * best
    ]


def _cuts(region: Graph, hints: SizeHints) -> list[Value]:
    """Values from which large ones are made or folded although they are small: where a kernel may begin."""
    large = _large(region)
    given = [v for v in region.inputs if isinstance(v, Value)]
    most = max((hints.estimate(v.numel) for v in (*large, *given)), default=0)
    depends: set[Value] = set(large)
    found: dict[Value, None] = {}
    for op in region.ops:
        if depends & set(op.inputs):
            depends |= set(op.outputs)
        if large & {*op.inputs, *op.outputs}:
            found |= dict.fromkeys(v for v in op.inputs if v in depends and v not in large)
    return [
        v
        for v in found
        if hints.estimate(v.numel) * SIZES.min_negligible_ratio <= most
        or most < REGION_STORES.max_small_elements
    ][: CANDIDATES.max_cuts]


def _large(region: Graph) -> set[Value]:
    """Products whose elements are folded again, and all that is made of them element by element."""
    consumers = region.consumers()

    def folded(v: Value) -> bool:
        return any(not makes_as_much(r) or any(map(folded, r.outputs)) for r in consumers.get(v, []))

    found: set[Value] = set()
    for op in region.ops:
        starts = is_product(op) and folded(op.output)
        if starts or (makes_as_much(op) and found & set(op.inputs)):
            found |= set(op.outputs)
    return found


def _between(
    stores: frozenset[Value], given: frozenset[Value], producer: Mapping[Value, Op]
) -> tuple[frozenset[Op], frozenset[Value]]:
    """The ops that make `stores` from the region's inputs and `given`, and what they use of `given`."""
    ops: set[Op] = set()
    used: set[Value] = set()
    todo = list(stores)
    while todo:
        v = todo.pop()
        if v in given:
            used.add(v)
            continue
        op = producer.get(v)
        if op is not None and op not in ops:
            ops.add(op)
            todo += op.inputs
    return frozenset(ops), frozenset(used)


class _Paths:
    """What lies between values of a region, for many of them: sets of ops as the bits of a number, in their order."""

    def __init__(self, region: Graph) -> None:
        self.region = region
        self.place = {v: n for n, op in enumerate(region.ops) for v in op.outputs}
        self.before: dict[frozenset[Value], list[tuple[int, frozenset[Value]]]] = {}
        self.known_connected: dict[int, bool] = {}
        touching: dict[Value, int] = {}
        for n, op in enumerate(region.ops):
            for v in (*op.inputs, *op.outputs):
                touching[v] = touching.get(v, 0) | 1 << n
        self.beside = [0] * len(region.ops)
        for n, op in enumerate(region.ops):
            for v in (*op.inputs, *op.outputs):
                self.beside[n] |= touching[v]

    def ops(self, bits: int) -> tuple[Op, ...]:
        """The ops of a set."""
        return tuple(op for n, op in enumerate(self.region.ops) if bits >> n & 1)

    def between(self, stores: frozenset[Value], given: frozenset[Value]) -> tuple[int, frozenset[Value]]:
        """The same as `_between`."""
        if given not in self.before:
            self.before[given] = self.makers(given)
        found = [self.before[given][self.place[v]] for v in stores]
        return functools.reduce(int.__or__, (ops for ops, _ in found)), frozenset().union(
            *(u for _, u in found)
        )

    def makers(self, given: frozenset[Value]) -> list[tuple[int, frozenset[Value]]]:
        """For each op, those that make its results of `given` and the region's inputs, and what they use of `given`."""
        made: list[tuple[int, frozenset[Value]]] = []
        for n, op in enumerate(self.region.ops):
            above = [made[self.place[v]] for v in op.inputs if v not in given and v in self.place]
            ops = functools.reduce(int.__or__, (bits for bits, _ in above), 1 << n)
            made.append((ops, given.intersection(op.inputs).union(*(used for _, used in above))))
        return made

    def connected(self, ops: int) -> bool:
        """Whether each op of a set shares values with others of it, and through these with all."""
        if ops not in self.known_connected:
            seen = todo = ops & -ops
            while todo:
                first = todo & -todo
                fresh = self.beside[first.bit_length() - 1] & ops & ~seen
                seen |= fresh
                todo = (todo ^ first) | fresh
            self.known_connected[ops] = seen == ops
        return self.known_connected[ops]


def _undominated(found: Sequence[Candidate]) -> list[Candidate]:
    """Without kernels for which another one does at least as much from no more in no more time."""

    def better(a: Candidate, b: Candidate) -> bool:
        at_least = a.stores >= b.stores and a.cuts <= b.cuts and a.seconds <= b.seconds
        same = a.stores == b.stores and a.cuts == b.cuts and a.seconds == b.seconds
        return at_least and not same

    return [b for b in found if not any(better(a, b) for a in found if a is not b)]


def _trimmed(region: Graph, chosen: Sequence[Candidate], found: Sequence[Candidate]) -> list[Candidate]:
    """The kernels without what they store for nobody."""
    named = {(c.stores, c.cuts): c for c in found}
    now = list(chosen)
    while True:
        wanted = required_results(region).union(*(c.cuts for c in now))
        fewer = {(c.stores & wanted, c.cuts): c for c in now if c.stores & wanted}
        new = [named.get(key, c) for key, c in fewer.items()]
        if len(new) == len(now) and all(a is b for a, b in zip(new, now, strict=True)):
            return now
        now = new


def _subsets(values: Sequence[T], least: int) -> Iterator[frozenset[T]]:
    for n in range(least, len(values) + 1):
        yield from map(frozenset, itertools.combinations(values, n))
