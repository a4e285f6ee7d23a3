"""Loops of a graph: the body of each is compiled as a graph of its own, in as many forms as pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from tilewright.ir.graph import Graph, Loop
from tilewright.options import Options
from tilewright.partition.loops.call import distinct, with_bodies
from tilewright.partition.loops.rows import part_of, parts_for, rows_of
from tilewright.partition.loops.steps import steps_together, unroll_steps
from tilewright.plan.reports import KernelReport
from tilewright.runtime.cpu.kernels import NativeUnit
from tilewright.runtime.cuda.kernels import CudaUnit
from tilewright.runtime.loops.body import LoopBody
from tilewright.runtime.loops.call import LoopRunner
from tilewright.runtime.loops.cuda_graph import recorder
from tilewright.runtime.loops.native import loop_function
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.store.cache import Store, default_root
from tilewright.target import Target

from .place import Place, machine_of


class Made(Protocol):
    """What compilation made of a body."""

    @property
    def unit(self) -> NativeUnit | CudaUnit | None:
        """Its kernels, built."""
        ...

    @property
    def kernels(self) -> Sequence[KernelReport]:
        """Its launches."""
        ...


M = TypeVar("M", bound=Made)


@dataclass(frozen=True, slots=True, eq=False)
class Bodies(Generic[M]):
    """What the `bodies` of loops became, and `more` forms of the same that run beside them."""

    bodies: list[M] = field(default_factory=list)
    more: list[M] = field(default_factory=list)


def compile_loops(
    graph: Graph, made_of: Callable[[Graph], tuple[M, Executable]], options: Options, place: Place
) -> tuple[Graph, Bodies[M]]:
    """The graph with each loop as a call that runs its body, which `made_of` compiles, and how that was done."""
    found = _Looping(made_of, options, place, Bodies())
    dense = place.device == "cpu"

    def compiled(loop: Loop, meaning: Callable[..., object]) -> LoopRunner:
        runner = _on_cpu if dense else _on_gpu
        return runner(loop, meaning if options.verify is True else None, found)

    return with_bodies(graph, compiled, dense_slices=dense), found.bodies


@dataclass(frozen=True, slots=True, eq=False)
class _Looping(Generic[M]):
    """What compiles bodies, for what, and what they became so far."""

    made_of: Callable[[Graph], tuple[M, Executable]]
    options: Options
    place: Place
    bodies: Bodies[M]

    @property
    def target(self) -> Target:
        """The machine."""
        return machine_of(self.place, self.options)

    def step(self, loop: Loop) -> tuple[Graph, tuple[int, ...], M, Executable]:
        """The body of a loop with each result once, which of these each result is, and what it became."""
        body, order = distinct(loop.body)
        made, runs = self.made_of(body)
        self.bodies.bodies.append(made)
        return body, order, made, runs


def _on_cpu(loop: Loop, meaning: Callable[..., object] | None, found: _Looping[M]) -> LoopRunner:
    """Without Python between steps; where each row goes its own way, in parts of the rows."""
    body, order, made, runs = found.step(loop)
    native = loop_function(Store(default_root(found.options)), found.options)
    rows = rows_of(loop, body)
    threads = abs(made.unit.threads()) if isinstance(made.unit, NativeUnit) else 1
    parts = parts_for(loop, body, rows, threads, found.target) if rows is not None else 1
    if rows is None or parts < 2:
        return LoopRunner(loop, order, runs, native, meaning=meaning)
    _, part_runs = found.made_of(part_of(loop, body, rows // parts))
    part = LoopRunner(loop, order, part_runs, native)
    return LoopRunner(loop, order, runs, native, meaning=meaning, rows=(parts, rows // parts, part))


def _on_gpu(loop: Loop, meaning: Callable[..., object] | None, found: _Looping[M]) -> LoopRunner:
    """As graphs of some steps; with a body that does a few at once, where that takes fewer kernels than one by one."""
    _, order, made, runs = found.step(loop)
    together: LoopBody | None = None
    unit = made.unit
    count = 1 if found.options.verify is True else steps_together(loop, found.target)
    if count > 1:
        body, each = distinct(unroll_steps(loop, count))
        more, run_several = found.made_of(body)
        if len(more.kernels) < count * len(made.kernels):
            found.bodies.more.append(more)
            unit = more.unit
            together = LoopBody(each, run_several, count)
    records = recorder(made.unit or unit, found.place.ordinal)
    return LoopRunner(loop, order, runs, recorder=records, meaning=meaning, together=together)
