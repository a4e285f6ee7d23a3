"""How a call of a program becomes the arguments of its graph, and the graph's results what the program returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilewright.capture.aliasing.apart import meet
from tilewright.errors import InputError, UnsupportedError
from tilewright.runtime.call.fast_path import Direct, Pick, Returned, Short
from tilewright.runtime.call.fast_path import Runs as RunsFlat

from .arguments import Argument, deliver
from .known_sizes import Result


class Runs(RunsFlat, Protocol):
    """Runs flat arguments, and says whether it can."""

    def admits(self, args: Sequence[Argument]) -> bool:
        """Whether the sizes fit."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class CallForm:
    """`inputs` name the flat arguments of a call, nested as `in_spec`. Argument k of the graph is flat argument number
    `given[k][0]`, or the tensor `given[k][1]`. Result k of the graph is copied into `writes[k]` (a tensor, or the
    number of a flat argument), or is the next output; where it is the value that result `written[k]` is, the output is
    what that was copied into. `constants` stood in flat arguments when the program was made, and are part of it."""

    inputs: tuple[str, ...]
    given: tuple[tuple[int | None, Tensor | None], ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    writes: Mapping[int, Tensor | int] = field(default_factory=dict[int, "Tensor | int"])
    written: Mapping[int, int] = field(default_factory=dict[int, int])
    constants: Mapping[int, object] = field(default_factory=dict[int, object])

    def flatten(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
        """The flat arguments of a call. Raises InputError if they are nested in another way than at export, or if one
        that became part of the program is another now."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if spec != self.in_spec:
            raise InputError(
                f"the arguments are nested as {spec}, the program takes {self.in_spec}", phase="input"
            )
        for k, wanted in self.constants.items():
            given = leaves[k]
            if isinstance(given, Tensor) or repr(given) != repr(wanted):
                shown = f"a tensor of shape {list(given.shape)}" if isinstance(given, Tensor) else repr(given)
                raise InputError(
                    f"{self.inputs[k]} is {shown}, the program was exported for {wanted!r}", phase="input",
                    place=f"input {self.inputs[k]}", hint="export it again with that value",
                )  # fmt: skip
        return leaves


class ProgramCall:
    """Calls of a program that `executable` runs, in a form."""

    def __init__(self, form: CallForm, executable: Runs) -> None:
        self.form = form
        self.executable = executable
        held = {id(t) for t in form.writes.values() if isinstance(t, Tensor)}
        leaves = {k for k in form.writes.values() if isinstance(k, int)}
        here = (i for i, (k, t) in enumerate(form.given) if (id(t) in held if k is None else k in leaves))
        self._written = tuple(sorted({*executable.written, *here}))
        self._perhaps_negated = tuple(
            i for i, (k, t) in enumerate(form.given) if k is not None or (t is not None and t.is_neg())
        )

    def admits(self, leaves: Sequence[object]) -> bool:
        """Whether the program was made for sizes like those of these flat arguments."""
        return self.executable.admits(self._arguments(leaves))

    def _arguments(self, leaves: Sequence[object]) -> list[Argument]:
        made = [leaves[k] if k is not None else held for k, held in self.form.given]
        for i in self._perhaps_negated:
            a = made[i]
            made[i] = a.resolve_neg() if isinstance(a, Tensor) else a
        return made  # pyright: ignore[reportReturnType]

    def _check_apart(self, arguments: Sequence[Argument]) -> None:
        """Raise InputError where an argument that is written shares elements with another one: the program was made
        for tensors apart, and nothing here runs it in another way."""
        if not self._written:
            return
        tensors = tuple(
            i for i, a in enumerate(arguments) if isinstance(a, Tensor) and a.layout is torch.strided
        )
        for i, j in meet(arguments, self._written, tensors):
            raise InputError(
                f"{self._name(i)} is written and shares memory with {self._name(j)}", phase="input",
                place=self._name(i), hint="give a clone() of one of them",
            )  # fmt: skip

    def _check_inference(self, leaves: Sequence[object]) -> None:
        """Raise UnsupportedError where an argument asks for a gradient, which results that are cut off would lose."""
        if not torch.is_grad_enabled():
            return
        for k, a in enumerate(leaves):
            if isinstance(a, Tensor) and a.requires_grad:
                raise UnsupportedError(
                    "a gradient is asked for, and a program from a file or an export is for inference", phase="input",
                    place=f"input {self.form.inputs[k]}",
                    hint="call it under torch.no_grad(), or give x.detach(); to train, compile the module itself",
                )  # fmt: skip

    def _name(self, i: int) -> str:
        leaf = self.form.given[i][0]
        return "a tensor of the program" if leaf is None else f"input {self.form.inputs[leaf]}"

    def run(self, leaves: Sequence[object], out: Sequence[Tensor] | None) -> object:
        """The program's result for flat arguments. Raises InputError where it would write into what it also reads as
        another argument, UnsupportedError where an argument asks for a gradient."""
        self._check_inference(leaves)
        arguments, form = self._arguments(leaves), self.form
        self._check_apart(arguments)
        with torch.no_grad():
            if out is not None and not form.writes:
                results = self.executable(arguments, out)
            else:
                results = self.executable(arguments)
            places = {k: _write(leaves, target, results[k]) for k, target in form.writes.items()}
        returned = [
            places[form.written[k]] if k in form.written else r
            for k, r in enumerate(results)
            if k not in form.writes
        ]
        result = pytree.tree_unflatten(returned, form.out_spec)
        if out is not None and form.writes:
            return deliver(result, out, [x for x in leaves if isinstance(x, Tensor)])
        return result

    def direct(self, places: Sequence[int]) -> Short | None:
        """A short way for calls whose leaf `places[k]` is flat argument k; None where the program writes to arguments.
        It checks no more than sizes: what else arguments must be, its caller has seen."""
        form = self.form
        if form.writes:
            return None
        picks = [Pick(places[k]) if k is not None else Pick(-1, held) for k, held in form.given]
        results = [Returned(k) for k in range(form.out_spec.num_leaves)]
        run = Direct(self.executable, picks, results, form.out_spec)

        def short(leaves: Sequence[object], out: Sequence[Tensor] | None) -> object:
            with torch.no_grad():
                return run(leaves, out)

        return short


def _write(leaves: Sequence[object], target: Tensor | int, value: Result) -> Tensor:
    place = leaves[target] if isinstance(target, int) else target
    if not isinstance(place, Tensor) or not isinstance(value, Tensor):
        raise InputError("the program writes to an argument that is no tensor", phase="input")
    return place.copy_(value)
