"""From a function to its cover, schedules and tile-graph, on a machine that is only data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.corpus import Case
from tests.support.one_kernel import capture

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.kernel import Cover, Kernel, Scheduled
from tilewright.options import Options
from tilewright.partition.cover import partition
from tilewright.plan.reports import calls_of, report_of
from tilewright.schedule.solver import Solver
from tilewright.target import PRESETS, MemoryKind
from tilewright.tilegraph.connect import connect
from tilewright.tilegraph.edge import Edge, TileGraph

SOLVER = Solver(PRESETS["x86-64-v4"], Options())


@dataclass(frozen=True)
class Covered:
    """A cover, its schedules, and what is read from them."""

    cover: Cover
    schedules: tuple[Scheduled, ...]
    tiles: TileGraph

    @property
    def kernel(self) -> Kernel:
        """The only kernel."""
        (only,) = self.schedules
        return only.kernel

    def op(self, name: str) -> Op:
        """The only op of a name."""
        (only,) = {node.op for node in self.tiles.ops if node.op.name == name}
        return only

    def level(self, name: str) -> MemoryKind:
        """The one level of all edges of an op's result."""
        (only,) = {e.level for e in self.of(name)}
        return only

    def of(self, name: str) -> list[Edge]:
        """The edges of the results of ops of a name."""
        return [e for e in self.tiles.edges if e.producer is not None and e.producer.op.name == name]


def scheduled(cover: Cover) -> tuple[Scheduled, ...]:
    """The schedules of a cover's kernels."""
    return tuple(SOLVER.solve(k, cover.layouts) for k in cover.steps if isinstance(k, Kernel))


def covered(graph: Graph) -> Covered:
    """What partition makes of a graph."""
    cover = partition(graph, SOLVER.price, NO_HINTS)
    schedules = scheduled(cover)
    return Covered(cover, schedules, connect(cover, schedules))


def case(run: object, *shapes: Sequence[int], dynamic: bool = False) -> Covered:
    """What partition makes of a function of tensors; the first dim of the first one may be a symbol."""
    made = Case("case", run, tuple(map(tuple, shapes)), ({0: "n"},) if dynamic else ())  # type: ignore[arg-type]
    return covered(capture(made, dynamic))


def reported(cover: Cover, sizes: dict[str, int]) -> int:
    """The bytes that reports count for all kernels and calls of a cover."""
    kernels = [
        report_of(k, cover, 0, sizes, lambda: SOLVER.solve(k, cover.layouts), lambda program: "")  # noqa: B023
        for k in cover.steps
        if isinstance(k, Kernel)
    ]
    reports = (*kernels, *calls_of(cover, cover.graph.ops, sizes, lambda step, ops: None))
    counts = [r.bytes_moved for r in reports]
    assert None not in counts
    return sum(n for n in counts if n is not None)


def result(covered: Covered) -> Value:
    """The graph's one output."""
    (only,) = covered.cover.graph.outputs
    assert isinstance(only, Value)
    return only
