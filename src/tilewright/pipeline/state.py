"""What a graph is compiled for, and how far it has come: what each phase is given, and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.graph import Graph, Share
from tilewright.ir.kernel import Cover
from tilewright.options import Options
from tilewright.partition.choose_kernels import ChosenRegions
from tilewright.partition.products import ChosenProducts
from tilewright.plan import Plan
from tilewright.plan.coverage import Coverage, coverage_of
from tilewright.plan.reports import CallReport, KernelReport
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.plan.launch import BuiltUnit
from tilewright.runtime.store.decisions import Decisions
from tilewright.runtime.store.tuned import Tuned
from tilewright.schedule.solver import Solver
from tilewright.target import Target

from .build import Kernels
from .loops import Bodies
from .place import DevicePlace
from .timed.joined_cover import JoinedCover
from .trace import PhaseRecorder


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """What the phases behind capture hand to the executable."""

    cover: Cover
    plan: Plan
    unit: BuiltUnit | None = None
    kernels: tuple[KernelReport, ...] = ()
    calls: tuple[CallReport, ...] = ()
    bodies: tuple[PlannedGraph, ...] = ()
    """Of loops."""
    machine: Target | None = None
    """What kernels were generated for."""

    def beside(self, found: Bodies[PlannedGraph]) -> PlannedGraph:
        """The same with what the bodies of loops became."""
        kernels = (*self.kernels, *(k for b in (*found.bodies, *found.more) for k in b.kernels))
        calls = (*self.calls, *(c for b in found.bodies for c in b.calls))
        return replace(self, kernels=kernels, calls=calls, bodies=tuple(found.bodies))

    @property
    def coverage(self) -> Coverage:
        """Of the graph and of the bodies of its loops."""
        covered = coverage_of(self.cover)
        for body in self.bodies:
            covered = covered.around(body.coverage)
        return covered


@dataclass(frozen=True, slots=True, eq=False)
class CapturedProgram:
    """What the phases start from, for whoever wants to run them again."""

    graph: Graph
    shares: tuple[Share, ...]
    traced: SizeHints
    options: Options


@dataclass(frozen=True, slots=True, eq=False)
class CompileRequest:
    """What is asked for beside the graph: how, where, whose memory its outputs may be (`shares`), the sizes that it was
    `traced` with. A caller who is `trusted` checks sizes and types on each call. A graph that is `repeated` runs step
    by step, many times; `compile_body` makes such a one of the body of a loop. Products with `refused` keys of
    tasks are the library's: kernels of them did not build."""

    recorder: PhaseRecorder
    options: Options
    place: DevicePlace
    shares: tuple[Share, ...]
    traced: SizeHints
    compile_body: Callable[[CompileRequest, Graph], tuple[PlannedGraph, Executable]]
    trusted: bool = False
    repeated: bool = False
    refused: frozenset[str] = frozenset()


def _no_bodies() -> Bodies[PlannedGraph]:
    return Bodies()


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A graph on its way to code that runs. The `solver` decides at typical sizes, `grown` at those at which the
    kernels of whole regions are chosen."""

    request: CompileRequest
    solver: Solver
    grown: Solver
    decisions: Decisions
    captured: Graph
    graph: Graph
    """The captured one, as the phases so far have rewritten it."""
    regions: ChosenRegions | None = None
    products: ChosenProducts | None = None
    bodies: Bodies[PlannedGraph] = field(default_factory=_no_bodies)
    cover: Cover | None = None
    joined: JoinedCover | None = None
    """Which kernels a clock joined, and the cover before; None where it joined none."""
    kernels: Kernels | None = None
    plan: Plan | None = None
    tuned: Tuned = field(default_factory=Tuned)

    @property
    def target(self) -> Target:
        """The machine."""
        return self.solver.target

    def with_graph(self, graph: Graph) -> State:
        """With the graph rewritten."""
        return replace(self, graph=graph)
