"""Products of matrices with what stands behind them: kernels of our own where a clock finds them faster than the
library's products and kernels for the rest."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import torch
from torch import Tensor

from tilewright.errors import IllegalSchedule, TilewrightError
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.kernel import Cover, Kernel
from tilewright.ir.sizes import dims
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
    read_ops,
)
from tilewright.plan import build_plan
from tilewright.rewrite.normal.normalise import normalise
from tilewright.runtime.plan.executable import Argument
from tilewright.runtime.plan.tensors import drawn, torch_dtype
from tilewright.schedule.scheduler import Solution
from tilewright.schedule.solver import Solver
from tilewright.target import MemoryKind
from tilewright.tuning.input_limits import MODELS
from tilewright.tuning.search_limits import PRODUCTS

from .build import Builder, Clock, Kernels, Refused, number_kernels
from .executables import executable
from .state import Made

LOG = logging.getLogger("tilewright")
Run = Callable[[list[Argument]], object]


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """Equal groups: the region of the first one as a graph of its own, with the library's way to compute it, and the
    ways to schedule it as one kernel."""

    key: str
    groups: list[ProductGroup]
    region: Graph
    library: Graph
    kernel: Kernel
    proposed: tuple[Solution, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """A contestant of a task: its cover, and its solution if it is a kernel of our own."""

    task: _Task
    cover: Cover
    solution: Solution | None = None


def choose_products(graph: Graph, builder: Builder, device: str, seconds: float) -> ChosenProducts:
    """The graph with kernels for those groups of `find_products` for which a kernel is measured as faster at `device`.
    About so many `seconds` go into building and timing. Where nothing can be timed, nothing is chosen."""
    clock = builder.backend.replay_clock(device)
    if clock is None or seconds <= 0:
        return ChosenProducts(graph)
    solver, cache = builder.solver, builder.decisions
    normal = normalise(graph)
    tasks = _tasks(normal, find_products(normal), solver)
    if not tasks:
        return ChosenProducts(graph)
    where = builder.backend.timing_key(device, solver.options)
    known = {t.key: found for t in tasks if (found := _known(cache, t, where)) is not None}
    left = [t for t in tasks if t.key not in known]
    trial = _Trial(builder, device, clock)
    for task, decided in trial.decided(left, seconds):
        known[task.key] = decided
        LOG.info("%s", decided)
        cache.put(_place(task, where), [decided.schedule, decided.seconds, decided.library])
    return _numbered(normal, graph, tasks, known, solver)


def _numbered(
    normal: Graph, graph: Graph, tasks: Sequence[_Task], known: dict[str, ChosenProduct], solver: Solver
) -> ChosenProducts:
    """The graph with the numbers of kernels, of which the solver knows the schedules from now on."""
    number: dict[Op, int] = {}
    fresh = 1 + max((op.kernel for op in normal.ops), default=-1)
    for task in tasks:
        decided = known.get(task.key)
        solution = _solution(task, decided)
        if solution is None:
            continue
        for group in task.groups:
            number |= dict.fromkeys(group.region.ops, fresh)
            fresh += 1
        solver.prefer(
            Kernel(tuple(replace(op, kernel=0) for op in task.kernel.ops), task.kernel.outputs), solution
        )
    chosen = tuple(known[t.key] for t in tasks if t.key in known)
    if not number:
        return ChosenProducts(graph, chosen)
    ops = [replace(op, kernel=number.get(op, op.kernel)) for op in normal.ops]
    return ChosenProducts(normal.with_ops(ops), chosen)


def _solution(task: _Task, decided: ChosenProduct | None) -> Solution | None:
    """The proposal that was decided on."""
    if decided is None or decided.schedule == LIBRARY:
        return None
    found = next((s for s in task.proposed if str(s.schedule) == decided.schedule), None)
    return None if found is None else replace(found, seconds=decided.seconds)


def _place(task: _Task, where: str) -> str:
    return f"product\n{task.key}\n{where}"


def _known(cache: DecisionCache, task: _Task, where: str) -> ChosenProduct | None:
    """What an earlier process decided."""
    match cache.get(_place(task, where)):
        case [str(schedule), float(seconds), float(library)]:
            return ChosenProduct(task.region.ops, schedule, seconds, library)
        case _:
            return None


def _tasks(graph: Graph, groups: Sequence[ProductGroup], solver: Solver) -> list[_Task]:
    """The groups that have proposals, those together that are equal; the largest first."""
    if not groups:
        return []
    selected = select(graph)
    graph = replace(graph, layouts=choose_layouts(selected))  # with those of what calls make
    found: dict[str, list[ProductGroup]] = {}
    for group in groups:
        found.setdefault(task_of(group.region.graph(graph)), []).append(group)
    made: list[_Task] = []
    for key, alike in found.items():
        region = alike[0].region
        kernel = Kernel(region.ops, region.outputs)
        try:
            proposed = solver.proposals(kernel, graph.layouts)
        except IllegalSchedule:
            continue
        if proposed:
            library = _library_graph(alike[0], graph, selected)
            made.append(_Task(key, alike, region.graph(graph), library, kernel, proposed))
    return sorted(made, key=lambda t: (not t.groups[0].is_more, -t.proposed[0].seconds * len(t.groups)))


def _library_graph(group: ProductGroup, graph: Graph, selected: Graph) -> Graph:
    """What makes a group's result where its products are calls: the ops of `selected` back to what others make."""
    region = group.region
    origins, own = {op.origin for op in group.products}, set(region.ops)
    views = set(graph.ops) - read_ops(graph)
    producer = selected.producer()

    def is_part(op: Op) -> bool:
        return op in own or op in views or (op.call is not None and op.origin in origins)

    ops: dict[Op, None] = {}
    inputs: dict[Value, None] = {}
    todo: list[tuple[Value, bool]] = [(v, False) for v in region.outputs]
    while todo:
        v, ready = todo.pop()
        op = producer.get(v)
        if op is None or v in region.inputs or not is_part(op):
            inputs[v] = None
        elif ready:
            ops[op] = None
        elif op not in ops:
            todo += [(v, True), *((x, False) for x in op.inputs)]
    layouts = {v: graph.layouts[v] for v in (*inputs, *region.outputs) if v in graph.layouts}
    return normalise(Graph(tuple(inputs), tuple(ops), region.outputs, graph.origins, layouts))


