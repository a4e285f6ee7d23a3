"""Attention that a library computes in one call: a kernel of our own where a clock finds it faster, as it is for short
sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from tilewright.ir.graph import Graph
from tilewright.ir.sizes import dims
from tilewright.library.library_graph import library_graph
from tilewright.library.select import select
from tilewright.options import Options
from tilewright.partition.choose_kernels import (
    ChosenRegion,
    ChosenRegions,
    RegionPolicy,
    choose_kernels,
    with_kernels,
)
from tilewright.partition.cover import partition
from tilewright.partition.layout import choose_layouts
from tilewright.partition.regions import Region, may_have_regions
from tilewright.rewrite.normal.frozen_masks import recognise_masks
from tilewright.rewrite.normal.normalise import normalise
from tilewright.runtime.stats import STATS
from tilewright.runtime.store.tuned import Verdicts
from tilewright.tuning.search_limits import PRODUCTS, TRIAL

from .build import KernelBuilder
from .prices import MeasuredCache, kernel_prices, rearranged
from .replay_trial import ReplayContestant, ReplayTrial
from .trial import told


def choose_attention(graph: Graph, builder: KernelBuilder, device: str, options: Options) -> ChosenRegions:
    """The graph with kernels for attention of known sizes, where they are measured as faster at `device` than the
    library's call. Where nothing can be timed, nothing is chosen."""
    clock, solver, tuned = builder.backend.replay_clock(device), builder.solver, builder.tuned
    stored = options.tune_seconds > 0 or tuned.session is not None
    if clock is None or not (stored or tuned) or not may_have_regions(graph, solver.hints, attention=True):
        return ChosenRegions(graph)
    plain = normalise(recognise_masks(graph))
    selected = select(plain)
    normal = replace(plain, layouts=choose_layouts(selected))  # with those of what calls make
    where = builder.backend.timing_key(device, options)
    cache = MeasuredCache(builder.decisions, f"attention beside a library's on {where}")
    verdicts = Verdicts("attention", builder.decisions, tuned, where, stored)
    trial = ReplayTrial(builder, device, clock)

    def judged(found: Mapping[str, tuple[Region, ChosenRegion]]) -> set[str]:
        known = {key: entry for key in found if (entry := verdicts.get(key)) is not None}
        taken = {key for key, entry in known.items() if entry["kernels"] is True}
        left = {k: v for k, v in found.items() if k not in known and _is_worth_timing(*v)} if stored else {}
        if not tuned.seconds(options.tune_seconds):
            for key in left:
                verdicts.leave(key)
            return taken
        contests = {key: _ways(*pair, normal, selected, builder) for key, pair in left.items()}
        contests = {key: ways for key, ways in contests.items() if trial.fits(ways)}
        STATS.timed += len(contests)
        for key, times in zip(contests, trial(list(contests.values())), strict=True):
            library, ours = times
            if library is not None and ours is not None:
                wins = ours <= PRODUCTS.max_preferred_ratio * library
                taken |= {key} if wins else set()
                what = told(found[key][1].region)
                verdicts.put(
                    key, {"what": what, "kernels": wins, "seconds": ours, "library_seconds": library}
                )
        return taken

    policy = RegionPolicy("inside", solver.target.cores, attention=True)
    changed = partial(rearranged, sizes=solver.hints.sizes, options=options)
    found = choose_kernels(normal, kernel_prices(solver), changed, policy, cache, judged)
    made = replace(found.graph, layouts=plain.layouts)
    return replace(found, graph=made) if found.regions else ChosenRegions(graph)


def _is_worth_timing(region: Region, decided: ChosenRegion) -> bool:
    """Whether all sizes are known and the model does not take the kernels for much slower than the library."""
    values = (*region.inputs, *region.outputs)
    known = all(dims.static(n) is not None for v in values for n in v.shape)
    return known and decided.seconds <= TRIAL.max_modelled_slowdown_ratio * decided.library


def _ways(
    region: Region, decided: ChosenRegion, graph: Graph, selected: Graph, builder: KernelBuilder
) -> tuple[ReplayContestant, ReplayContestant]:
    """The library's and ours."""
    solver, hints = builder.solver, builder.hints
    origins = {op.origin for op in region.own if op.origin >= 0}
    theirs = library_graph(region.graph(graph), origins, graph, selected)
    return ReplayContestant(partition(theirs, solver.price, hints, afar=solver.afar)), ReplayContestant(
        partition(with_kernels(decided), solver.price, hints)
    )
