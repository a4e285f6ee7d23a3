"""Kernels around contractions, attention for one: chosen by the model, then, where a clock can tell, beside a library's
way. A library wins for large sizes where the model errs, a kernel for short sequences where a library has a call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from tilewright.ir.graph import Graph
from tilewright.library.library_graph import library_graph
from tilewright.library.select import select
from tilewright.options import Options
from tilewright.partition.choose_kernels import (
    ChosenRegion,
    ChosenRegions,
    Prices,
    Rearrange,
    RegionPolicy,
    choose_kernels,
    in_parts,
    with_kernels,
)
from tilewright.partition.cover import partition
from tilewright.partition.layout import choose_layouts
from tilewright.partition.memo import DecisionCache
from tilewright.partition.regions import Region, may_have_regions
from tilewright.rewrite.normal.frozen_masks import recognise_masks
from tilewright.rewrite.normal.normalise import normalise
from tilewright.runtime.stats import STATS
from tilewright.runtime.store.tuned import Verdicts
from tilewright.runtime.store.tuning_file import Entry
from tilewright.schedule.solver import Solver
from tilewright.tuning.thresholds import PARTITION
from tilewright.tuning.timing_limits import PRODUCTS, TRIAL

from .build import Clock, KernelBuilder
from .place import DevicePlace
from .prices import MeasuredCache, kernel_prices, rearranged
from .replay_trial import ReplayContestant, ReplayTrial
from .timed.kernel_ways import (
    KernelWay,
    fastest_schedules,
    has_known_sizes,
    keep_schedules,
    other_ways,
    verdicts_of,
)
from .trial import CoverTrial, told

Decided = Mapping[str, tuple[Region, ChosenRegion]]
"""What was decided for regions, by their keys."""


@dataclass(frozen=True, slots=True, eq=False)
class RegionWays:
    """A region in a library's way, with the kernels that were decided on, and, where there is such a way, with a
    library's first product and kernels behind it; and with its reductions in other numbers of parts."""

    library: Graph
    kernels: Graph
    behind: Graph | None = None
    other_parts: tuple[ChosenRegion, ...] = ()


Ways = Callable[[Region, ChosenRegion], RegionWays]
"""All ways to compute a region."""
InParts = Callable[[ChosenRegion], tuple[ChosenRegion, ...]]
"""What was decided on, in other numbers of parts."""


@dataclass(frozen=True, slots=True)
class RegionTrial:
    """Times kernels of regions of known sizes on `device` beside a library's way, or recalls what was found."""

    builder: KernelBuilder
    device: str
    options: Options
    clock: Clock

    @property
    def stores(self) -> bool:
        """Whether anything may be timed, and what was found before counts."""
        return self.options.tune_seconds > 0 or self.builder.tuned.session is not None

    def entries(self, found: Decided, ways: Ways, most: float) -> dict[str, Entry]:
        """By key, whether the kernels are preferred: they take at most `most` of the library's time."""
        where = self.builder.backend.timing_key(self.device, self.options)
        verdicts = Verdicts("attention", self.builder.decisions, self.builder.tuned, where, self.stores)
        known = {key: entry for key in found if (entry := verdicts.get(key)) is not None}
        left = {key: pair for key, pair in found.items() if key not in known and has_known_sizes(pair[0])}
        if not self.stores or not left:
            return known
        if not self.builder.tuned.seconds(self.options.tune_seconds):
            for key in left:
                verdicts.leave(key)
            return known
        trial = ReplayTrial(self.builder, self.device, self.clock)
        contests = {key: self._contest(ways(*pair)) for key, pair in left.items()}
        contests = {key: contest for key, contest in contests.items() if trial.fits(contest.contestants)}
        STATS.timed += len(contests)
        times = trial([contest.contestants for contest in contests.values()])
        schedules = verdicts_of(self.builder, where, stored=self.stores)
        for (key, contest), (library, usual, *others) in zip(contests.items(), times, strict=True):
            if library is None or usual is None:
                continue
            decided = left[key][1]
            what, rest = told(decided.region), others[len(contest.others) :]
            behind, in_parts = rest[: contest.behind_count], rest[contest.behind_count :]
            fastest = fastest_schedules(usual, list(zip(contest.others, others, strict=False)), what)
            ours = min((float(str(entry["seconds"])) for entry in fastest.values()), default=usual)
            best = min(library, *(t for t in behind if t is not None), math.inf)
            parts = decided.parts
            for count, seconds in zip(contest.parts, in_parts, strict=True):
                if seconds is not None and seconds <= PRODUCTS.max_preferred_ratio * ours:
                    ours, parts, fastest = seconds, count, {}
            wins = ours <= most * best
            known[key] = {
                "what": what, "kernels": wins, "parts": parts, "seconds": ours, "library_seconds": best,
            }  # fmt: skip
            verdicts.put(key, known[key])
            if wins:  # what won is what is built, though no time may be left by then
                keep_schedules(fastest, schedules)
        return known

    def _contest(self, ways: RegionWays) -> _RegionContest:
        price, hints, afar = self.builder.solver.price, self.builder.hints, self.builder.solver.afar
        library, usual = (
            partition(ways.library, price, hints, afar=afar),
            partition(ways.kernels, price, hints),
        )
        others = tuple(other_ways(ways.kernels, self.builder))
        half = (
            None if ways.behind is None else ReplayContestant(partition(ways.behind, price, hints, afar=afar))
        )
        in_parts = {
            d.parts: ReplayContestant(partition(with_kernels(d), price, hints)) for d in ways.other_parts
        }
        return _RegionContest(ReplayContestant(library), ReplayContestant(usual), others, half, in_parts)


