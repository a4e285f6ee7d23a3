"""A captured graph as torch runs it, op by op, and with it its loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from tilewright.capture.loops.op import run_eagerly
from tilewright.interp.graph import bind
from tilewright.ir.expr import Expr, Symbol
from tilewright.ir.graph import Graph, Loop, Operand, Routine, Value
from tilewright.ir.identity import TOLD
from tilewright.ir.kernel import LibraryStep
from tilewright.ir.sizes.host import Number, number
from tilewright.library.select import library_cover
from tilewright.runtime.plan.arguments import Argument
from tilewright.runtime.plan.known_sizes import Result


class OpByOp:
    """Runs each captured op as torch's own call, and each loop step by step."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @cached_property
    def _steps(self) -> tuple[tuple[LibraryStep, OpByOp | None], ...]:
        """What runs, each loop with its body."""
        steps = [s for s in library_cover(self.graph).steps if isinstance(s, LibraryStep)]
        loops = [None if s.op.call is None else s.op.call.loop for s in steps]
        return tuple(
            (s, None if loop is None else OpByOp(loop.body)) for s, loop in zip(steps, loops, strict=True)
        )

    def constants(self) -> list[Tensor | None]:
        """Those of the graph, then those of the bodies of its loops, in order."""
        own = [t if isinstance(t, Tensor) else None for t in self.graph.constants.values()]
        return own + [t for _, body in self._steps if body is not None for t in body.constants()]

    def run(self, args: Sequence[Argument], constants: Iterator[Tensor | None]) -> list[Result]:
        """The results, in order. `constants` are as many as `constants()`; inputs that are written to are written."""
        graph = self.graph
        values: dict[Value, object] = {v: next(constants) for v in graph.constants}
        sizes: dict[str, Number] = {}
        for want, given in zip(graph.inputs, args, strict=True):
            if isinstance(want, Value):
                values[want] = given
            elif isinstance(want.value, Symbol):
                sizes[want.value.name] = cast(Number, given)
        for v in graph.inputs:
            if isinstance(v, Value):
                bind(v, tuple(cast(Tensor, values[v]).shape), cast("dict[str, int | float]", sizes))
        for step, body in self._steps:
            if body is None:
                _run(step, values, sizes)
            else:
                held = [next(constants) for _ in body.constants()]
                _run(step, values, sizes, LoopInTorch(_loop_of(step), body, held))
        results = [_result(o, values, sizes) for o in graph.outputs]
        for w in graph.writes:
            cast(Tensor, args[w.input]).copy_(cast(Tensor, values[w.value]))
        return results


@dataclass(frozen=True, eq=False)
class LoopInTorch(Routine):
    """A loop in plain torch, called as `Loop` says, of nothing but what its body says. `held` are the body's constants,
    if others stand in their place."""

    loop: Loop = field(metadata=TOLD)
    body: OpByOp = field(metadata=TOLD)
    held: Sequence[Tensor | None] | None = field(default=None, metadata=TOLD)

    def bind(self) -> Callable[..., tuple[Tensor, ...]]:
        """What runs."""
        return self._run

    def _run(
        self, steps: int | None, going: Tensor | None, carried: Sequence[Tensor], sliced: Sequence[Tensor],
        tensors: Sequence[Tensor], numbers: Sequence[object],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        loop, body = self.loop, self.body
        held = body.constants() if self.held is None else self.held

        def step(*args: Argument) -> list[Tensor]:
            return cast("list[Tensor]", body.run(args, iter(held)))

        with torch.no_grad():
            return run_eagerly(
                step, steps, going, loop.stacked, loop.backwards, carried, sliced, (*tensors, *numbers)
            )


def loop_in_torch(loop: Loop) -> LoopInTorch:
    """What the call of a loop runs."""
    return LoopInTorch(loop, OpByOp(loop.body))


def _loop_of(step: LibraryStep) -> Loop:
    assert step.op.call is not None and step.op.call.loop is not None
    return step.op.call.loop


def _result(o: Value | Expr | None, values: Mapping[Value, object], sizes: Mapping[str, Number]) -> Result:
    if isinstance(o, Value):
        return cast(Tensor, values[o])
    return None if o is None else number(o, sizes)


def _run(
    step: LibraryStep, values: dict[Value, object], sizes: dict[str, Number], loop: LoopInTorch | None = None
) -> None:
    """The call of a step, or that `loop` in its place."""
    op, call = step.op, step.op.call
    assert call is not None
    operands = [values[v] for v in op.inputs]
    kwargs = {name: _filled(a, operands, sizes) for name, a in call.kwargs}
    made = (loop or call.function)(*[_filled(a, operands, sizes) for a in call.args], **kwargs)
    flat = list(_flat(made))
    places = call.places or range(len(op.outputs) + len(op.binds))
    for k, v in zip(places, op.outputs, strict=False):
        values[v] = flat[k]
        if isinstance(flat[k], Tensor):
            bind(v, tuple(cast(Tensor, flat[k]).shape), cast("dict[str, int | float]", sizes))
    for k, e in zip(list(places)[len(op.outputs) :], op.binds, strict=False):
        if isinstance(e.value, Symbol):
            found = flat[k]
            sizes[e.value.name] = cast(Number, found.item() if isinstance(found, Tensor) else found)


def _flat(made: object) -> Sequence[object]:
    if isinstance(made, (tuple, list)):
        return [x for part in cast("Sequence[object]", made) for x in _flat(part)]
    return [made]


def _filled(a: object, operands: Sequence[object], sizes: Mapping[str, Number]) -> object:
    match a:
        case Operand():
            return operands[a.index]
        case Expr():
            return number(a, sizes)
        case list():
            return [_filled(x, operands, sizes) for x in cast("list[object]", a)]
        case tuple():
            return tuple(_filled(x, operands, sizes) for x in cast("tuple[object, ...]", a))
        case _:
            return a
