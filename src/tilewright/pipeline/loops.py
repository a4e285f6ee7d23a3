"""Loops of a graph: the body of each is compiled as a graph of its own, in as many forms as pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from tilewright.ir.graph import Graph, Loop
from tilewright.options import Options
from tilewright.partition.loops.call import distinct, with_bodies
from tilewright.plan.reports import KernelReport
from tilewright.runtime.loops.call import LoopRunner
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.plan.launch import BuiltUnit
from tilewright.target import Target


class CompiledBody(Protocol):
    """What compilation made of a body."""

    @property
    def unit(self) -> BuiltUnit | None:
        """Its kernels, built."""
        ...

    @property
    def kernels(self) -> Sequence[KernelReport]:
        """Its launches."""
        ...


M = TypeVar("M", bound=CompiledBody)


@dataclass(frozen=True, slots=True, eq=False)
class Bodies(Generic[M]):
    """What the `bodies` of loops became, and `more` forms of the same that run beside them."""

    bodies: list[M] = field(default_factory=list)
    more: list[M] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Looping(Generic[M]):
    """What compiles bodies, for which machine (device number `ordinal` of its kind), and what they became so far."""

    made_of: Callable[[Graph], tuple[M, Executable]]
    options: Options
    target: Target
    ordinal: int
    bodies: Bodies[M]

    def step(self, loop: Loop) -> tuple[Graph, tuple[int, ...], M, Executable]:
        """The body of a loop with each result once, which of these each result is, and what it became."""
        body, order = distinct(loop.body)
        made, runs = self.made_of(body)
        self.bodies.bodies.append(made)
        return body, order, made, runs


class LoopBackend(Protocol):
    """What runs loops on one kind of device."""

    @property
    def dense_slices(self) -> bool:
        """Whether steps read their slices where they lie only if these are dense."""
        ...

    def loop_runner(self, loop: Loop, meaning: Callable[..., object] | None, found: Looping[M]) -> LoopRunner:
        """What runs a loop, whose body `found` compiles. With `meaning` each run is compared with it."""
        ...


def compile_loops(graph: Graph, backend: LoopBackend, found: Looping[M]) -> tuple[Graph, Bodies[M]]:
    """The graph with each loop as a call that runs its body, which `found` compiles, and how that was done."""

    def compiled(loop: Loop, meaning: Callable[..., object]) -> LoopRunner:
        return backend.loop_runner(loop, meaning if found.options.verify is True else None, found)

    return with_bodies(graph, compiled, dense_slices=backend.dense_slices), found.bodies