@dataclass(frozen=True, slots=True)
class _RegionContest:
    """A region in a library's way, in ours as the model prefers and in other ways, in ours behind a library's first
    product, and in ours in other numbers of parts."""

    library: ReplayContestant
    usual: ReplayContestant
    others: tuple[KernelWay, ...]
    behind: ReplayContestant | None = None
    parts: Mapping[int, ReplayContestant] = field(default_factory=dict[int, ReplayContestant])

    @property
    def behind_count(self) -> int:
        """How many ways there are behind a library's product."""
        return int(self.behind is not None)

    @property
    def contestants(self) -> list[ReplayContestant]:
        """All ways in this order."""
        behind = [self.behind] if self.behind is not None else []
        blocks = (way.contestant for way in self.others)
        return [self.library, self.usual, *blocks, *behind, *self.parts.values()]


def choose_region_kernels(
    graph: Graph, builder: KernelBuilder, usual: Solver, place: DevicePlace, trial: RegionTrial | None = None
) -> ChosenRegions:
    """The kernels around contractions chosen at the sizes of the `builder`; they must win at the `usual` ones, too. If
    there are none, the graph stays as it is. Covers that the model takes for nearly equal are timed at `place`; what
    was chosen is timed beside the library's calls by `trial`."""
    grown, decisions, options = builder.solver, builder.decisions, usual.options
    inside, skinny = options.contractions == "inside", grown.scheduler.takes_skinny_products
    if options.contractions == "library" or not may_have_regions(
        graph, grown.hints, anywhere=inside, skinny=skinny
    ):
        return ChosenRegions(graph)
    prices = kernel_prices(grown, None if grown is usual else kernel_prices(usual))
    cache: DecisionCache | None = decisions
    if options.measure and options.fusion == "full":
        prices = replace(prices, timed=CoverTrial(builder, place.device))
        where, known = place.backend.timing_key(place.device, options), builder.tuned.identity
        where += " beside a library" * (trial is not None)
        # who tunes wants to know the times behind each choice, of which the cache knows nothing
        tunes = builder.tuned.session is not None
        cache = None if tunes else MeasuredCache(decisions, f"measured on {where} {known}".rstrip())
    changed = partial(rearranged, sizes=grown.hints.sizes, options=options)
    normal = normalise(recognise_masks(graph))

    apart = options.fusion == "none"
    policy = RegionPolicy(options.contractions, grown.target.cores, skinny, apart, timed=trial is not None)
    others = partial(_in_other_parts, prices=prices, rearrange=changed, cores=policy.cores)
    selected = functools.cache(partial(select, normal))
    behind, halves = replace(policy, behind=True), not (apart or inside) and trial is not None

    def judged(
        found: Decided, measured: bool = False, rest: Decided | None = None
    ) -> dict[str, ChosenRegion]:
        ways = partial(_ways, normal, selected, rest or {}, others)
        return _kept(found, ways, trial, prices, measured, others)

    def judged_whole(found: Decided) -> dict[str, ChosenRegion]:
        rest: dict[str, tuple[Region, ChosenRegion]] = {}
        if halves and any(_is_doubtful(d, prices) or (d.kernels and not d.clear) for _, d in found.values()):
            choose_kernels(normal, prices, changed, behind, cache, lambda seen: rest.update(seen) or {})
            found = {key: (region, _unless_behind(region, d, rest)) for key, (region, d) in found.items()}
        return judged(found, rest=rest)

    found = choose_kernels(normal, prices, changed, policy, cache, judged_whole)
    if halves and any(not r.kernels and not r.routine for r in found.regions):
        # a library's product, and a kernel for what stands behind it
        rest = choose_kernels(found.graph, prices, changed, behind, cache, partial(judged, measured=True))
        found = replace(rest, regions=(*found.regions, *(r for r in rest.regions if r.kernels)))
    made = any(r.kernels or r.routine for r in found.regions)
    return found if made else replace(found, graph=graph)


