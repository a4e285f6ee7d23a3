"""A model from an artifact, as a compiled model calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewright.artifact.text.program import Interface
from tilewright.artifact.text.reports import SavedReports
from tilewright.capture.described import Signature
from tilewright.errors import InputError
from tilewright.pipeline.trace import PhaseRecorder, Trace
from tilewright.plan.coverage import Coverage, total
from tilewright.runtime.call.fast_path import Short
from tilewright.runtime.call.kept_weights import NamedWeight
from tilewright.runtime.plan.call_form import ProgramCall
from tilewright.runtime.plan.clocked import StepClock, clocked
from tilewright.runtime.plan.executable import Executable
from tilewright.target import Target

if TYPE_CHECKING:
    from tilewright.pipeline.state import CapturedProgram

    from .eager import EagerProgram


@dataclass(eq=False)
class LoadedGraph:
    """One graph that can run. `tell` reads what is told of it, when somebody asks."""

    interface: Interface
    call: ProgramCall
    tell: Callable[[], SavedReports]
    captured: Callable[[], CapturedProgram]
    """Reads the graph that it was compiled from; raises ArtifactError where it is not kept."""
    machine: Target | None
    """What its kernels were made for; None: it has none."""
    recorder: PhaseRecorder = field(default_factory=PhaseRecorder)
    """Of what loading it took, or building it again."""
    kind: str = "inference"
    cuda_graphs: tuple[str, ...] = ()

    @cached_property
    def told(self) -> SavedReports:
        """Coverage, kernels and calls."""
        return self.tell()

    @property
    def trace(self) -> Trace:
        """Every phase."""
        return self.recorder.trace

    def clocked(self) -> StepClock:
        """From now on, a clock around each step."""
        assert isinstance(self.call.executable, Executable)
        runs, clock = clocked(self.call.executable)
        self.call = ProgramCall(self.interface.form, runs)
        return clock

    @property
    def coverage(self) -> Coverage:
        """As it was when it was compiled."""
        return self.told.coverage

    @property
    def kernels(self) -> tuple[object, ...]:
        """As they were when it was compiled."""
        return self.told.kernels

    @property
    def calls(self) -> tuple[object, ...]:
        """As they were when it was compiled."""
        return self.told.calls

    def __repr__(self) -> str:
        return f"{self.kind} graph: {self.coverage}"


class LoadedWay:
    """Several graphs of one model, of which the first that fits a call runs."""

    def __init__(self, title: str, graphs: Sequence[LoadedGraph], origin: str = "") -> None:
        """`origin`: by what it was made, and for which machine."""
        self.title = title
        self.origin = origin
        self.graphs = tuple(graphs)
        self.weights: tuple[NamedWeight, ...] = ()
        self.device: torch.device | None = None
        self.source = None

    @property
    def coverage(self) -> Coverage | None:
        """Of all graphs."""
        return total([g.coverage for g in self.graphs])

    @property
    def done(self) -> Coverage | None:
        """Of all graphs."""
        return self.coverage

    @property
    def signature(self) -> Signature:
        """Of the first graph."""
        return self.graphs[0].interface.signature

    @property
    def kernels(self) -> tuple[object, ...]:
        """Of all graphs."""
        return tuple(k for g in self.graphs for k in g.kernels)

    @property
    def calls(self) -> tuple[object, ...]:
        """Of all graphs."""
        return tuple(c for g in self.graphs for c in g.calls)

    @property
    def cuda_graphs(self) -> tuple[str, ...]:
        """There are none."""
        return ()

    @property
    def trace(self) -> Trace:
        """What loading did."""
        return self.graphs[0].trace

    @property
    def compilations(self) -> tuple[object, ...]:
        """One for each graph."""
        return self.graphs

    def unchanged(self) -> bool:
        """Nothing outside can change it."""
        return True

    def eager(self) -> EagerProgram:
        """The first graph as torch runs it. Raises ArtifactError where it is not kept."""
        from .eager import EagerProgram

        graph = self.graphs[0]
        return EagerProgram(graph.captured().graph, graph.interface.form)

    def copied(self, memo: dict[int, object]) -> LoadedWay:
        """Itself, with the same weights. Raises InputError where the program writes to tensors of its own."""
        if any(isinstance(t, Tensor) for g in self.graphs for t in g.interface.form.writes.values()):
            raise InputError(
                "a program that writes to tensors of its own cannot be copied",
                phase="input",
                hint="load it once more",
            )
        return self

    def prepare(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Nothing is left to compile; arguments that do not fit are refused."""
        self._chosen(args, kwargs)

    def __call__(
        self, args: tuple[object, ...], kwargs: dict[str, object], out: Sequence[Tensor] | None
    ) -> tuple[object, Short | None]:
        """The result, and a short way for calls with tensors like these."""
        graph, leaves = self._chosen(args, kwargs)
        result = graph.call.run(leaves, out)
        given = (*args, *kwargs.values())
        places = {id(x): k for k, x in enumerate(given)}
        plain = len(places) == len(given) == len(leaves) and all(
            isinstance(x, Tensor) and id(x) in places for x in leaves
        )
        return result, graph.call.direct([places[id(x)] for x in leaves]) if plain else None

    def _chosen(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[LoadedGraph, list[object]]:
        refused: InputError | None = None
        for graph in self.graphs:
            try:
                leaves = graph.interface.form.flatten(*_by_position(graph.interface.parameters, args, kwargs))
            except InputError as error:
                refused = refused or error
                continue
            if len(self.graphs) == 1 or graph.call.admits(leaves):
                return graph, leaves
        raise refused or InputError(
            f"none of the {len(self.graphs)} graphs in the artifact is for such sizes", phase="input",
            hint="compile the model for them, with `dims` for sizes that change",
        )  # fmt: skip


def _by_position(
    names: Sequence[str], args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Arguments that are given by name in their places, as far as those before them are there."""
    if not kwargs or not names:
        return args, kwargs
    rest, given = dict(kwargs), list(args)
    for name in names[len(args) :]:
        if name not in rest:
            break
        given.append(rest.pop(name))
    return tuple(given), rest
