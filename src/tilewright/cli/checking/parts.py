"""A module that torch cannot capture as one graph, compiled as `torch.compile` does: in parts, with Python between."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tilewright.cli.model import Model
from tilewright.cli.request import CommandRequest
from tilewright.cli.work import compile_for, options_of
from tilewright.errors import SeveralGraphs
from tilewright.report.records import Compiled, GraphWork


class CompiledParts:
    """The graphs of a module, and what runs them."""

    def __init__(self, session: Compiled, run: Callable[..., object]) -> None:
        self._session, self._run = session, run
        self.signature = None

    @property
    def coverage(self) -> object:
        """Of all graphs together."""
        return self._session.coverage

    @property
    def compilations(self) -> Sequence[GraphWork]:
        """Of all graphs, in the order in which they were compiled."""
        return self._session.compilations

    def __call__(self, *inputs: Tensor) -> object:
        """Run."""
        return self._run(*inputs)


def compile_parts(request: CommandRequest, target: Callable[..., object]) -> CompiledParts:
    """Compile as requested, with graph breaks."""
    asked = {"strict": True} if request.strict else {}
    options = options_of(request).replace(
        **asked, **({} if request.freeze is None else {"freeze": request.freeze})
    )
    session = importlib.import_module("tilewright.ways.traced").Session(options)
    return CompiledParts(session, torch.compile(target, backend=session.backend))


def compile_whole_or_parts(request: CommandRequest, model: Model, inputs: tuple[Tensor, ...]) -> Compiled:
    """Compile as requested, in parts where it has to be. Raises SeveralGraphs where dims are named, which parts do not
    have."""
    try:
        return compile_for(request, model, inputs)
    except SeveralGraphs:
        if request.dims or isinstance(model.target, Path):
            raise
        return compile_parts(request, model.target)
