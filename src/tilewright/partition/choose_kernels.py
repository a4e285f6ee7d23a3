"""Regions around contractions become kernels of their own where that is modelled as faster than library calls."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tilewright.analysis.online.find_cascades import Cascade, cascades
from tilewright.analysis.size_hints import SizeHints
from tilewright.errors import VerifyError
from tilewright.ir.graph import Graph, Layout, LibraryCall, Op, Value
from tilewright.ir.kernel import Kernel, Note, Price
from tilewright.options import Contractions
from tilewright.rewrite.split.cascade_parts import split_cascade
from tilewright.rewrite.split.policy import part_counts
from tilewright.tuning.search_limits import CASCADE_PARTS
from tilewright.tuning.thresholds import PARTITION
from tilewright.tuning.timing_limits import COMPARISON, TRIAL

from .candidates import Candidates, candidates, cut_at
from .covering.cheapest_sets import Choice, choices
from .memo import DecisionCache, Grouping, as_seen, groupings_of, plain, task_of
from .provenance import fill_sites, references
from .recompute import round_alike
from .regions import Region, find_regions


@dataclass(frozen=True, slots=True, eq=False)
class ChosenRegion:
    """What was decided for one region: its kernels (none if library calls are faster), made of the equal graph
    `rearranged`; modelled seconds of either way; and notes of what was considered, refused and rearranged (for people:
    `explained`)."""

    region: Graph
    kernels: tuple[Kernel, ...]
    seconds: float
    library: float
    notes: tuple[str, ...] = ()
    rearranged: Graph | None = None
    parts: int = 1
    """How many parts of a cascade run side by side in `rearranged`."""
    routine: Graph | None = None
    """The region as one call of a routine of the library, where that is the fastest."""
    clear: bool = True
    """Whether the kernels are taken without a clock, too."""

    def __str__(self) -> str:
        made = ", ".join(map(repr, self.region.outputs))
        ways = f"{self.seconds * 1e3:.3g} ms modelled, {self.library * 1e3:.3g} ms as library calls"
        how = "one library call" if self.routine else f"{len(self.kernels) or 'no'} kernels"
        head = f"{len(self.region.ops)} ops that make {made}: {how}; {ways}"
        return "\n  ".join((head, *self.explained))

    @property
    def explained(self) -> tuple[str, ...]:
        """In how many parts reductions are, and the notes, with the captured nodes that they are about."""
        parts = (f"reductions in {self.parts} parts side by side",) if self.kernels and self.parts > 1 else ()
        return (*parts, *(fill_sites(note, self.region) for note in self.notes))


@dataclass(frozen=True, slots=True, eq=False)
class ChosenRegions:
    """A graph whose chosen ops carry the number of their kernel, with the decisions behind it."""

    graph: Graph
    regions: tuple[ChosenRegion, ...] = ()


@dataclass(frozen=True, slots=True)
class Prices:
    """Modelled seconds: of a kernel; of a region in library calls and what the rest of the pipeline makes of it; and of
    a region in one launch that reads its inputs and stores its outputs once, at the rates of a library. Unknown sizes
    are those of `hints`."""

    hints: SizeHints
    kernel: Price
    library: Callable[[Graph], float]
    ideal: Callable[[Graph], float]
    usual: Prices | None = None
    """The same for the sizes that the program was traced with, if these are others: kernels must win there too."""
    routine: Callable[[Graph], tuple[float, Graph] | None] = lambda region: None
    """Seconds of a routine of the library that computes a whole region, and the region as its call."""
    refused: Callable[[Kernel, Mapping[Value, Layout]], Sequence[Note]] = lambda kernel, layouts: ()
    """What could not be had in a kernel."""
    spared: Callable[[Graph, Sequence[Kernel]], float] = lambda region, kernels: 0.0
    """The part of the device's memory that the largest value between the library calls of a region takes; 0 where
    kernels store one that is nearly as large."""
    guess: Callable[[Kernel], float] | None = None
    """Seconds of a kernel in one launch at the rates of a library: what is known of it before it is solved."""
    timed: Callable[[Sequence[Graph]], Sequence[float] | None] = lambda covers: None
    """Measured seconds of graphs whose ops have the numbers of their kernels; None where nothing is measured."""

    def beaten(self, captured: Graph, kernels: Sequence[Kernel], layouts: Mapping[Value, Layout]) -> bool:
        """Whether kernels are clearly faster than the library, or spare much memory."""
        ours = sum(self.kernel(k, layouts) for k in kernels)
        here = (
            PARTITION.min_gain_over_library_ratio * ours < self.library(captured)
            or self.spared(captured, kernels) > PARTITION.max_value_memory_ratio
        )
        return here and (self.usual is None or self.usual.beaten(captured, kernels, layouts))


Rearrange = Callable[[Graph], tuple[Graph, tuple[str, ...]]]
"""Gives an equal region whose large values are fewer, and notes of the rules that were applied and refused."""


@dataclass(frozen=True, slots=True)
class RegionPolicy:
    """Which kernels of regions are considered: as the option says (`mode`), for so many `cores`. `skinny` is as in
    `find_regions`. Where ops are to stay `apart`, each of a region is a kernel."""

    mode: Contractions
    cores: int
    skinny: bool = False
    apart: bool = False
    attention: bool = False
    """Only what a library computes in one call."""
    timed: bool = False
    """A clock has the last word on kernels that the model sees ahead, be it by little."""
    behind: bool = False
    """Only what stands behind the products before the last."""

    @property
    def always(self) -> bool:
        """Whether kernels are taken whatever a library would do."""
        return self.mode == "inside"


Judge = Callable[[Mapping[str, tuple[Region, ChosenRegion]]], Mapping[str, ChosenRegion]]
"""What regions get in the end, by their keys, told what was decided for each; those without stay as they are."""


def _all_as_decided(found: Mapping[str, tuple[Region, ChosenRegion]]) -> Mapping[str, ChosenRegion]:
    return {key: decided for key, (_, decided) in found.items()}


def choose_kernels(
    graph: Graph,
    prices: Prices,
    rearrange: Rearrange,
    policy: RegionPolicy,
    cache: DecisionCache | None = None,
    judge: Judge = _all_as_decided,
) -> ChosenRegions:
    """Choose the kernels of every region of a graph whose views are composed. Nothing is priced of regions that
    `cache` knows. A `judge` has the last word."""
    if policy.mode == "library":
        return ChosenRegions(graph)
    known: dict[str, ChosenRegion] = {}
    first: dict[str, Region] = {}
    keys: list[tuple[Region, str]] = []
    for region in find_regions(
        graph, prices.hints, anywhere=policy.always, skinny=policy.skinny, attention=policy.attention,
        behind=policy.behind,
    ):  # fmt: skip
        alone = region.graph(graph)
        key = task_of(alone, _calls(region, graph))
        if key not in known:
            routine = None if policy.always else prices.routine(alone)
            found = None if routine else _cached_choice(alone, key, rearrange, cache, prices.hints)
            captured = region.as_captured(graph)
            choose = _each_apart if policy.apart and routine is None else partial(_choose, routine=routine)
            known[key] = found or choose(alone, captured, prices, rearrange, policy)
            if cache is not None and found is None and routine is None:
                cache.put(key, _plain(known[key]))
        first.setdefault(key, region)
        keys.append((region, key))
    taken = judge({key: (first[key], decided) for key, decided in known.items()})
    splicer = _Splicer(graph)
    for region, key in keys:
        decided = taken.get(key)
        if decided is None:
            continue
        if decided.routine is not None:
            splicer.call(region, decided.routine)
        elif decided.kernels:
            splicer.replace(region, decided)
    chosen = tuple(taken[key] for _, key in keys if key in taken)
    return ChosenRegions(splicer.graph() if splicer.made else graph, chosen)


def _calls(region: Region, graph: Graph) -> tuple[LibraryCall | None, ...]:
    """What a library would do in place of each op of a region: it is compared with kernels."""
    calls = (graph.origins[op.origin].call if op.origin >= 0 else None for op in region.ops)
    return tuple(None if call is None else as_seen(call) for call in calls)


def _choose(
    region: Graph, captured: Graph, prices: Prices, rearrange: Rearrange, policy: RegionPolicy,
    routine: tuple[float, Graph] | None = None,
) -> ChosenRegion:  # fmt: skip
    otherwise = prices.library(captured)
    if routine is not None and routine[0] < min(
        otherwise, PARTITION.min_gain_over_library_ratio * prices.ideal(region)
    ):
        return ChosenRegion(region, (), routine[0], otherwise, routine=routine[1])
    fits = prices.spared(region, ()) <= PARTITION.max_value_memory_ratio
    if (
        fits
        and otherwise < PARTITION.min_gain_over_library_ratio * prices.ideal(region)
        and not policy.always
    ):
        return ChosenRegion(region, (), otherwise, otherwise)
    better, rules = rearrange(region)
    considered = candidates(
        better, prices.kernel, policy.cores, prices.hints, references(region), prices.guess
    )
    notes = (*_notes(considered, rules), *_in_one(better, prices, references(region)))
    sets = choices(better, considered.kept, 1)
    sets += [c for c in choices(better, considered.fit, TRIAL.max_considered_sets) if _is_lean(c, better)]
    ways = [Way(better, 1, c) for c in sets]
    ways = sorted((*ways, *in_parts(better, prices, policy.cores)), key=lambda way: way.choice.seconds)
    clear = bool(ways) and (policy.always or prices.beaten(captured, ways[0].kernels, ways[0].graph.layouts))
    near = bool(ways) and policy.timed and ways[0].choice.seconds < otherwise
    if not clear and not near:
        if routine is not None and routine[0] < otherwise:
            return ChosenRegion(region, (), routine[0], otherwise, notes, routine=routine[1])
        return ChosenRegion(region, (), otherwise, otherwise, notes)
    if routine is not None and PARTITION.min_gain_over_library_ratio * ways[0].choice.seconds > routine[0]:
        return ChosenRegion(region, (), routine[0], otherwise, notes, routine=routine[1])
    spared = prices.spared(captured, ways[0].kernels)
    if spared > PARTITION.max_value_memory_ratio:
        notes = (f"library calls would hold {spared:.0%} of the device's memory between them", *notes)
    best, times = _fastest(region, ways, prices)
    return ChosenRegion(
        region,
        best.kernels,
        best.choice.seconds,
        otherwise,
        (*times, *notes),
        best.graph,
        best.parts,
        clear=clear,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """Kernels for a region, as it is in `graph`: with its longest cascade in so many parts."""

    graph: Graph
    parts: int
    choice: Choice

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """In order."""
        return tuple(c.kernel for c in self.choice.kernels)

    def covered(self, region: Graph) -> Graph:
        """The region with the kernels in place of its ops."""
        return with_kernels(ChosenRegion(region, self.kernels, 0.0, 0.0, rearranged=self.graph))


def with_kernels(decided: ChosenRegion) -> Graph:
    """A region with the kernels that were decided on in place of its ops."""
    region = decided.region
    inputs, outputs = ([v for v in vs if isinstance(v, Value)] for vs in (region.inputs, region.outputs))
    splicer = _Splicer(region)
    splicer.replace(Region(region.ops, tuple(inputs), tuple(outputs), frozenset(region.ops)), decided)
    return splicer.graph()


def _is_lean(choice: Choice, region: Graph) -> bool:
    """Whether nothing is stored that nobody reads."""
    wanted = {v for v in region.outputs if isinstance(v, Value)}.union(*(c.cuts for c in choice.kernels))
    return all(c.stores <= wanted for c in choice.kernels)


def _equal(a: Way, b: Way) -> bool:
    """Whether the same kernels stand in both."""
    return a.parts == b.parts and {(k.ops, k.outputs) for k in a.kernels} == {
        (k.ops, k.outputs) for k in b.kernels
    }


def _fastest(region: Graph, ways: Sequence[Way], prices: Prices) -> tuple[Way, tuple[str, ...]]:
    """The fastest way by measurement, among those near the best one by the model, and what was measured; the best
    one by the model where nothing is."""
    best = ways[0]
    near = [best]
    for way in ways:
        if (
            not any(_equal(way, other) for other in near)
            and way.choice.seconds <= TRIAL.max_modelled_slowdown_ratio * best.choice.seconds
        ):
            near.append(way)
    near = near[: TRIAL.max_timed_covers]
    worth = len(near) > 1 and TRIAL.min_seconds_to_time <= best.choice.seconds <= TRIAL.max_seconds_to_time
    taken = prices.timed([way.covered(region) for way in near]) if worth else None
    if taken is None:
        return best, ()
    least = math.inf
    for way, seconds in zip(near, taken, strict=True):
        if seconds < COMPARISON.max_preferred_ratio * least:
            best, least = way, seconds
    shown = [f"{len(w.kernels)} kernels" + (f" in {w.parts} parts" if w.parts > 1 else "") for w in near]
    times = zip(shown, near, taken, strict=True)
    return best, (
        "measured: "
        + "; ".join(
            f"{name} {t * 1e3:.3g} ms ({w.choice.seconds * 1e3:.3g} modelled)" for name, w, t in times
        ),
    )


def _in_one(region: Graph, prices: Prices, name: Callable[[Op], str]) -> Iterator[str]:
    """What could not be had if all of the region were one kernel: passes that do not merge."""
    required = {v for v in region.outputs if isinstance(v, Value)}
    merged = Kernel(region.ops, tuple(v for v in _results(region) if v in required))
    for note in prices.refused(merged, region.layouts):
        yield f"in one kernel {note.shown(name)}"


def _each_apart(
    region: Graph, captured: Graph, prices: Prices, rearrange: Rearrange, policy: RegionPolicy
) -> ChosenRegion:
    """Every op of the region a kernel."""
    better, rules = rearrange(region)
    kernels = tuple(Kernel((op,), op.outputs) for op in better.ops)
    otherwise = prices.library(captured)
    if not policy.always and not prices.beaten(captured, kernels, better.layouts):
        return ChosenRegion(region, (), otherwise, otherwise, _applied(rules))
    seconds = sum(prices.kernel(k, better.layouts) for k in kernels)
    return ChosenRegion(region, kernels, seconds, otherwise, _applied(rules), better)


def in_parts(region: Graph, prices: Prices, cores: int) -> Iterator[Way]:
    """The region with its longest cascade in parts, if it has too few rows for `cores`."""
    found = _longest(region, prices.hints)
    if found is None or prices.hints.estimate(found.rows) >= PARTITION.max_rows_per_core_in_parts * cores:
        return
    extent = prices.hints.estimate(found.extent)
    for parts in part_counts(CASCADE_PARTS.of_few_rows, extent, PARTITION.min_cascade_part_elements):
        made = split_cascade(region, found, parts)
        choice = cut_at(*made, prices.kernel) if made is not None else None
        if made is not None and choice is not None:
            yield Way(made[0], parts, choice)


def _longest(region: Graph, hints: SizeHints) -> Cascade | None:
    return max(cascades(region), key=lambda c: hints.estimate(c.extent), default=None)


def _apart(region: Graph, parts: int, hints: SizeHints) -> Graph | None:
    """The region with its longest cascade in so many parts."""
    found = _longest(region, hints)
    made = split_cascade(region, found, parts) if found is not None else None
    return made[0] if made is not None else None


def _notes(considered: Candidates, rules: Sequence[str]) -> tuple[str, ...]:
    return (
        f"{len(considered.kept)} kernels considered of {considered.tried}",
        *(f"refused: {why}" for why in considered.refused),
        *_applied(rules),
    )


def _applied(rules: Sequence[str]) -> tuple[str, ...]:
    return tuple(name + (f" x{n}" if n > 1 else "") for name, n in Counter(rules).items())


def _plain(chosen: ChosenRegion) -> list[object]:
    """A decision as plain data."""
    better = chosen.rearranged or chosen.region
    place = {op: n for n, op in enumerate(better.ops)}
    result = {v: n for n, v in enumerate(_results(better))}
    kernels = [
        Grouping(tuple(place[op] for op in k.ops), tuple(result[v] for v in k.outputs))
        for k in chosen.kernels
    ]
    facts = [chosen.seconds, chosen.library, chosen.parts, chosen.clear]
    return [*facts, plain(kernels), list(chosen.notes)]


def _cached_choice(
    region: Graph, task: str, rearrange: Rearrange, cache: DecisionCache | None, hints: SizeHints
) -> ChosenRegion | None:
    """What was decided about a region before; None if nothing was that fits it."""
    match cache.get(task) if cache is not None else None:
        case [float(seconds), float(library), int(parts), bool(clear), kernels, list(notes)]:
            known = groupings_of(kernels)
        case _:
            return None
    better: Graph | None = rearrange(region)[0] if known else region
    better = _apart(better, parts, hints) if parts > 1 else better
    if known is None or better is None:
        return None
    results = _results(better)
    if any(max(g.ops) >= len(better.ops) or max(g.stores) >= len(results) for g in known):
        return None
    made = (Kernel(tuple(better.ops[n] for n in g.ops), tuple(results[n] for n in g.stores)) for g in known)
    return ChosenRegion(
        region, tuple(made), seconds, library, tuple(map(str, notes)), better, parts, clear=clear
    )


def _results(graph: Graph) -> list[Value]:
    return [v for op in graph.ops for v in op.outputs]


class _Splicer:
    """Puts the kernels of regions in place of their ops."""

    def __init__(self, graph: Graph) -> None:
        self.original = graph
        self.gone: set[Op] = set()
        self.made: list[Op] = []
        self.kernels = 1 + max((op.kernel for op in graph.ops), default=-1)
        self.fresh = graph.fresh_id()

    def replace(self, region: Region, decided: ChosenRegion) -> None:
        """The region's own ops leave; copies of the decided kernels' ops come."""
        self.gone |= region.own
        before = decided.region
        same = dict(zip([v for v in before.inputs if isinstance(v, Value)], region.inputs, strict=True))
        outside = dict(zip([v for v in before.outputs if isinstance(v, Value)], region.outputs, strict=True))
        origins = {a.origin: b.origin for a, b in zip(before.ops, region.ops, strict=True) if a.origin >= 0}
        shared: dict[Value, Value] = {}
        for kernel in round_alike(decided.kernels):
            table = dict(same)
            stored = [v for v in kernel.outputs if v not in shared]
            shared |= {v: outside.get(v) or self.value(v) for v in stored}
            made = {v for op in kernel.ops for v in op.outputs}
            table |= {v: new for v, new in shared.items() if v not in made or v in stored}
            for op in kernel.ops:
                outputs = tuple(table.get(v) or self.value(v) for v in op.outputs)
                inputs = tuple(table[v] for v in op.inputs)
                table |= dict(zip(op.outputs, outputs, strict=True))
                origin = origins.get(op.origin, op.origin)
                self.made.append(
                    replace(op, inputs=inputs, outputs=outputs, kernel=self.kernels, origin=origin)
                )
            self.kernels += 1

    def call(self, region: Region, routine: Graph) -> None:
        """The region's own ops leave; those around a call that does the same come."""
        self.gone |= region.own
        table = dict(zip([v for v in routine.inputs if isinstance(v, Value)], region.inputs, strict=True))
        ends = [v for v in routine.outputs if isinstance(v, Value)]
        table |= dict(zip(ends, region.outputs, strict=True))
        for op in routine.ops:
            table |= {v: self.value(v) for v in op.outputs if v not in table}
            inputs, outputs = tuple(table[v] for v in op.inputs), tuple(table[v] for v in op.outputs)
            self.made.append(replace(op, inputs=inputs, outputs=outputs))

    def value(self, like: Value) -> Value:
        self.fresh += 1
        return Value(self.fresh - 1, like.shape, like.dtype)

    def graph(self) -> Graph:
        """The whole graph with the kernels in place."""
        remaining = [op for op in self.original.ops if op not in self.gone]
        return self.original.with_ops(_in_order([*remaining, *self.made], self.original))