def _unless_behind(region: Region, decided: ChosenRegion, behind: Decided) -> ChosenRegion:
    """What was decided for a region, without kernels that the model sees behind a library's products with kernels for
    the rest, unless it sees them clearly ahead of a library's calls."""
    half = _half_of(region, behind)
    if decided.clear or half is None:
        return decided
    rest = half[1]
    if decided.library - rest.library + rest.seconds >= decided.seconds:
        return decided
    note = f"{decided.seconds * 1e3:.3g} ms modelled, and less behind a library's product"
    return replace(decided, kernels=(), notes=(note, *decided.notes))


def _half_of(region: Region, behind: Decided) -> tuple[Region, ChosenRegion] | None:
    """The part of a region that stands behind its first product, if kernels were decided on for it."""
    return next((pair for pair in behind.values() if pair[0].own <= region.own and pair[1].kernels), None)


def _kept(
    found: Decided, ways: Ways, trial: RegionTrial | None, prices: Prices, measured: bool, others: InParts
) -> dict[str, ChosenRegion]:
    """What was decided, without the kernels that a clock finds slower than other `ways`; of doubtful ones only those
    that were `measured`, if that is asked; in as many parts as a clock prefers."""
    decisions = {key: d if d.clear else replace(d, kernels=()) for key, (_, d) in found.items()}
    doubtful = {key: pair for key, pair in found.items() if _is_doubtful(pair[1], prices)}
    if trial is None or not doubtful:
        return decisions
    entries = trial.entries(doubtful, ways, 1.0 / PRODUCTS.max_preferred_ratio)
    if measured:
        decisions |= {key: replace(decisions[key], kernels=()) for key in doubtful if key not in entries}
    for key, entry in entries.items():
        decided = _with_parts(found[key][1], entry, others)
        ours, theirs = (1e3 * float(str(entry[name])) for name in ("seconds", "library_seconds"))
        note = f"measured: {ours:.3g} ms, {theirs:.3g} ms with library calls"
        kernels = decided.kernels if entry["kernels"] is True else ()
        decisions[key] = replace(decided, kernels=kernels, notes=(note, *decided.notes))
    return decisions


def _in_other_parts(
    decided: ChosenRegion, prices: Prices, rearrange: Rearrange, cores: int
) -> tuple[ChosenRegion, ...]:
    """The same decision with the longest cascade of the region in other numbers of parts: of how much of a loop runs,
    and of how many blocks a core needs at once, no model here knows."""
    ways = in_parts(rearrange(decided.region)[0], prices, cores) if decided.kernels else ()
    most = TRIAL.max_modelled_slowdown_ratio * decided.seconds
    return tuple(
        replace(decided, kernels=w.kernels, seconds=w.choice.seconds, rearranged=w.graph, parts=w.parts)
        for w in ways
        if w.parts != decided.parts and w.choice.seconds <= most
    )


def _with_parts(decided: ChosenRegion, entry: Entry, others: InParts) -> ChosenRegion:
    """A decision in as many parts as a clock prefers; as it is, with a note, where there is no such way."""
    parts = entry["parts"]
    if parts == decided.parts or not decided.kernels:
        return decided
    found = next((d for d in others(decided) if d.parts == parts), None)
    note = f"measured in {parts} parts, of which there are no kernels here"
    return replace(decided, notes=(note, *decided.notes)) if found is None else found


