"""Kernels of loops with products, in other blocks or with warps that have different work, where a clock finds them
faster than under the schedule that the model prefers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from tilewright.errors import IllegalSchedule, warn_once
from tilewright.ir.graph import Graph
from tilewright.ir.kernel import Cover, Kernel
from tilewright.ir.schedule import Schedule
from tilewright.ir.sizes import dims
from tilewright.partition.cover import partition
from tilewright.partition.regions import Region
from tilewright.pipeline.build import Clock, KernelBuilder
from tilewright.pipeline.replay_trial import ReplayContestant, ReplayTrial
from tilewright.pipeline.trial import told
from tilewright.runtime.cpu.toolchain import usable_cores
from tilewright.runtime.stats import STATS
from tilewright.runtime.store.tuned import Verdicts
from tilewright.runtime.store.tuning_file import Entry
from tilewright.schedule.scheduler import Solution
from tilewright.schedule.solver import kernel_key
from tilewright.tuning.timing_limits import PRODUCTS

LOG = logging.getLogger("tilewright")

KIND = "way"
"""The name of these decisions."""
USUAL = ""
"""Stands for a schedule where no other one is faster."""


@dataclass(frozen=True, slots=True)
class KernelWay:
    """A graph of which one kernel, known by its key, has another schedule."""

    key: str
    schedule: Schedule
    contestant: ReplayContestant


def other_ways(graph: Graph, builder: KernelBuilder) -> Iterator[KernelWay]:
    """A graph whose ops have the numbers of their kernels, in the ways in which one kernel of it has another
    schedule."""
    first = partition(graph, builder.solver.price, builder.hints)
    for like, solution in _others(first, builder):
        # A contestant has kernels of its own.
        cover = partition(graph, builder.solver.price, builder.hints)
        kernel = cover.steps[first.steps.index(like)]
        assert isinstance(kernel, Kernel), "equal graphs have equal covers"
        contestant = ReplayContestant(cover, {kernel: solution.schedule})
        yield KernelWay(kernel_key(kernel, cover.layouts), solution.schedule, contestant)


def fastest_schedules(
    usual_seconds: float, timed: Sequence[tuple[KernelWay, float | None]], what: str
) -> dict[str, Entry]:
    """By the keys of kernels of a graph that is told as `what`, the schedule with which the graph takes the least time:
    its usual one, unless another is clearly faster."""
    found: dict[str, Entry] = {}
    for key in dict.fromkeys(way.key for way, _ in timed):
        ways = ((t, str(way.schedule)) for way, t in timed if way.key == key and t is not None)
        best = min(ways, default=(usual_seconds, USUAL))
        faster = best[0] <= PRODUCTS.max_preferred_ratio * usual_seconds
        seconds, text = best if faster else (usual_seconds, USUAL)
        found[key] = {"what": what, "schedule": text, "seconds": seconds, "usual_seconds": usual_seconds}
    return found


def _others(cover: Cover, builder: KernelBuilder) -> list[tuple[Kernel, Solution]]:
    """The kernels of a cover under each of their other schedules; those for specialised warps if these are wanted."""
    solver, warps = builder.solver, builder.solver.options.specialise_warps
    found: list[tuple[Kernel, Solution]] = []
    for step in cover.steps:
        if isinstance(step, Kernel) and not step.over and not step.lines and has_known_sizes(step):
            try:
                special = solver.specialised(step, cover.layouts) if warps else ()
                found += [(step, s) for s in (*special, *solver.other_blocks(step, cover.layouts))]
            except IllegalSchedule:
                continue
    return found


def has_known_sizes(of: Kernel | Region) -> bool:
    """Whether no size of what is read and made is a symbol."""
    return all(dims.static(n) is not None for v in (*of.inputs, *of.outputs) for n in v.shape)


def choose_ways(cover: Cover, builder: KernelBuilder, device: str, clock: Clock, where: str) -> None:
    """Tell the solver of the `builder` for which kernels of a cover another schedule is faster: as a clock says now, or
    has said before on such a device."""
    solver, seconds = builder.solver, seconds_for(builder)
    verdicts = verdicts_of(builder, where, stored=seconds > 0)
    tasks = {kernel_key(k, cover.layouts): k for k, _ in _others(cover, builder)}
    known = {key: entry for key in tasks if (entry := verdicts.get(key)) is not None}
    left = {key: _alone(k, cover) for key, k in tasks.items() if key not in known}
    if left and builder.tuned.seconds(seconds) > 0:
        known |= _timed(left, builder, ReplayTrial(builder, device, clock), verdicts)
    for key in left:
        if key not in known:
            verdicts.leave(key)
    for key, entry in known.items():
        kernel, text = tasks[key], str(entry["schedule"])
        if text == USUAL:
            continue
        try:
            solution = solver.read_solution(kernel, cover.layouts, text, float(str(entry["seconds"])))
            solver.scheduler.check_capacity(solution.form, solution.schedule, solver.target)
        except (ValueError, IllegalSchedule) as wrong:
            warn_once(f"a schedule that was measured before is not taken for {entry['what']}: {wrong}")
            verdicts.drop(key)
            continue
        solver.prefer(kernel, solution, partial(_drop, verdicts, key))


def _drop(verdicts: Verdicts, key: str, _why: str) -> None:
    """Forget a schedule that was refused."""
    verdicts.drop(key)


def verdicts_of(builder: KernelBuilder, where: str, *, stored: bool) -> Verdicts:
    """What is known of kernels that may have other schedules."""
    return Verdicts(KIND, builder.decisions, builder.tuned, where, stored)


def seconds_for(builder: KernelBuilder) -> float:
    """For how long something may be timed."""
    session = builder.tuned.session
    return float(builder.solver.options.tune_seconds) if session is None else session.left


def _alone(kernel: Kernel, cover: Cover) -> Graph:
    """A kernel of a cover as a graph of its own."""
    layouts = {v: cover.layouts[v] for v in (*kernel.inputs, *kernel.outputs) if v in cover.layouts}
    ops = tuple(replace(op, kernel=0) for op in kernel.ops)
    return Graph(kernel.inputs, ops, kernel.outputs, cover.graph.origins, layouts)


def _timed(
    graphs: dict[str, Graph], builder: KernelBuilder, trial: ReplayTrial, verdicts: Verdicts
) -> dict[str, Entry]:
    """By key, what a clock says of kernels: of each as many ways, the first of them, as there is time to build."""
    builds = int(
        builder.tuned.seconds(seconds_for(builder)) * usable_cores() * PRODUCTS.builds_per_core_second
    )
    most = max(1, builds // len(graphs))
    ways = {key: list(islice(other_ways(graph, builder), most)) for key, graph in graphs.items()}
    usual = {
        key: ReplayContestant(partition(g, builder.solver.price, builder.hints)) for key, g in graphs.items()
    }
    asked = [key for key in graphs if ways[key] and trial.fits([usual[key]])]
    contests = [[usual[key], *(way.contestant for way in ways[key])] for key in asked]
    STATS.timed += len(contests)
    found: dict[str, Entry] = {}
    for key, (first, *others) in zip(asked, trial(contests), strict=True):
        if first is not None:
            alone = [(replace(way, key=key), t) for way, t in zip(ways[key], others, strict=True)]
            found |= fastest_schedules(first, alone, told(graphs[key]))
    keep_schedules(found, verdicts)
    return found


def keep_schedules(found: dict[str, Entry], verdicts: Verdicts) -> None:
    """Keep what a clock said, for `choose_ways`."""
    for key, entry in found.items():
        verdicts.put(key, entry)
        seconds, usual = (1e6 * float(str(entry[name])) for name in ("seconds", "usual_seconds"))
        LOG.info("%s: %.3g us, %.3g us as the model prefers", entry["what"], seconds, usual)
