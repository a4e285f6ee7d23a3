"""What `save` and `load` do: which graphs stand behind a compiled model, and back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from tilewright.artifact.save import SavedGraph
from tilewright.artifact.save import save as write
from tilewright.artifact.text.program import Interface
from tilewright.artifact.way import LoadedWay
from tilewright.capture.described import Signature
from tilewright.capture.exported import exported
from tilewright.errors import InputError, UnsupportedError, names_keywords
from tilewright.pipeline.compiler import Compiled
from tilewright.runtime.call.dynamic_dims import Naming
from tilewright.runtime.call.dynamo import TracedWay
from tilewright.runtime.call.exported import ProgramWay
from tilewright.runtime.call.kept_weights import weights_of
from tilewright.runtime.call.model import CompiledModel
from tilewright.ways.files import FileWay, program_way
from tilewright.ways.programs import ProgramFileWay
from tilewright.ways.weights import named_weights

from .captures import CapturedWay
from .export import export, parameters_of


@names_keywords
def save(
    model: CompiledModel,
    path: str | os.PathLike[str],
    *,
    weights: str = "inside",
    targets: Sequence[str] = (),
) -> None:
    """Keep a compiled model in a file that `load` runs without compiling anything.

    `targets` are the machines that it gets code for, by name (`sm_80`, `x86-64-v3`, ...), the ones first that are
    tried first; none: the one that it was compiled for. Others need not be here. `weights`: inside the file, or
    `beside` it in a safetensors file of the same name. Raises UnsupportedError for what cannot be kept yet, and names
    it."""
    if weights not in ("inside", "beside"):
        raise InputError(f"weights cannot be {weights!r}", phase="save", hint="'inside' or 'beside'")
    if not isinstance(model, CompiledModel):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"a {type(model).__name__} is not compiled",
            phase="save",
            hint="save what tilewright.compile returns",
        )
    way = model.way
    names = [targets] if isinstance(targets, str) else targets
    graphs = _graphs(way)
    module = way.target if isinstance(way, TracedWay) else None
    held = weights_of(module) if isinstance(module, nn.Module) else named_weights(way)
    written = {id(t) for g in graphs for t in g.interface.form.writes.values() if isinstance(t, Tensor)}
    held = [replace(w, written=id(w.tensor) in written) for w in held]
    write(Path(path), way.title, graphs, beside=weights == "beside", names=names, weights=held)


def _graphs(way: object) -> list[SavedGraph]:
    """Each graph of a compiled model, and how it is called."""
    match way:
        case TracedWay():
            program = exported(export(way.target, way.examples, way.naming))
            options = way.session.options
            count = len(way.examples[-1].spec.child(0).children()) if way.examples else 0
            names = parameters_of(way.target, count)
            made = program_way(program, options)
            return [_graph(made, _named(made, names, way.naming), names)]
        case ProgramWay():
            return [_graph(way, way.signature, way.program.inputs)]
        case ProgramFileWay():
            interface, built = way.interface(), way.inner.built
            assert isinstance(built, Compiled)
            return [SavedGraph(interface, built)]
        case FileWay():
            ways, signature = way.program_ways(), way.signature
            assert signature is not None
            return [_graph(w, signature, way.names) for w in ways]
        case LoadedWay():
            raise UnsupportedError("this comes from an artifact", phase="save", hint="copy the file")
        case _:
            raise UnsupportedError(
                f"a {type(way).__name__} cannot be kept",
                phase="save",
                hint="keep what tilewright.compile returns",
            )


def _named(way: ProgramWay, names: Sequence[str], naming: Naming) -> Signature:
    """The signature with the names that the user gave to inputs and dims."""
    found = way.signature
    if len(names) == len(found.inputs):
        inputs = tuple(replace(t, name=n) for t, n in zip(found.inputs, names, strict=True))
        new = {t.name: n for t, n in zip(found.inputs, names, strict=True)}
        sizes = tuple(replace(s, places=tuple((new.get(n, n), d) for n, d in s.places)) for s in found.sizes)
        found = replace(found, inputs=inputs, sizes=sizes)
    ranks = {t.name: len(t.shape or ()) for t in found.inputs}
    users = {
        (d.input, d.place + ranks.get(d.input, 0) if d.place < 0 else d.place): d.name for d in naming.dims
    }
    return found.named(lambda name, dim: users.get((name, dim)))


def _graph(way: ProgramWay | CapturedWay, signature: Signature, names: Sequence[str]) -> SavedGraph:
    built = way.built
    assert isinstance(built, Compiled)
    return SavedGraph(Interface(way.call.form, tuple(names), signature, way.conditions), built)
