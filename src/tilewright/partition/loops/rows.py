"""Loops whose rows go their own ways: a body that makes each row of its results of that row alone, as the cells of
recurrent layers do, does the same on a part of the rows. Threads that take a part each never wait for one another."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from tilewright.ir.expr import Expr, axes_of, axis, substitute, walk
from tilewright.ir.graph import Graph, Loop, Op, Origin, Value
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.target import MemoryKind, Target


def rows_of(loop: Loop, body: Graph) -> int | None:
    """How many rows a loop has: the first dim of all that it carries, slices and stacks, if that is known, and each is
    made of itself alone. None for any other loop. `body` is the loop's, with each result once."""
    tensors = [v for v in body.inputs if isinstance(v, Value)]
    own = tensors[1 : 1 + loop.carried + loop.sliced]
    results = [v for v in body.outputs if isinstance(v, Value)]
    if loop.conditional or loop.gated or not own or len(results) != len(body.outputs):
        return None
    if body.writes or body.preconditions or body.placed or any(body.returned):
        return None
    if any(not v.shape for v in (*own, *results)):
        return None
    counts = {dims.static(v.shape[0]) for v in (*own, *results)}
    (rows,) = counts if len(counts) == 1 else (None,)
    if rows is None:
        return None
    found = _rowwise(body, own)
    return rows if found is not None and found.issuperset(results) else None


def parts_for(loop: Loop, body: Graph, rows: int, threads: int, target: Target) -> int:
    """Into how many equal parts to take the rows of a body: at most one for each thread. 1 where `target` has no use
    for it, or a core's cache has no room for what all rows read (weights): each thread would fetch it in each step."""
    cache = target.level(MemoryKind.SHARED)
    tensors = [v for v in body.inputs if isinstance(v, Value)]
    shared = (*body.constants, *tensors[1 + loop.carried + loop.sliced :])
    held = [(dims.static(v.numel), v.dtype.bytes) for v in shared]
    sizes = [count * size for count, size in held if count is not None]
    if not target.loop_rows or cache is None or len(sizes) < len(held) or sum(sizes) > cache.capacity:
        return 1
    return max(
        (n for n in range(2, threads + 1) if rows % n == 0 and rows // n >= target.loop_rows), default=1
    )


def part_of(loop: Loop, body: Graph, rows: int) -> Graph:
    """The body of `loop` on `rows` rows. `rows_of` has found that it has rows."""
    tensors = [v for v in body.inputs if isinstance(v, Value)]
    found = _rowwise(body, tensors[1 : 1 + loop.carried + loop.sliced])
    assert found is not None
    count = dims.integer(rows)
    table = {v: replace(v, shape=(count, *v.shape[1:])) for v in found}

    def put(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(table.get(v, v) for v in values)

    def put_any(values: Sequence[Value | Expr | None]) -> tuple[Value | Expr | None, ...]:
        return tuple(table.get(v, v) if isinstance(v, Value) else v for v in values)

    ops = [
        replace(
            op, inputs=put(op.inputs), outputs=put(op.outputs),
            expr=_shortened(op.expr, count) if op.expr is not None and op.outputs[0] in found else op.expr,
        )
        for op in body.ops
    ]  # fmt: skip
    origins = tuple(replace(o, inputs=put(o.inputs), outputs=put(o.outputs)) for o in body.origins)
    inputs = tuple(table.get(v, v) if isinstance(v, Value) else v for v in body.inputs)
    layouts = {table.get(v, v): layout for v, layout in body.layouts.items()}
    return replace(
        body, inputs=inputs, ops=tuple(ops), outputs=put_any(body.outputs), origins=origins, layouts=layouts
    )


def _rowwise(body: Graph, own: Sequence[Value]) -> set[Value] | None:
    """The values that have rows, which `own` have; None where a row is made of others, or of its number."""
    found = set(own)
    others = {*body.inputs, *body.constants} - found
    for op in body.ops:
        if found.isdisjoint(op.inputs):
            others |= set(op.outputs)
            continue
        if op.expr is None or not _keeps_rows(op, op.expr, found):
            return None
        if op.origin >= 0 and not _calls_alike(body.origins[op.origin], others):
            return None
        found |= set(op.outputs)
    dense = (
        v not in found or layout.strides == dims.dense_strides(v.shape) for v, layout in body.layouts.items()
    )
    return found if all(dense) else None


def _keeps_rows(op: Op, expr: TensorExpr, found: set[Value]) -> bool:
    """Whether each row of the results is made of that row of what has rows, and does not know its number."""
    if not expr.axes or expr.scan is expr.axes[0]:
        return False
    sources = (v for v in op.inputs if v in found)
    if any(not dims.equal(v.shape[0], expr.axes[0].extent) for v in sources):  # the first rows alone
        return False
    row = axis(expr.axes[0])
    if row in expr.body:
        return False
    for e in (x for b in expr.body for x in walk(b)):
        if e.op != "read":
            if e is not row and row in e.args:
                return False
            continue
        assert isinstance(e.value, int)
        rows, others = (e.args[:1], e.args[1:]) if op.inputs[e.value] in found else ((), e.args)
        if any(r is not row for r in rows) or any(row in axes_of(a) for a in others):
            return False
    return True


def _calls_alike(origin: Origin, others: Set[object]) -> bool:
    """Whether the call of a node, if it has one, reads and makes rows that lie one behind the other: how far apart
    anything lies does not hang on how many they are. `others` have no rows."""
    call = origin.call
    if call is None:
        return True
    operands = [*zip(origin.inputs, call.lies, strict=False), *zip(origin.inputs, call.seen, strict=False)]
    known = [*call.strides, *(s for v, s in operands if v not in others)]
    return all(s is None or _rows_outermost(s) for s in known)


def _rows_outermost(strides: Sequence[Expr]) -> bool:
    steps = [n for s in strides if (n := dims.static(s)) is not None]
    return len(steps) == len(strides) and (not steps or steps[0] == max(steps))


def _shortened(expr: TensorExpr, count: Expr) -> TensorExpr:
    """The expression with `count` rows."""
    old, new = expr.axes[0], replace(expr.axes[0], extent=count)
    index = dims.ZERO if count is dims.ONE else axis(new)
    return replace(
        expr, axes=(new, *expr.axes[1:]), body=tuple(substitute(b, {axis(old): index}) for b in expr.body)
    )
