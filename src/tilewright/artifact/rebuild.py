"""Builds a model again from the graph inside an artifact, whose machine code is left alone."""

from __future__ import annotations

from typing import Protocol

import torch

from tilewright.artifact.file.container import Container
from tilewright.artifact.file.strict_json import damaged
from tilewright.artifact.text.captured import read_captured
from tilewright.artifact.text.program import read_interface
from tilewright.artifact.text.reports import SavedReports
from tilewright.artifact.text.routines import no_routines
from tilewright.artifact.text.tensors import TensorReader, read_weights
from tilewright.errors import ArtifactError, TilewrightError
from tilewright.options import Options
from tilewright.pipeline.compiler import compile_graph
from tilewright.runtime.call.asked import reading
from tilewright.runtime.plan.call_form import ProgramCall
from tilewright.runtime.plan.executable import Executable

from .foreign import harmless, harmless_interface
from .way import LoadedGraph, LoadedWay


class ArtifactFacts(Protocol):
    """What the header of a file says."""

    @property
    def title(self) -> str: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def captured(self) -> str: ...
    @property
    def origin(self) -> str: ...


def rebuilt(file: Container, facts: ArtifactFacts, options: Options, *, trusted: bool) -> LoadedWay:
    """A model of the graphs in a file, on the kind of device that it was captured on. Of one that is not `trusted`,
    only what is proved harmless is built. Raises ArtifactError where a graph is not kept, is not harmless, or its kind
    of device is not here."""
    if facts.captured != "cpu" and not torch.cuda.is_available():
        raise ArtifactError(
            "its graph is one of a GPU, and none is here", place=file.place,
            hint="save the model with --target for this machine as well",
        )  # fmt: skip
    device = None if facts.captured == "cpu" else torch.device(facts.captured, 0)
    there = TensorReader(file, file.text("tensors"), device)
    graphs = [_graph(file, name, there, options, trusted=trusted) for name in facts.names]
    way = LoadedWay(facts.title, graphs, f"{facts.origin}; built again from the graph inside")
    way.device = device
    way.weights = read_weights(file.text("weights"), there, f"{file.place}, section weights")
    return way


def _graph(
    file: Container, name: str, there: TensorReader, options: Options, *, trusted: bool
) -> LoadedGraph:
    place = f"{file.place}, graph {name}"
    device = "cpu" if there.device is None else str(there.device)
    tensors = there if there.device is None else TensorReader(file, file.text("tensors"))
    with reading():
        interface = read_interface(file.text(f"{name}.call"), there, no_routines(), place)
        program = read_captured(file, name, tensors, options)
        if not trusted:
            program = harmless(program, place)
            interface = harmless_interface(interface, program.graph, place)
    try:
        built = compile_graph(program, interface.conditions, device)
    except TilewrightError as error:
        error.place = error.place or place
        raise
    except Exception as bad:
        if trusted:
            raise
        raise damaged(f"its graph cannot be built: {type(bad).__name__}: {str(bad)[:200]}", place) from bad
    taken = built.executable.plan.inputs if isinstance(built.executable, Executable) else ()
    if len(taken) != len(interface.form.given):
        raise damaged("calls bring other arguments than the graph takes", place)
    results = len(interface.form.writes) + interface.form.out_spec.num_leaves
    if len(program.graph.outputs) != results:
        raise damaged("the graph gives other results than calls return", place)
    call = ProgramCall(interface.form, built.executable)  # pyright: ignore[reportArgumentType]
    told = SavedReports(built.coverage, built.kernels, built.calls)
    made = built.compilation
    return LoadedGraph(interface, call, lambda: told, lambda: program, made.machine, made.recorder)
