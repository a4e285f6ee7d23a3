"""The captured graph in an artifact, from which everything can be built again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from tilewright.analysis.size_hints import SizeHints
from tilewright.artifact.file.container import Container
from tilewright.artifact.file.strict_json import damaged
from tilewright.errors import ArtifactError, TilewrightError
from tilewright.ir.graph import Graph, LibraryCall, Share, Shares
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


def _plain(graph: Graph) -> Graph:
    """The graph without what calls might do in place, which follows from what they call."""

    def plain(call: LibraryCall | None) -> LibraryCall | None:
        return None if call is None else replace(call, over=None, line=None)

    ops = tuple(replace(op, call=plain(op.call)) for op in graph.ops)
    return replace(graph, ops=ops, origins=tuple(replace(o, call=plain(o.call)) for o in graph.origins))


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
