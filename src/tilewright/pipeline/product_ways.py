"""Ways to compute a group of ops around a product of matrices: the library's, and kernels of our own under proposed
schedules, with the whole sum in one kernel or in parts that a second kernel merges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.analysis.size_hints import SizeHints
from tilewright.errors import IllegalSchedule
from tilewright.ir.graph import Graph, Layout, Value
from tilewright.ir.kernel import Kernel
from tilewright.library.library_graph import library_graph
from tilewright.library.select import select
from tilewright.partition.cover import partition
from tilewright.partition.layout import choose_layouts
from tilewright.partition.memo import task_of
from tilewright.partition.products import ProductGroup, find_products
from tilewright.rewrite.split.products import SplitProduct, even_part_counts, split_product
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

    @property
    def is_fusion(self) -> bool:
        """See `ProductGroup`."""
        return self.groups[0].is_fusion

    def in_parts(self, count: int) -> SplitProduct | None:
        """The kernel as two, of so many parts."""
        return split_apart(self.kernel, self.layouts, count, self.region.fresh_id())


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A schedule of a task's kernel, or of the one that sums so many `parts`; and modelled seconds of all kernels."""

    parts: int
    solution: Solution
    seconds: float


def split_apart(
    kernel: Kernel, layouts: Mapping[Value, Layout], count: int, fresh: int
) -> SplitProduct | None:
    """The kernel as two with the sum in so many parts; none where both would have to compute something."""
    found = split_product(kernel, layouts, count, fresh)
    return found if found is not None and not set(found.parts.ops) & set(found.merge.ops) else None


def proposals_of(task: ProductTask, solver: Solver) -> list[Proposal]:
    """All that are proposed for a task, the fastest by the model first."""
    try:
        whole = solver.proposals(task.kernel, task.layouts)
    except IllegalSchedule:
        return []
    found = [Proposal(1, s, s.seconds) for s in whole]
    if found:
        found += _in_parts(task, solver, grid_points(whole[0].schedule, solver.hints))
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
        split = task.in_parts(count)
        if split is None:
            continue
        layouts = {**task.layouts, split.between: split.layout}
        try:
            merge = solver.price(split.merge, layouts)
            proposed = solver.proposals(split.parts, layouts)
        except IllegalSchedule:
            continue
        for s in proposed[: PRODUCTS.max_of_parts]:
            yield Proposal(count, s, s.seconds + merge + GPU_MATMUL.merge_seconds)


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
    for proposal in proposals:
        graph = _as_kernels(task, proposal.parts)
        cover = partition(graph, solver.price, hints)
        kernels = [step for step in cover.steps if isinstance(step, Kernel)]
        if len(kernels) == len(cover.steps) == (1 if proposal.parts == 1 else 2):
            yield proposal, ReplayContestant(cover, {kernels[0]: proposal.solution.schedule})


def _as_kernels(task: ProductTask, parts: int) -> Graph:
    """The region with numbers of kernels."""
    split = task.in_parts(parts)
    if split is None:
        return task.region.with_ops([replace(op, kernel=0) for op in task.region.ops])
    ops = [replace(op, kernel=n) for n, k in enumerate((split.parts, split.merge)) for op in k.ops]
    layouts = {**task.region.layouts, split.between: split.layout}
    return replace(task.region, ops=tuple(ops), layouts=layouts)


def pick_varied(proposed: Sequence[Proposal], count: int) -> list[Proposal]:
    """So many of the fastest by the model, first one of each tile: of what tiles do the model knows less than of how
    many warps and loads under way they want."""
    ranks: Counter[Hashable] = Counter()
    turns: list[tuple[int, int, Proposal]] = []
    for place, p in enumerate(proposed):
        tile = (p.parts, *((c.axis, c.tile) for c in p.solution.schedule.tiling.classes))
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
        found.setdefault(task_of(group.region.graph(graph)), []).append(group)
    made: list[ProductTask] = []
    for key, alike in found.items():
        region = alike[0].region
        alone, origins = region.graph(graph), {op.origin for op in alike[0].products}
        library = improve(library_graph(alone, origins, graph, selected))
        made.append(
            ProductTask(key, alike, alone, library, Kernel(region.ops, region.outputs), graph.layouts)
        )
    return made