def _in_order(ops: Sequence[Op], graph: Graph) -> list[Op]:
    """Producers before consumers, otherwise as they stand; copies stand where the results that they lead to did. Raises
    VerifyError if an op reads what no op makes, or ops wait for each other."""
    place = {v: n for n, op in enumerate(graph.ops) for v in op.outputs}
    maker = {v: n for n, op in enumerate(ops) for v in op.outputs}
    given = {*graph.inputs, *graph.constants}
    lost = [v for op in ops for v in op.inputs if v not in maker and v not in given]
    if lost:
        raise VerifyError(f"{lost[0]} is read, but left with a region that kept it to itself", phase="map")
    rank = [max((place.get(v, -1) for v in op.outputs), default=-1) for op in ops]
    before = [{maker[v] for v in op.inputs if v in maker} for op in ops]
    after: dict[int, list[int]] = {}
    for n, sources in enumerate(before):
        for m in sources:
            after.setdefault(m, []).append(n)
    waiting = [len(sources) for sources in before]
    ready = [(rank[n], n) for n in range(len(ops)) if not waiting[n]]
    heapq.heapify(ready)
    order: list[Op] = []
    while ready:
        _, n = heapq.heappop(ready)
        order.append(ops[n])
        for m in after.get(n, []):
            waiting[m] -= 1
            if not waiting[m]:
                heapq.heappush(ready, (rank[m], m))
    if len(order) != len(ops):
        raise VerifyError("ops of regions depend on each other in a cycle", phase="map")
    return order
