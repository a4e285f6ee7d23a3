"""Loops as calls: what each step of one runs, with frozen operands as constants of its body."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewright.ir.expr import axis
from tilewright.ir.graph import Graph, Layout, LibraryCall, Loop, Op, Operand, Routine, Value
from tilewright.ir.sizes import dims
from tilewright.library.frozen_operands import Frozen
from tilewright.library.select import drop_unread

Run = Callable[..., object]


def with_bodies(graph: Graph, compiled: Callable[[Loop, Run], Run], *, dense_slices: bool) -> Graph:
    """The graph with each loop run by what `compiled` makes of it and of what means the same in plain torch. What is
    frozen outside and the same in every step is a constant of the body. With `dense_slices`, these
    lie densely for it; otherwise they come as they are."""
    frozen = Frozen(graph)
    ops: list[Op] = []
    for op in graph.ops:
        call = op.call
        if call is None or call.loop is None:
            ops.append(op)
            continue
        inputs, call, loop, meaning = _freeze(op, call, call.loop, frozen)
        first = loop.gated + loop.carried
        slices = range(0) if dense_slices else range(first, first + loop.sliced)
        strides = tuple(None if k in slices else s for k, s in enumerate(call.lies))
        call = replace(call, function=compiled(loop, meaning), loop=loop, own=True, lies=strides)
        ops.append(replace(op, inputs=inputs, call=call))
    return drop_unread(graph.with_ops(ops))


def _freeze(
    op: Op, call: LibraryCall, loop: Loop, frozen: Frozen
) -> tuple[tuple[Value, ...], LibraryCall, Loop, Run]:
    """Operands, call and loop without what is frozen, and what the call means."""
    body = loop.body
    first = loop.gated + loop.carried + loop.sliced
    places = [v for v in body.inputs if isinstance(v, Value)][1 + loop.carried + loop.sliced :]
    known = {k: t for k, v in enumerate(op.inputs) if k >= first and (t := frozen.tensor(v)) is not None}
    held = {places[k - first]: t.contiguous() for k, t in known.items()}
    unknown = [k for k in range(len(op.inputs)) if k not in known]
    loop = replace(
        loop,
        body=replace(
            body,
            inputs=tuple(v for v in body.inputs if not isinstance(v, Value) or v not in held),
            constants={**body.constants, **held},
        ),
    )
    steps, gate, carried, sliced, _, numbers = call.args
    outer = [Operand(n) for n, k in enumerate(unknown) if k >= first]
    meaning = (
        LoopWithHeld(call.function, {k - first: t for k, t in known.items()}) if known else call.function
    )
    lies = tuple(call.lies[k] for k in unknown)
    call = replace(call, args=(steps, gate, carried, sliced, outer, numbers), lies=lies)
    return tuple(op.inputs[k] for k in unknown), call, loop, meaning


@dataclass(frozen=True, eq=False)
class LoopWithHeld(Routine):
    """A loop that is given what is the same in every step but for what is `held`, by its place there."""

    run: Run
    held: Mapping[int, Tensor]

    def bind(self) -> Run:
        """What runs."""
        return self._call

    def _call(
        self, steps: object, gate: object, carried: Sequence[Tensor], sliced: Sequence[Tensor],
        outer: Sequence[Tensor], numbers: object,
    ) -> object:  # fmt: skip
        held = self.held
        where = next((t.device for t in (*carried, *sliced, *outer)), torch.device("cpu"))
        rest, count = iter(outer), len(held) + len(outer)
        every = [held[k].to(where) if k in held else next(rest) for k in range(count)]
        return self.run(steps, gate, carried, sliced, every, numbers)


def distinct(body: Graph) -> tuple[Graph, tuple[int, ...]]:
    """The body with each of its results once, and which of those each result is."""
    producer, outside = body.producer(), {*body.inputs, *body.constants}
    results: list[Value] = []
    for v in body.outputs:
        assert isinstance(v, Value)
        op = producer.get(v)
        while op is not None and _is_identity(op) and op.inputs[0] not in outside:
            v = op.inputs[0]
            op = producer.get(v)
        results.append(v)
    once = tuple(dict.fromkeys(results))
    layouts = {**body.layouts, **{v: Layout(dims.dense_strides(v.shape)) for v in once}}
    return drop_unread(replace(body, outputs=once, layouts=layouts)), tuple(once.index(v) for v in results)


def _is_identity(op: Op) -> bool:
    """Whether an op only shows its operand as it is."""
    e = op.expr
    if e is None or not e.is_view() or len(op.inputs) != 1 or op.inputs[0].shape != op.output.shape:
        return False
    here = [dims.ZERO if a.extent is dims.ONE else axis(a) for a in e.axes]
    return list(e.body[0].args) == here and op.inputs[0].dtype == op.output.dtype