def _ways(
    graph: Graph, selected: Callable[[], Graph], rest: Decided, others: InParts, region: Region,
    decided: ChosenRegion,
) -> RegionWays:  # fmt: skip
    """All ways to compute a region of a graph, and of what a library's calls are `selected` for."""
    origins = {op.origin for op in region.own if op.origin >= 0}
    library = library_graph(region.graph(graph), origins, graph, selected())
    half = _half_of(region, rest)
    behind = None if half is None else _behind_product(graph, selected(), region, *half)
    return RegionWays(library, with_kernels(decided), behind, others(decided))


def _behind_product(
    graph: Graph, selected: Graph, region: Region, half: Region, decided: ChosenRegion
) -> Graph | None:
    """A region with a library's calls for what stands before its second half, and the kernels that were decided on for
    this; None if the rest of it has results, too."""
    if not set(region.outputs) <= set(half.outputs):
        return None
    between = tuple(v for v in half.inputs if v not in region.inputs)
    origins = {op.origin for op in region.own - half.own if op.origin >= 0}
    first = library_graph(replace(region.graph(graph), outputs=between), origins, graph, selected)
    last = with_kernels(decided)
    inputs = dict.fromkeys(v for v in (*first.inputs, *last.inputs) if v not in between)
    layouts = {**last.layouts, **first.layouts}
    return replace(
        first, inputs=tuple(inputs), ops=(*first.ops, *last.ops), outputs=region.outputs, layouts=layouts
    )


def _is_doubtful(decided: ChosenRegion, prices: Prices) -> bool:
    """Whether the model may err by what it sees kernels ahead. What spares much memory is taken whatever it costs."""
    if prices.spared(decided.region, decided.kernels) > PARTITION.max_value_memory_ratio:
        return False
    ahead = decided.library <= TRIAL.max_doubtful_gain_ratio * decided.seconds
    return bool(decided.kernels) and ahead and decided.library <= TRIAL.max_seconds_to_time


def choose_attention(graph: Graph, trial: RegionTrial) -> ChosenRegions:
    """The graph with kernels for attention of known sizes, where they are measured as faster than the library's call.
    Where nothing can be timed, nothing is chosen."""
    builder, options = trial.builder, trial.options
    solver = builder.solver
    asked = trial.stores or bool(builder.tuned)
    if not asked or not may_have_regions(graph, solver.hints, attention=True):
        return ChosenRegions(graph)
    plain = normalise(recognise_masks(graph))
    selected = select(plain)
    normal = replace(plain, layouts=choose_layouts(selected))  # with those of what calls make

    def judged(found: Decided) -> dict[str, ChosenRegion]:
        near = {key: pair for key, pair in found.items() if _is_near(pair[1], builder)}
        ways = partial(_ways, normal, lambda: selected, {}, others)
        entries = trial.entries(near, ways, PRODUCTS.max_preferred_ratio)
        taken = {key: entry for key, entry in entries.items() if entry["kernels"] is True}
        return {key: _with_parts(found[key][1], entry, others) for key, entry in taken.items()}

    policy = RegionPolicy("inside", solver.target.cores, attention=True)
    prices = kernel_prices(solver)
    changed = partial(rearranged, sizes=solver.hints.sizes, options=options)
    others = partial(_in_other_parts, prices=prices, rearrange=changed, cores=policy.cores)
    where = builder.backend.timing_key(trial.device, options)
    cache = MeasuredCache(builder.decisions, f"attention beside a library's on {where}")
    found = choose_kernels(normal, prices, changed, policy, cache, judged)
    made = replace(found.graph, layouts=plain.layouts)
    return replace(found, graph=made) if found.regions else ChosenRegions(graph)


def _is_near(decided: ChosenRegion, builder: KernelBuilder) -> bool:
    """Whether the model does not take the kernels, in the fastest of their ways, for much slower than the library."""
    most = TRIAL.max_modelled_slowdown_ratio * decided.library
    if decided.seconds <= most or not decided.kernels:
        return decided.seconds <= most
    faster = TRIAL.specialised_time_ratio * decided.seconds <= most
    ways = other_ways(with_kernels(decided), builder) if faster else ()
    return any(way.schedule.memory.warp_specialised for way in ways)
