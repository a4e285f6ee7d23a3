"""Several steps of a loop as one body: what one step hands to the next need not leave the kernel that makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count as numbers_from

from tilewright.ir.expr import Expr, call, integer, read
from tilewright.ir.graph import Graph, Loop, Op, Origin, Value
from tilewright.ir.tensor import TensorExpr
from tilewright.library.select import is_contraction
from tilewright.target import Target
from tilewright.tuning.search_limits import GROUPS


def steps_together(loop: Loop, target: Target) -> int:
    """How many steps of `loop` to make one body: a power of two, 1 where its steps stay alone.

    Steps with calls or matrix products do: each is kernels of its own anyway. So do those that data may end."""
    body = loop.body
    if loop.conditional or body.writes or body.preconditions or body.placed or any(body.returned):
        return 1
    if any(op.expr is None or op.kernel >= 0 or is_contraction(op) for op in body.ops):
        return 1
    found = 1
    while 2 * found <= min(target.loop_steps, GROUPS.max_joined_step_ops // max(1, len(body.ops))):
        found *= 2
    return found


def unroll_steps(loop: Loop, count: int) -> Graph:
    """A body that does `count` steps of `loop`, which `steps_together` allows. It takes the counter of the first one,
    the carried values, the slices of each step, and the rest; it gives the last carried values, then what each step
    stacks."""
    body = loop.body
    fresh = numbers_from(body.fresh_id())
    tensors = [v for v in body.inputs if isinstance(v, Value)]
    counter, first = tensors[0], 1 + loop.carried
    carried, sliced = tensors[1:first], tensors[first : first + loop.sliced]
    state: list[Value] = list(carried)
    slices: list[Value] = []
    stacked: list[Value] = []
    ops: list[Op] = []
    layouts = {v: layout for v, layout in body.layouts.items() if v in body.inputs}
    origins: list[Origin] = []
    for number in range(count):
        parts = sliced if not number else [replace(v, id=next(fresh)) for v in sliced]
        slices += parts
        table = dict(zip((*carried, *sliced), (*state, *parts), strict=True))
        if number and any(counter in op.inputs for op in body.ops):
            ops.append(_later(counter, number, Value(next(fresh), (), counter.dtype)))
            table[counter] = ops[-1].output
        made = {v: replace(v, id=next(fresh)) if number else v for op in body.ops for v in op.outputs}
        table |= made
        shift = number * len(body.origins)
        origins += [_shifted(o, table, shift) for o in body.origins]
        ops += [_moved(op, table, shift) for op in body.ops]
        layouts |= {table[v]: body.layouts[v] for v in sliced if v in body.layouts}
        results = _put(table, [v for v in body.outputs if isinstance(v, Value)])
        state, stacked = list(results[: loop.carried]), [*stacked, *results[loop.carried :]]
    rest = [v for v in body.inputs if not isinstance(v, Value) or v not in {counter, *carried, *sliced}]
    inputs = (counter, *carried, *slices, *rest)
    return replace(
        body, inputs=inputs, ops=tuple(ops), outputs=(*state, *stacked), origins=tuple(origins), layouts=layouts
    )  # fmt: skip


def _put(table: dict[Value, Value], values: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(table.get(v, v) for v in values)


def _shifted(origin: Origin, table: dict[Value, Value], origins: int) -> Origin:
    """An origin of another step, `origins` later."""
    inputs, outputs = _put(table, origin.inputs), _put(table, origin.outputs)
    return replace(origin, id=origin.id + origins, inputs=inputs, outputs=outputs)


def _moved(op: Op, table: dict[Value, Value], origins: int) -> Op:
    """An op of another step, whose origins come `origins` later."""
    return replace(
        op, inputs=_put(table, op.inputs), outputs=_put(table, op.outputs),
        origin=op.origin + origins if op.origin >= 0 else op.origin, absorbed=tuple(o + origins for o in op.absorbed),
    )  # fmt: skip


def _later(counter: Value, number: int, made: Value) -> Op:
    """The counter of step `number` of a body."""
    value: Expr = call("add", read(0, (), counter.dtype), integer(number))
    return Op("counter", (counter,), (made,), TensorExpr((), (value,)))
