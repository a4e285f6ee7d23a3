"""The call of a captured loop: what its operands are, and its body as `Loop` has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from tilewright.errors import VerifyError
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Graph, Layout, LibraryCall, Loop, Operand, Routine, Value
from tilewright.ir.identity import TOLD
from tilewright.ir.sizes import dims

from .op import run_eagerly

Header = tuple[object, object, object, object]
"""Of a captured loop: its number of steps, the bool that allows the first, how many results it stacks, direction."""


def loop_call(
    module: fx.GraphModule, body: Graph, header: Header, given: Sequence[object]
) -> tuple[LibraryCall, list[Value]]:
    """The call of a loop around `body`, which was made from `module`, and its operands. `given` are the carried values,
    what is sliced, and what is the same in every step. Raises VerifyError where they do not fit."""
    steps, going, stacked, backwards = header
    carried, sliced, outer = (_listed(part) for part in given)
    first = 1 + len(carried) + len(sliced)
    order = sorted(range(len(outer)), key=lambda k: not isinstance(outer[k], Value))
    places = (*body.inputs[:first], *(body.inputs[first + k] for k in order))
    tensors = [v for v in outer if isinstance(v, Value)]
    numbers = [outer[k] for k in order[len(tensors) :]]
    assert isinstance(stacked, int)
    made = len(body.outputs) - len(carried) - stacked
    loop = Loop(
        replace(body, inputs=places, layouts=_dense(body), returned=()),
        _number(steps), len(carried), len(sliced), stacked,
        conditional=made == 1, gated=going is not None, backwards=bool(backwards),
    )  # fmt: skip
    inputs: list[Value] = []

    def operand(v: object) -> Operand:
        if not isinstance(v, Value):
            raise VerifyError("a loop carries what is no tensor", phase="capture", op="loop")
        inputs.append(v)
        return Operand(len(inputs) - 1)

    gate = operand(going) if going is not None else None
    groups = [[operand(v) for v in group] for group in (carried, sliced, tensors)]
    call = LibraryCall(
        "loop", TracedLoop(module, tuple(order), stacked, loop.backwards), (steps, gate, *groups, numbers),
        reason="loop",
        pure=all(op.call is None or op.call.pure for op in body.ops), reuses=-1,
        lies=tuple(dims.dense_strides(v.shape) for v in inputs), loop=loop,
    )  # fmt: skip
    return call, inputs


def _listed(part: object) -> list[object]:
    assert isinstance(part, (list, tuple))
    return list(part)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _number(steps: object) -> Expr | None:
    return dims.integer(steps) if isinstance(steps, int) else steps if isinstance(steps, Expr) else None


def _dense(body: Graph) -> dict[Value, Layout]:
    """Layouts of a body: whoever runs it sees to it that all it takes and gives is dense."""
    shown = [v for v in (*body.inputs, *body.outputs) if isinstance(v, Value)]
    held = {v: layout for v, layout in body.layouts.items() if v in body.constants}
    return {**held, **{v: Layout(dims.dense_strides(v.shape)) for v in shown if v not in body.constants}}


@dataclass(frozen=True, slots=True)
class TracedLoop(Routine):
    """The loop in plain torch, called as `Loop` says. What `module` computes, the loop's body says as well."""

    module: Callable[..., Sequence[Tensor]] = field(metadata=TOLD)
    order: tuple[int, ...]
    stacked: int
    backwards: bool

    def bind(self) -> Callable[..., tuple[Tensor, ...]]:
        """What runs."""
        return self._run

    def _run(
        self, steps: int | None, going: Tensor | None, carried: Sequence[Tensor], sliced: Sequence[Tensor],
        tensors: Sequence[Tensor], numbers: Sequence[object],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        outer: list[object] = [None] * len(self.order)
        for k, value in zip(self.order, (*tensors, *numbers), strict=True):
            outer[k] = value
        with torch.no_grad():
            return run_eagerly(
                self.module, steps, going, self.stacked, self.backwards, carried, sliced, outer
            )
