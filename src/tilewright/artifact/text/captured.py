"""The captured graph in an artifact, from which everything can be built again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from tilewright.analysis.size_hints import SizeHints
from tilewright.artifact.file.container import Container
from tilewright.artifact.file.strict_json import damaged
from tilewright.artifact.op_by_op import loop_in_torch
from tilewright.errors import ArtifactError, TilewrightError
from tilewright.ir.graph import Graph, LibraryCall, Routine, Share, Shares
from tilewright.ir.text.graph import read_graph, write_graph
from tilewright.ir.text.values import Json
from tilewright.options import Options
from tilewright.pipeline.state import CapturedProgram

from .tensors import TensorReader, TensorWriter
from .typed import check_types


def write_captured(captured: CapturedProgram, tensors: TensorWriter) -> Json:
    """A captured graph as JSON; None where it names what only this process has."""
    text, held = write_graph(_plain(captured.graph))
    if not all(isinstance(x, Tensor) for x in held):
        return None
    return {
        "graph": text,
        "held": [tensors.place(x, "a constant of the program") for x in held if isinstance(x, Tensor)],
        "shares": [[s.kind.value, s.storage] for s in captured.shares],
        "traced": {name: int(n) for name, n in captured.traced.sizes.items()},
    }


@dataclass(frozen=True, slots=True)
class StepByStep(Routine):
    """Stands in text for what the call of a loop runs, which its body says."""

    def bind(self) -> Callable[..., object]:
        """Raises ArtifactError: it stands in text alone."""
        raise ArtifactError("a call of a loop has no loop")


def _plain(graph: Graph) -> Graph:
    """The graph without what calls might do in place and what the calls of loops run: both follow from what is kept."""

    def plain(call: LibraryCall | None) -> LibraryCall | None:
        if call is None or call.loop is None:
            return None if call is None else replace(call, over=None, line=None)
        loop = replace(call.loop, body=_plain(call.loop.body))
        return replace(call, over=None, line=None, function=StepByStep(), loop=loop)

    ops = tuple(replace(op, call=plain(op.call)) for op in graph.ops)
    own = [None if o.call is None or o.call.loop is not None else o.call for o in graph.origins]
    origins = tuple(replace(o, call=plain(call)) for o, call in zip(graph.origins, own, strict=True))
    return replace(graph, ops=ops, origins=origins)


def _with_loops(graph: Graph) -> Graph:
    """The graph with what runs where a loop is called. Raises ValueError for text that stands for none."""

    def op_with_loop(call: LibraryCall) -> LibraryCall:
        if call.loop is None:
            if isinstance(call.function, StepByStep):
                raise ValueError("a call of a loop has no loop")
            return call
        loop = replace(call.loop, body=_with_loops(call.loop.body))
        return replace(call, function=loop_in_torch(loop), loop=loop)

    ops = tuple(op if op.call is None else replace(op, call=op_with_loop(op.call)) for op in graph.ops)
    return replace(graph, ops=ops)


def read_captured(file: Container, name: str, tensors: TensorReader, options: Options) -> CapturedProgram:
    """The captured graph of an artifact. Raises ArtifactError where there is none that `save` wrote."""
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
        check_types(graph, Graph)
        graph = _with_loops(graph)
        graph.verify()
    except (TilewrightError, ValueError, TypeError, LookupError, AssertionError, RecursionError) as bad:
        raise damaged(f"its graph: {bad}", place) from bad
    return graph


def _share(told: Json, place: str) -> Share:
    match told:
        case [int(kind), int(storage)] if 0 <= kind <= (Shares.INPUT | Shares.OUTPUT).value:
            return Share(Shares(kind), storage)
        case _:
            raise damaged("its outputs share otherwise", place)
