"""Ways to compute a group of ops around a product of matrices: the library's, and kernels of our own under proposed
schedules, with the whole sum in one kernel or in parts that a second kernel merges."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.analysis.size_hints import SizeHints
from tilewright.errors import IllegalSchedule
from tilewright.ir.graph import Graph, Layout, Op, Value
from tilewright.ir.kernel import AS_THEY_LIE, LAID, PADDED, Kernel
from tilewright.library.library_graph import library_graph
from tilewright.library.select import select
from tilewright.partition.cover import partition
from tilewright.partition.layout import choose_layouts
from tilewright.partition.memo import task_of
from tilewright.partition.products import WHOLE, ProductGroup, ProductWay, find_products
from tilewright.rewrite.laid_windows import lay_windows
from tilewright.rewrite.normal.normalise import is_foldable
from tilewright.rewrite.padded_channels import pad_channels
from tilewright.rewrite.split.products import even_part_counts, split_product
from tilewright.schedule.product_table import MeasuredBlocks
from tilewright.schedule.scheduler import Solution, grid_points
from tilewright.schedule.solver import Solver
from tilewright.tuning.thresholds import GPU_MATMUL
from tilewright.tuning.timing_limits import PRODUCTS

from .build import KernelBuilder
from .replay_trial import ReplayContestant

Rewrite = Callable[[Graph], Graph]
"""Gives an equal graph."""


@dataclass(frozen=True, slots=True, eq=False)
class ProductTask:
    """Equal groups: the region of the first one as a graph of its own and as one kernel, and with the library's way to
    compute it."""

    key: str
    groups: list[ProductGroup]
    region: Graph
    library: Graph
    kernel: Kernel
    layouts: Mapping[Value, Layout]
    """Of all values of the graph."""
    frozen: frozenset[Value]
    """Operands of the first group that are frozen tensors, as those in their places are in all groups."""

    @property
    def is_fusion(self) -> bool:
        """See `ProductGroup`."""
        return self.groups[0].is_fusion

    def kernels(self, way: ProductWay) -> ProductKernels | None:
        """What computes it in some way."""
        return kernels_of(self.kernel, self.layouts, way, self.region.fresh_id())


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A schedule of the kernel that multiplies, in some way to compute a task; and modelled seconds of all kernels."""

    way: ProductWay
    solution: Solution
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class ProductKernels:
    """What computes a group in some way: ops that prepare operands, kernels in order of which the first multiplies,
    and how values between them lie."""

    prepare: tuple[Op, ...]
    kernels: tuple[Kernel, ...]
    between: Mapping[Value, Layout]

    @property
    def ops(self) -> list[tuple[Op, int]]:
        """All in order, each with the number of its kernel; -1 where partition may choose it."""
        copies = itertools.count(len(self.kernels))
        prepare = [(op, next(copies) if is_copy(op) else -1) for op in self.prepare]
        return prepare + [(op, n) for n, k in enumerate(self.kernels) for op in k.ops]

    def prepared_once(self, frozen: Container[Value]) -> tuple[Op, ...]:
        """Those of what prepares operands that run once for all, when constants are folded."""
        return tuple(op for op in self.prepare if is_foldable(op, frozen))


def is_copy(op: Op) -> bool:
    """Whether an op that prepares an operand shows another value in its own order: as a kernel it copies, without one
    it would be a view through which readers look."""
    return op.expr is not None and op.expr.is_view()


def kernels_of(
    kernel: Kernel, layouts: Mapping[Value, Layout], way: ProductWay, fresh: int
) -> ProductKernels | None:
    """A kernel in some way, with new values from number `fresh` on; None if there is no such way, or if two kernels
    would have to compute something."""
    if way.operands != AS_THEY_LIE:
        made = lay_windows(kernel, layouts, fresh) if way.operands == LAID else pad_channels(kernel, fresh)
        return None if made is None else ProductKernels(made.prepare, (made.kernel,), made.layouts)
    if way.parts == 1:
        return ProductKernels((), (kernel,), {})
    split = split_product(kernel, layouts, way.parts, fresh)
    if split is None or set(split.parts.ops) & set(split.merge.ops):
        return None
    return ProductKernels((), (split.parts, split.merge), {split.between: split.layout})


def proposals_of(task: ProductTask, solver: Solver) -> list[Proposal]:
    """All that are proposed for a task, the fastest by the model first."""
    try:
        whole = solver.proposals(task.kernel, task.layouts)
    except IllegalSchedule:
        return []
    found = [Proposal(WHOLE, s, s.seconds) for s in whole]
    if found:
        found += _in_parts(task, solver, grid_points(whole[0].schedule, solver.hints))
        for operands in (PADDED, LAID):
            found += proposals_of_way(task, ProductWay(operands=operands), solver, PRODUCTS.max_timed)
    return sorted(found, key=lambda p: p.seconds)


