"""Kernels of a function after its reductions are split."""

from __future__ import annotations

from tests.support.corpus import Case
from tests.support.one_kernel import capture, sizes_of

from tilewright.analysis.size_hints import NO_HINTS, SizeHints
from tilewright.ir.graph import Graph
from tilewright.ir.kernel import Kernel, Scheduled
from tilewright.options import Options
from tilewright.partition.cover import partition
from tilewright.rewrite.split.moments import split_moments
from tilewright.rewrite.split.reduction import split_reductions
from tilewright.schedule.solver import Solver
from tilewright.target import preset

HOPPER = preset("sm_90")


def cut(graph: Graph) -> Graph:
    """With every pair in parts, whatever it costs."""

    def price(kernel: Kernel, layouts: object) -> float:
        return (
            1.0 if any(op.name.endswith("_part") or "moments" in str(op.expr) for op in kernel.ops) else 9.0
        )

    return split_moments(graph, price, lambda *_: 90.0, 1 << 20, NO_HINTS)[0]


def kernels(case: Case, dynamic: bool = False) -> tuple[Graph, list[Scheduled]]:
    """What the compiler makes of a case for a GPU."""
    graph = capture(case, dynamic)
    hints = SizeHints(sizes_of(graph, [t.numpy() for t in case.inputs()]) if dynamic else {})
    solver = Solver(HOPPER, Options(), hints=hints)
    split = split_reductions(graph, solver.price, HOPPER, solver.scheduler.splits, hints)
    cover = partition(split, solver.price, hints)
    return graph, [solver.solve(s, cover.layouts) for s in cover.steps if isinstance(s, Kernel)]
