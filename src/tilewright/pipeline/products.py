"""Products of matrices with what stands behind them: kernels of our own where a clock finds them faster than the
library's products and kernels for the rest."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.errors import IllegalSchedule
from tilewright.ir.graph import Graph, Layout, Op, Value
from tilewright.ir.kernel import Kernel
from tilewright.library.library_graph import library_graph
from tilewright.library.select import select
from tilewright.partition.cover import partition
from tilewright.partition.layout import choose_layouts
from tilewright.partition.memo import DecisionCache, task_of
from tilewright.partition.products import (
    LIBRARY,
    ChosenProduct,
    ChosenProducts,
    ProductGroup,
    find_products,
)
from tilewright.rewrite.normal.normalise import normalise
from tilewright.runtime.cpu.toolchain import usable_cores
from tilewright.schedule.scheduler import Solution
from tilewright.schedule.solver import Solver
from tilewright.tuning.search_limits import PRODUCTS

from .build import Builder
from .replay_trial import ReplayTrial, Way

LOG = logging.getLogger("tilewright")


Rewrite = Callable[[Graph], Graph]


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """Equal groups: the region of the first one as a graph of its own and as one kernel, and with the library's way to
    compute it."""

    key: str
    groups: list[ProductGroup]
    region: Graph
    library: Graph
    kernel: Kernel
    layouts: Mapping[Value, Layout]
    """Of all values of the graph."""


def choose_products(
    graph: Graph, builder: Builder, device: str, seconds: float, improve: Rewrite = lambda graph: graph
) -> ChosenProducts:
    """The graph with kernels for those groups of `find_products` for which a kernel is measured as faster at `device`.
    About so many `seconds` go into building and timing. `improve` does to calls what the later phases do. Where nothing
    can be timed, nothing is chosen."""
    clock = builder.backend.replay_clock(device)
    if clock is None or seconds <= 0:
        return ChosenProducts(graph)
    solver, cache = builder.solver, builder.decisions
    normal = normalise(graph)
    tasks = _tasks(normal, improve)
    if not tasks:
        return ChosenProducts(graph)
    where = builder.backend.timing_key(device, solver.options)
    known = {t.key: found for t in tasks if (found := _known(cache, t, where)) is not None}
    left = _with_proposals([t for t in tasks if t.key not in known], solver)
    for task, decided in _decided(left, ReplayTrial(builder, device, clock), seconds):
        known[task.key] = decided
        LOG.info("%s", decided)
        cache.put(_place(task, where), [decided.schedule, decided.seconds, decided.library])
    return _numbered(normal, graph, tasks, known, solver)


def _numbered(
    normal: Graph, graph: Graph, tasks: Sequence[_Task], known: dict[str, ChosenProduct], solver: Solver
) -> ChosenProducts:
    """The graph with the numbers of kernels, of which the solver knows the schedules from now on."""
    number: dict[Op, int] = {}
    layouts: dict[Value, Layout] = {}
    makes = normal.producer()
    fresh = 1 + max((op.kernel for op in normal.ops), default=-1)
    for task in tasks:
        decided = known.get(task.key)
        solution = _solution(task, decided, solver)
        if solution is None:
            continue
        for group in task.groups:
            made = [v for v in group.region.inputs if v in makes and makes[v].expr is not None]
            layouts |= {v: task.layouts[v] for v in (*made, *group.region.outputs) if v in task.layouts}
            number |= dict.fromkeys(group.region.ops, fresh)
            fresh += 1
        solver.prefer(
            Kernel(tuple(replace(op, kernel=0) for op in task.kernel.ops), task.kernel.outputs), solution
        )
    chosen = tuple(known[t.key] for t in tasks if t.key in known)
    if not number:
        return ChosenProducts(graph, chosen)
    ops = [replace(op, kernel=number.get(op, op.kernel)) for op in normal.ops]
    laid = layouts | dict(normal.layouts)  # as they lay when the kernels that read them were timed
    return ChosenProducts(replace(normal, ops=tuple(ops), layouts=laid), chosen)


def _solution(task: _Task, decided: ChosenProduct | None, solver: Solver) -> Solution | None:
    """The schedule that was decided on, with the form that it is of."""
    if decided is None or decided.schedule == LIBRARY:
        return None
    try:
        return solver.read(task.kernel, task.layouts, decided.schedule, decided.seconds)
    except (ValueError, IllegalSchedule) as wrong:
        LOG.info("no schedule is taken from the store: %s", wrong)
        return None


def _place(task: _Task, where: str) -> str:
    return f"product\n{task.key}\n{where}"


def _known(cache: DecisionCache, task: _Task, where: str) -> ChosenProduct | None:
    """What an earlier process decided."""
    match cache.get(_place(task, where)):
        case [str(schedule), float(seconds), float(library)]:
            return ChosenProduct(task.region.ops, schedule, seconds, library)
        case _:
            return None


def _tasks(graph: Graph, improve: Rewrite) -> list[_Task]:
    """The groups, those together that are equal."""
    selected = select(graph)
    if all(op.call is None for op in selected.ops):
        return []
    graph = replace(graph, layouts=choose_layouts(selected))  # with those of what calls make
    found: dict[str, list[ProductGroup]] = {}
    for group in find_products(graph):
        found.setdefault(task_of(group.region.graph(graph)), []).append(group)
    made: list[_Task] = []
    for key, alike in found.items():
        region = alike[0].region
        alone, origins = region.graph(graph), {op.origin for op in alike[0].products}
        library = improve(library_graph(alone, origins, graph, selected))
        made.append(_Task(key, alike, alone, library, Kernel(region.ops, region.outputs), graph.layouts))
    return made


def _with_proposals(tasks: Sequence[_Task], solver: Solver) -> list[tuple[_Task, tuple[Solution, ...]]]:
    """The tasks that have some, with them; those first that are more than products, and take longest."""
    found: list[tuple[_Task, tuple[Solution, ...]]] = []
    for task in tasks:
        try:
            proposed = solver.proposals(task.kernel, task.layouts)
        except IllegalSchedule:
            continue
        if proposed:
            found.append((task, proposed))
    return sorted(found, key=lambda f: (not f[0].groups[0].is_more, -f[1][0].seconds * len(f[0].groups)))


def _decided(
    tasks: Sequence[tuple[_Task, tuple[Solution, ...]]], trial: ReplayTrial, seconds: float
) -> Iterator[tuple[_Task, ChosenProduct]]:
    """What the clock says of each task; nothing of those for which there was no time."""
    builds = int(seconds * usable_cores() * PRODUCTS.builds_per_core_second)
    fitting = [(t, p) for t, p in tasks if trial.fits(_ways(t, (), trial.builder))][:builds]
    each = min(PRODUCTS.max_timed, builds // len(fitting)) if fitting else 0
    ways = [_ways(t, _varied(p, each), trial.builder) for t, p in fitting]
    for (task, _), contest, times in zip(fitting, ways, trial(ways), strict=True):
        library, ours = times[0], [t if t is not None else math.inf for t in times[1:]]
        if library is None:
            continue
        best = min(range(len(ours)), key=ours.__getitem__, default=None)
        if best is None or ours[best] > PRODUCTS.max_preferred_ratio * library:
            yield task, ChosenProduct(task.region.ops, LIBRARY, library, library)
        else:
            (schedule,) = contest[1 + best].schedules.values()
            yield task, ChosenProduct(task.region.ops, str(schedule), ours[best], library)


def _ways(task: _Task, solutions: Sequence[Solution], builder: Builder) -> list[Way]:
    """The library's way, and ours."""
    solver, hints = builder.solver, builder.hints
    made = [Way(partition(task.library, solver.price, hints, afar=solver.afar))]
    if solutions:
        together = task.region.with_ops([replace(op, kernel=0) for op in task.region.ops])
        cover = partition(together, solver.price, hints)
        if len(cover.steps) == 1 and isinstance(cover.steps[0], Kernel):
            for solution in solutions:
                kernel = replace(task.kernel)
                made.append(Way(replace(cover, steps=(kernel,)), {kernel: solution.schedule}))
    return made


def _varied(proposed: Sequence[Solution], count: int) -> list[Solution]:
    """So many of the fastest by the model, most of which load by descriptors where there are such: of the same tiles,
    these are mostly faster."""
    by = [s for s in proposed if s.schedule.memory.descriptors]
    without = [s for s in proposed if not s.schedule.memory.descriptors]
    few = max(count // PRODUCTS.timed_by_address, count - len(by))
    return [*by[: count - few], *without[:few]]
