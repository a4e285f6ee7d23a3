"""What a program holds, by the names that its author gave it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from tilewright.runtime.call.exported import ProgramWay
from tilewright.runtime.call.kept_weights import NamedWeight, weights_of

from .files import FileWay
from .programs import ProgramFileWay


def named_weights(way: object) -> list[NamedWeight]:
    """The weights behind a file or an exported program, as far as they have names: those of a graph that was read from
    the cache have none."""
    match way:
        case FileWay():
            names = way.module.weight_names
            return [replace(w, name=names.get(w.name, w.name)) for w in weights_of(way.module)]
        case ProgramFileWay():
            return named_weights(way.inner)
        case ProgramWay():
            held = {**way.program.weights, **way.program.state}
            return [
                NamedWeight(
                    way.program.names.get(k, k), t, isinstance(t, nn.Parameter), k in way.program.state
                )
                for k, t in held.items()
            ]
        case _:
            return []
