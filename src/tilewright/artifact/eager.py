"""The captured program of an artifact as a module that torch runs op by op: what a loaded model is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor, nn

from tilewright.ir.graph import Graph
from tilewright.runtime.plan.arguments import Argument
from tilewright.runtime.plan.call_form import CallForm, ProgramCall
from tilewright.runtime.plan.known_sizes import Result

from .op_by_op import OpByOp


class EagerProgram(nn.Module):
    """A captured graph, called as the program that it is of. Tensors that the program writes to are its own."""

    def __init__(self, graph: Graph, form: CallForm) -> None:
        super().__init__()
        for k, (_, t) in enumerate(form.given):
            self.register_buffer(f"held{k}", None if t is None else t.clone())
        self._fixed = _Fixed(graph, form)
        constants = self._fixed.ops.constants()
        for k, t in enumerate(constants):
            self.register_buffer(f"constant{k}", t)
        self._count = len(constants)

    def forward(self, *args: object, **kwargs: object) -> object:
        """The program's result."""
        given = self._fixed.form
        held = [
            self.get_buffer(f"held{k}") if t is not None else None for k, (_, t) in enumerate(given.given)
        ]
        made = [(leaf, mine) for (leaf, _), mine in zip(given.given, held, strict=True)]
        old = {id(t): mine for (_, t), mine in zip(given.given, held, strict=True) if t is not None}
        writes = {k: old[id(t)] if isinstance(t, Tensor) else t for k, t in given.writes.items()}
        form = CallForm(
            given.inputs, tuple(made), given.in_spec, given.out_spec,
            cast("Mapping[int, Tensor | int]", writes), given.written, given.constants,
        )  # fmt: skip
        runs = _Running(self._fixed.ops, [self._buffers[f"constant{k}"] for k in range(self._count)])
        return ProgramCall(form, runs).run(form.flatten(args, kwargs), None)


class _Fixed:
    """What copies of a module share."""

    def __init__(self, graph: Graph, form: CallForm) -> None:
        self.ops, self.form = OpByOp(graph), form

    def __deepcopy__(self, memo: dict[int, object]) -> _Fixed:
        return self


class _Running:
    """The ops with some constants, as what calls run."""

    written: tuple[int, ...] = ()

    def __init__(self, ops: OpByOp, constants: Sequence[Tensor | None]) -> None:
        self._ops, self._constants = ops, constants

    def admits(self, args: Sequence[Argument]) -> bool:
        """As torch sees it when it runs."""
        return len(args) == len(self._ops.graph.inputs)

    def __call__(self, args: list[Argument], out: Sequence[Tensor | None] | None = None) -> list[Result]:
        """The results, in order."""
        return self._ops.run(args, iter(self._constants))
