"""Exported programs and model files: one functional graph, weights inside, called without Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from tilewright.capture.exported import Exported
from tilewright.capture.signature import Signature, signature_of_program
from tilewright.errors import InputError, UnsupportedError
from tilewright.plan.coverage import Coverage
from tilewright.runtime.plan.arguments import Argument, deliver
from tilewright.runtime.plan.known_sizes import Result

from .fast_path import Direct, Pick, Returned, Short
from .fast_path import Runs as RunsFlat
from .reports import Reports, ReportsOfParts


class Runs(RunsFlat, Protocol):
    """Runs flat arguments, and says whether it can."""

    def admits(self, args: Sequence[Argument]) -> bool:
        """Whether the sizes fit."""
        ...


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
        self.built = build(program.gm, {name: t.resolve_neg() for name, t in frozen.items()})
        held = {**program.state, **({} if freeze else program.weights)}
        flat = {name: k for k, name in enumerate(program.inputs)}
        self._args = tuple((flat.get(n), held.get(n)) for n in names if n in flat or n in held)
        self._perhaps_negated = tuple(
            i for i, (k, t) in enumerate(self._args) if k is not None or (t is not None and t.is_neg())
        )

    @property
    def coverage(self) -> Coverage:
        """Of everything compiled so far."""
        return self.built.coverage

    @property
    def signature(self) -> Signature:
        """What it takes and gives."""
        return signature_of_program(self.program, (), ())

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
        return self.program.flatten(args, kwargs)

    def __call__(
        self, args: tuple[object, ...], kwargs: dict[str, object], out: Sequence[Tensor] | None
    ) -> tuple[object, Short | None]:
        """The result."""
        return self.run(self._leaves(args, kwargs), out), None

    def admits(self, leaves: Sequence[object]) -> bool:
        """Whether the program was made for sizes like those of these flat arguments."""
        return self.built.executable.admits(self._given(leaves))

    def _given(self, leaves: Sequence[object]) -> list[Argument]:
        given = [leaves[k] if k is not None else held for k, held in self._args]
        for i in self._perhaps_negated:
            a = given[i]
            given[i] = a.resolve_neg() if isinstance(a, Tensor) else a
        return given  # pyright: ignore[reportReturnType]

    def run(self, leaves: Sequence[object], out: Sequence[Tensor] | None) -> object:
        """The program's result for flat arguments."""
        given = self._given(leaves)
        writes = self.program.writes
        with torch.no_grad():
            if out is not None and not writes:
                results = self.built.executable(given, out)
            else:
                results = self.built.executable(given)
            places = {k: self._write(leaves, target, results[k]) for k, target in writes.items()}
        written = self.program.written
        returned = [
            places[written[k]] if k in written else r for k, r in enumerate(results) if k not in writes
        ]
        result = pytree.tree_unflatten(returned, self.program.out_spec)
        if out is not None and writes:
            return deliver(result, out, [x for x in leaves if isinstance(x, Tensor)])
        return result

    def direct(self, places: Sequence[int]) -> Short | None:
        """A short way for calls whose leaf `places[k]` is flat argument k; None where the program writes to arguments.
        It checks no more than sizes: what else arguments must be, its caller has seen."""
        if self.program.writes:
            return None
        picks = [Pick(places[k]) if k is not None else Pick(-1, held) for k, held in self._args]
        results = [Returned(k) for k in range(self.program.out_spec.num_leaves)]
        run = Direct(self.built.executable, picks, results, self.program.out_spec)

        def short(leaves: Sequence[object], out: Sequence[Tensor] | None) -> object:
            with torch.no_grad():
                return run(leaves, out)

        return short

    def _write(self, leaves: Sequence[object], target: Tensor | int, value: Result) -> Tensor:
        place = leaves[target] if isinstance(target, int) else target
        if not isinstance(place, Tensor) or not isinstance(value, Tensor):
            raise InputError("the program writes to an argument that is no tensor", phase="input")
        return place.copy_(value)
