"""Exported programs and model files: one functional graph, weights inside, called without Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, fx

from tilewright.capture.aliasing.negated import unnegated
from tilewright.capture.described import Signature
from tilewright.capture.exported import Exported
from tilewright.capture.signature import signature_of_program
from tilewright.errors import UnsupportedError
from tilewright.ir.expr import Expr
from tilewright.plan.coverage import Coverage
from tilewright.runtime.plan.call_form import CallForm, ProgramCall, Runs

from .fast_path import Short
from .reports import Reports, ReportsOfParts


class CompiledGraph(Reports, Protocol):
    """A compiled graph."""

    @property
    def executable(self) -> Runs:
        """Runs it."""
        ...

    @property
    def coverage(self) -> Coverage:
        """How much is generated."""
        ...


BuildGraph = Callable[[fx.GraphModule, Mapping[str, Tensor]], CompiledGraph]
"""Compiles a functional graph whose placeholders named in the mapping are constants."""


class ProgramWay(ReportsOfParts):
    """One exported program. `freeze` False keeps its weights as tensors that may still be changed in place."""

    def __init__(self, program: Exported, build: BuildGraph, *, freeze: bool = True) -> None:
        self.program = program
        self.freeze = freeze
        self.device: torch.device | None = None
        self.source = None
        self.title = "an exported program"
        names = [n.name for n in program.gm.graph.nodes if n.op == "placeholder"]
        frozen = program.weights if freeze else {}
        self.built = build(program.gm, {name: unnegated(t) for name, t in frozen.items()})
        held = {**program.state, **({} if freeze else program.weights)}
        flat = {name: k for k, name in enumerate(program.inputs)}
        form = CallForm(
            program.inputs,
            tuple((flat.get(n), held.get(n)) for n in names if n in flat or n in held),
            program.in_spec,
            program.out_spec,
            program.writes,
            program.written,
            program.constants,
        )
        self.call = ProgramCall(form, self.built.executable)

    @property
    def coverage(self) -> Coverage:
        """Of everything compiled so far."""
        return self.built.coverage

    @property
    def signature(self) -> Signature:
        """What it takes and gives."""
        return self.described((), ())

    def described(self, inputs: Sequence[str], outputs: Sequence[str]) -> Signature:
        """The same with other names, where these are as many."""
        return signature_of_program(self.program, inputs, outputs)

    @property
    def conditions(self) -> tuple[Expr, ...]:
        """What must hold of sizes."""
        return self.program.conditions

    @property
    def done(self) -> Coverage:
        """Of everything compiled so far."""
        return self.coverage

    def reporting(self) -> tuple[Reports]:
        """What was built."""
        return (self.built,)

    def unchanged(self) -> bool:
        """An exported program reads nothing but its arguments and its own weights."""
        return True

    def copied(self, memo: dict[int, object]) -> ProgramWay:
        """Itself where weights are constants that nothing can change. Raises UnsupportedError otherwise."""
        if self.program.state or (self.program.weights and not self.freeze):
            raise UnsupportedError(
                "a program with weights that may change cannot be copied", phase="input",
                hint="copy the exported program and compile the copy",
            )  # fmt: skip
        return self

    def prepare(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Nothing is left to compile; arguments that do not fit are refused."""
        self._leaves(args, kwargs)

    def _leaves(self, args: tuple[object, ...], kwargs: dict[str, object]) -> list[object]:
        return self.call.form.flatten(args, kwargs)

    def __call__(
        self, args: tuple[object, ...], kwargs: dict[str, object], out: Sequence[Tensor] | None
    ) -> tuple[object, Short | None]:
        """The result."""
        return self.run(self._leaves(args, kwargs), out), None

    def admits(self, leaves: Sequence[object]) -> bool:
        """As of `ProgramCall`."""
        return self.call.admits(leaves)

    def run(self, leaves: Sequence[object], out: Sequence[Tensor] | None) -> object:
        """As of `ProgramCall`."""
        return self.call.run(leaves, out)

    def direct(self, places: Sequence[int]) -> Short | None:
        """As of `ProgramCall`."""
        return self.call.direct(places)