@dataclass(slots=True)
class _Trial:
    """Builds and times ways to compute tasks."""

    builder: Builder
    device: str
    clock: Clock

    def decided(self, tasks: Sequence[_Task], seconds: float) -> list[tuple[_Task, ChosenProduct]]:
        """What the clock says of each task; nothing of those for which there is no time."""
        builds = int(seconds * _cores() * PRODUCTS.builds_per_core_second)
        fitting = [t for t in tasks if 2 * self._bytes(t) <= MODELS.max_timed_region_bytes][:builds]
        if not fitting:
            return []
        each = min(PRODUCTS.max_timed, builds // len(fitting))
        try:
            with torch.no_grad():
                return list(self._timed([way for t in fitting for way in self._ways(t, each)]))
        except (TilewrightError, RuntimeError, MemoryError) as refused:
            LOG.info("products are not timed: %s", refused)
        except Exception:
            LOG.exception("timing products failed in a way that nobody expects; they are the library's")
        return []

    def _bytes(self, task: _Task) -> int:
        values = {*_operands(task), *(v for v in task.region.outputs if isinstance(v, Value))}
        return sum(self.builder.hints.estimate(v.numel) * v.dtype.bytes for v in values)

    def _ways(self, task: _Task, count: int) -> Iterator[_Way]:
        """The library's way first, then as many of ours as there is time for."""
        solver, hints = self.builder.solver, self.builder.hints
        yield _Way(task, partition(task.library, solver.price, hints, afar=solver.afar))
        whole = partition(
            task.region.with_ops([replace(op, kernel=0) for op in task.region.ops]), solver.price, hints
        )
        if all(isinstance(step, Kernel) for step in whole.steps) and len(whole.steps) == 1:
            for solution in _varied(task.proposed, count):
                yield _Way(task, replace(whole, steps=(replace(task.kernel),)), solution)

    def _timed(self, ways: Sequence[_Way]) -> Iterator[tuple[_Task, ChosenProduct]]:
        by_task: dict[str, list[tuple[_Way, Run]]] = {}
        for way, run in self._runs(ways):
            by_task.setdefault(way.task.key, []).append((way, run))
        for found in by_task.values():
            task = found[0][0].task
            sets = self._sets(task)
            times = [(self._seconds(way, run, sets), way.solution) for way, run in found]
            for seconds, solution in times:
                told = "the library's products" if solution is None else solution.schedule
                LOG.debug("%.3g us, %s", seconds * 1e6, told)
            library = next((t for t, solution in times if solution is None), None)
            if library is None:
                continue
            best, solution = min(times, key=lambda x: x[0])
            if solution is None or best > PRODUCTS.max_preferred_ratio * library:
                yield task, ChosenProduct(task.region.ops, LIBRARY, library, library)
            else:
                yield task, ChosenProduct(task.region.ops, str(solution.schedule), best, library)

    def _seconds(self, way: _Way, run: Run, sets: Sequence[Mapping[Value, Tensor]]) -> float:
        given = [v for v in way.cover.graph.inputs if isinstance(v, Value)]
        turns = cycle([[tensors[v] for v in given] for tensors in sets])
        return self.clock(lambda: run([*next(turns)]))

    def _runs(self, ways: Sequence[_Way]) -> list[tuple[_Way, Run]]:
        """What runs each way that builds."""
        left = list(ways)
        while True:
            given = {
                k: w.solution.schedule for w in left if w.solution is not None for k in _kernels(w.cover)
            }
            try:
                built = replace(self.builder, given=given).built([w.cover for w in left], (), once=True)
            except Refused as refused:
                kept = [w for w in left if not set(refused.kernels) & set(_kernels(w.cover))]
                if len(kept) == len(left):
                    raise
                LOG.info("%d schedules do not build: %s", len(left) - len(kept), refused)
                left = kept
                continue
            return list(self._bound(left, built))

    def _bound(self, ways: Sequence[_Way], built: Kernels) -> Iterator[tuple[_Way, Run]]:
        options = self.builder.solver.options.replace(cuda_graphs=False, verify=False)
        numbers = iter(built.numbers)
        for way in ways:
            kernels = number_kernels(way.cover, [next(numbers) for _ in _kernels(way.cover)])
            plan = build_plan(way.cover, kernels).on(self.device)
            yield way, executable(Made(way.cover, plan, built.unit), options)

    def _sets(self, task: _Task) -> list[dict[Value, Tensor]]:
        """Sets of operands, so many that those of a run have left the last cache when their turn comes again."""
        cache = self.builder.solver.target.level(MemoryKind.L2)
        size = max(1, self._bytes(task))
        count = 1 if cache is None else 1 + -(-2 * cache.capacity // size)
        count = max(1, min(count, PRODUCTS.max_sets, MODELS.max_timed_region_bytes // size))
        return [{v: self._tensor(task, v) for v in _operands(task)} for _ in range(count)]

    def _tensor(self, task: _Task, v: Value) -> Tensor:
        layout = task.library.layouts.get(v) or task.region.layouts.get(v)
        strides = layout.strides if layout is not None else dims.dense_strides(v.shape)
        shape, laid = (list(map(self.builder.hints.estimate, x)) for x in (v.shape, strides))
        t = torch.empty_strided(shape, laid, dtype=torch_dtype(v.dtype), device=self.device)
        return drawn(t) if v.dtype.is_float else t.zero_()


def _varied(proposed: Sequence[Solution], count: int) -> list[Solution]:
    """So many of the fastest by the model, most of which load by descriptors where there are such: of the same tiles,
    these are mostly faster."""
    by = [s for s in proposed if s.schedule.memory.descriptors]
    without = [s for s in proposed if not s.schedule.memory.descriptors]
    few = max(count // PRODUCTS.timed_by_address, count - len(by))
    return [*by[: count - few], *without[:few]]


def _operands(task: _Task) -> list[Value]:
    """What either way reads."""
    return list(
        dict.fromkeys(v for g in (task.library, task.region) for v in g.inputs if isinstance(v, Value))
    )


def _kernels(cover: Cover) -> list[Kernel]:
    return [step for step in cover.steps if isinstance(step, Kernel)]


def _cores() -> int:
    """Cores that build."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