def _in_parts(task: ProductTask, solver: Solver, points: int) -> Iterator[Proposal]:
    """Those with the sum in parts, where so few grid points leave cores idle."""
    cores = solver.target.cores
    fitting = [
        n
        for n in even_part_counts(task.kernel, PRODUCTS.max_parts)
        if points * n <= PRODUCTS.max_points_per_core * cores
    ]
    for count in fitting[-PRODUCTS.tried_part_counts :] if points < cores else ():
        yield from proposals_of_way(task, ProductWay(parts=count), solver, PRODUCTS.max_of_parts)


def proposals_of_way(
    task: ProductTask, way: ProductWay, solver: Solver, most: int | None = None,
    blocks: MeasuredBlocks | None = None,
) -> Iterator[Proposal]:  # fmt: skip
    """Those of one way, the fastest by the model first, so many at `most`; with `blocks`, those that have them, or
    them with other stages."""
    found = task.kernels(way)
    if found is None:
        return
    layouts = {**task.layouts, **found.between}
    try:
        beside = beside_product(found, layouts, solver, task.frozen)
        proposed = solver.proposals(found.kernels[0], layouts, blocks)
    except IllegalSchedule:
        return
    for s in proposed[:most]:
        yield Proposal(way, s, s.seconds + beside)


def beside_product(
    found: ProductKernels, layouts: Mapping[Value, Layout], solver: Solver, frozen: Container[Value] = ()
) -> float:
    """Modelled seconds of all kernels of a way but the one that multiplies. Raises IllegalSchedule if one has no legal
    schedule."""
    rest, prepared_once = found.kernels[1:], found.prepared_once(frozen)
    others = [*(Kernel((op,), op.outputs) for op in found.prepare if op not in prepared_once), *rest]
    return sum(solver.price(k, layouts) for k in others) + GPU_MATMUL.merge_seconds * len(rest)


def library_way(task: ProductTask, builder: KernelBuilder) -> ReplayContestant:
    """With calls for products."""
    return ReplayContestant(
        partition(task.library, builder.solver.price, builder.hints, afar=builder.solver.afar)
    )


def ways_of(
    task: ProductTask, proposals: Sequence[Proposal], builder: KernelBuilder
) -> Iterator[tuple[Proposal, ReplayContestant]]:
    """Ours, of those proposals that are the kernels that they should be."""
    solver, hints = builder.solver, builder.hints
    kernels_by_way = {way: task.kernels(way) for way in dict.fromkeys(p.way for p in proposals)}
    for proposal in proposals:
        made = kernels_by_way[proposal.way]
        if made is None:
            continue
        prepared_once = made.prepared_once(task.frozen)
        cover = partition(_as_kernels(task, made, prepared_once), solver.price, hints)
        kernels = [step for step in cover.steps if isinstance(step, Kernel)]
        first = next((k for k in kernels if set(k.outputs) >= set(made.kernels[0].outputs)), None)
        expected = len(made.prepare) - len(prepared_once) + len(made.kernels)
        if first is not None and len(kernels) == len(cover.steps) == expected:
            yield proposal, ReplayContestant(cover, {first: proposal.solution.schedule}, prepared_once)


def _as_kernels(task: ProductTask, made: ProductKernels, prepared_once: Sequence[Op]) -> Graph:
    """The region with numbers of kernels, which is given what is `prepared_once`."""
    ops = tuple(replace(op, kernel=n) for op, n in made.ops if op not in prepared_once)
    inputs = (*task.region.inputs, *(v for op in prepared_once for v in op.outputs))
    return replace(task.region, inputs=inputs, ops=ops, layouts={**task.region.layouts, **made.between})


def pick_varied(proposed: Sequence[Proposal], count: int) -> list[Proposal]:
    """So many of the fastest by the model, first one of each tile: of what tiles do the model knows less than of how
    many warps and loads under way they want."""
    ranks: Counter[Hashable] = Counter()
    turns: list[tuple[int, int, Proposal]] = []
    for place, p in enumerate(proposed):
        tile = (p.way, *((c.axis, c.tile) for c in p.solution.schedule.tiling.classes))
        turns.append((ranks[tile], place, p))
        ranks[tile] += 1
    return [p for *_, p in sorted(turns, key=lambda t: t[:2])[:count]]


def tasks_of(graph: Graph, improve: Rewrite, hints: SizeHints) -> list[ProductTask]:
    """The groups, those together that are equal; what is not known of sizes is weighed at `hints`."""
    selected = select(graph)
    if all(op.call is None for op in selected.ops):
        return []
    graph = replace(graph, layouts=choose_layouts(selected))  # with those of what calls make
    found: dict[str, list[ProductGroup]] = {}
    for group in find_products(graph, hints):
        frozen = tuple(v in graph.constants for v in group.region.inputs)
        found.setdefault(task_of(group.region.graph(graph), frozen), []).append(group)
    made: list[ProductTask] = []
    for key, alike in found.items():
        region = alike[0].region
        alone, origins = region.graph(graph), {op.origin for op in alike[0].products}
        library = improve(library_graph(alone, origins, graph, selected))
        kernel = Kernel(region.ops, region.outputs)
        frozen = frozenset(v for v in region.inputs if v in graph.constants)
        made.append(ProductTask(key, alike, alone, library, kernel, graph.layouts, frozen))
    return made
