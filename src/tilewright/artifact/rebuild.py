"""Builds a model again from the graph inside an artifact, whose machine code is left alone."""

from __future__ import annotations

from tilewright.artifact.file.container import Container
from tilewright.artifact.file.strict_json import damaged
from tilewright.artifact.text.captured import read_captured
from tilewright.artifact.text.program import read_interface
from tilewright.artifact.text.reports import SavedReports
from tilewright.artifact.text.routines import no_routines
from tilewright.artifact.text.tensors import TensorReader
from tilewright.errors import TilewrightError
from tilewright.options import Options
from tilewright.pipeline.compiler import compile_graph
from tilewright.runtime.plan.call_form import ProgramCall
from tilewright.runtime.plan.executable import Executable

from .foreign import harmless, harmless_interface
from .way import LoadedGraph, LoadedWay


def rebuilt(
    file: Container, title: str, names: tuple[str, ...], options: Options, *, trusted: bool, origin: str
) -> LoadedWay:
    """A model of the graphs in a file. Of one that is not `trusted`, only what is proved harmless is built. Raises
    ArtifactError where a graph is not kept, or is not harmless."""
    tensors = TensorReader(file, file.text("tensors"))
    graphs = [_graph(file, name, tensors, options, trusted=trusted) for name in names]
    return LoadedWay(title, graphs, f"{origin}; built again from the graph inside")


def _graph(
    file: Container, name: str, tensors: TensorReader, options: Options, *, trusted: bool
) -> LoadedGraph:
    place = f"{file.place}, graph {name}"
    interface = read_interface(file.text(f"{name}.call"), tensors, no_routines(), place)
    program = read_captured(file, name, tensors, options)
    if not trusted:
        program = harmless(program, place)
        interface = harmless_interface(interface, program.graph, place)
    try:
        built = compile_graph(program, interface.conditions)
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
    return LoadedGraph(interface, call, lambda: told, lambda: program, built.trace)
