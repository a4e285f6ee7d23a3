"""Builds a model again from the graph inside an artifact, whose machine code is left alone."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis.size_hints import SizeHints
from tilewright.errors import ArtifactError, TilewrightError
from tilewright.ir.graph import Graph, Share, Shares
from tilewright.ir.text.graph import read_graph
from tilewright.ir.text.values import Json
from tilewright.options import Options
from tilewright.pipeline.compiler import CapturedProgram, compile_graph
from tilewright.runtime.call.call_form import ProgramCall
from tilewright.runtime.own.product import ProductCalls
from tilewright.runtime.plan.executable import Executable

from .container import Container
from .foreign import harmless
from .program import read_interface
from .reports import SavedReports
from .routines import Routines
from .strict_json import damaged
from .tensors import TensorReader
from .way import LoadedGraph, LoadedWay


def rebuilt(
    file: Container, title: str, names: tuple[str, ...], options: Options, *, trusted: bool
) -> LoadedWay:
    """A model of the graphs in a file. Of one that is not `trusted`, only what is proved harmless is built. Raises
    ArtifactError where a graph is not kept, or is not harmless."""
    tensors = TensorReader(file, file.text("tensors"))
    return LoadedWay(title, [_graph(file, name, tensors, options, trusted=trusted) for name in names])


def _graph(
    file: Container, name: str, tensors: TensorReader, options: Options, *, trusted: bool
) -> LoadedGraph:
    place = f"{file.place}, graph {name}"
    interface = read_interface(file.text(f"{name}.call"), tensors, Routines(_nothing_of_ours), place)
    program = captured(file, name, tensors, options)
    if not trusted:
        program = harmless(program, place)
    try:
        built = compile_graph(program, interface.conditions)
    except TilewrightError as error:
        error.place = error.place or place
        raise
    taken = built.executable.plan.inputs if isinstance(built.executable, Executable) else ()
    if len(taken) != len(interface.form.given):
        raise damaged("calls bring other arguments than the graph takes", place)
    results = len(interface.form.writes) + interface.form.out_spec.num_leaves
    if len(program.graph.outputs) != results:
        raise damaged("the graph gives other results than calls return", place)
    call = ProgramCall(interface.form, built.executable)  # pyright: ignore[reportArgumentType]
    told = SavedReports(built.coverage, built.kernels, built.calls)
    return LoadedGraph(interface, call, lambda: told, built.trace)


def _nothing_of_ours() -> ProductCalls:
    raise ValueError("a captured graph has no packed weights")


def captured(file: Container, name: str, tensors: TensorReader, options: Options) -> CapturedProgram:
    """The captured graph of an artifact. Raises ArtifactError where there is none, or another one than `save` writes."""
    place = f"{file.place}, section {name}.graph"
    match file.text(f"{name}.graph"):
        case None:
            raise ArtifactError(
                "the graph in it calls what only the process that made it has", place=place,
                hint="make it again on this machine",
            )  # fmt: skip
        case {
            "graph": Mapping() as text,
            "held": [*held],
            "shares": [*shares],
            "traced": Mapping() as traced,
        } as told if len(told) == 4:
            graph = _read(text, [tensors[k] for k in held], place)
            sizes = {str(s): n for s, n in traced.items() if type(n) is int}
            rows = [_share(s, place) for s in shares]
            if len(rows) != len(graph.outputs) or len(sizes) < len(traced):
                raise damaged("its outputs share otherwise", place)
            return CapturedProgram(graph, tuple(rows), SizeHints(sizes), options)
        case _:
            raise damaged("its graph has other parts", place)


def _read(text: Mapping[str, Json], held: list[object], place: str) -> Graph:
    try:
        graph = read_graph(text, held)
        graph.verify()
    except (TilewrightError, ValueError, AssertionError) as bad:
        raise damaged(f"its graph: {bad}", place) from bad
    return graph


def _share(told: Json, place: str) -> Share:
    match told:
        case [int(kind), int(storage)] if 0 <= kind <= (Shares.INPUT | Shares.OUTPUT).value:
            return Share(Shares(kind), storage)
        case _:
            raise damaged("its outputs share otherwise", place)
