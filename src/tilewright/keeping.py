"""What `save` and `load` do: which graphs stand behind a compiled model, and back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tilewright.artifact.program import Interface
from tilewright.artifact.save import SavedGraph
from tilewright.artifact.save import save as write
from tilewright.pipeline.compiler import Compiled
from tilewright.runtime.call.exported import ProgramWay
from tilewright.runtime.call.model import CompiledModel

from .errors import InputError, UnsupportedError
from .files import FileWay


def save(model: CompiledModel, path: str | os.PathLike[str], *, weights: str = "inside") -> None:
    """Keep a compiled model in a file that `load` runs without compiling anything.

    `weights`: inside the file, or `beside` it in a safetensors file of the same name. Raises UnsupportedError for what
    cannot be kept yet, and names it."""
    if weights not in ("inside", "beside"):
        raise InputError(f"weights cannot be {weights!r}", phase="save", hint="'inside' or 'beside'")
    way = model.way
    write(Path(path), way.title, _graphs(way), beside=weights == "beside")


def _graphs(way: object) -> list[SavedGraph]:
    match way:
        case ProgramWay():
            names = way.program.inputs
            return [
                _graph(way, names, Interface(way.call.form, names, way.signature, way.program.conditions))
            ]
        case FileWay():
            signature = way.signature
            assert signature is not None
            return [
                _graph(w, way.names, Interface(w.call.form, way.names, signature, w.program.conditions))
                for w in way.program_ways()
            ]
        case _:
            raise UnsupportedError(f"{type(way).__name__} cannot be kept", phase="save")


def _graph(way: ProgramWay, names: Sequence[str], interface: Interface) -> SavedGraph:
    built = way.built
    assert isinstance(built, Compiled)
    return SavedGraph(interface, built)
