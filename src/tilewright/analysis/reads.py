"""How much of a tensor some ops read."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.expr import Expr, axes_of, axis, walk
from tilewright.ir.graph import Op, Value
from tilewright.ir.sizes import dims


def bytes_read(ops: Sequence[Op], values: Sequence[Value]) -> Expr:
    """Bytes that some ops read of tensors: all of each, or the places that are asked for where these are fewer."""
    return (
        dims.add(*(dims.mul(_read_of(ops, v), dims.integer(v.dtype.bytes)) for v in values))
        if values
        else dims.ZERO
    )


def _read_of(ops: Sequence[Op], value: Value) -> Expr:
    """Elements: each access reads as many as it has places, and where these are found in data as the op has points."""
    counts: list[Expr] = []
    for op in ops:
        if value not in op.inputs:
            continue
        if op.expr is None:
            return value.numel
        for x in dict.fromkeys(r for b in op.expr.body for r in walk(b) if r.op == "read"):
            assert isinstance(x.value, int)
            if op.inputs[x.value] != value:
                continue
            used = {a for i in x.args for a in axes_of(i)}
            found = any(r.op == "read" for i in x.args for r in walk(i))
            axes = [a for a in op.expr.axes + op.expr.reduce if axis(a) in used]
            counts.append(op.expr.points() if found else dims.prod(a.extent for a in axes))
    return (
        value.numel if not counts or value.numel in counts else dims.minimum(value.numel, dims.add(*counts))
    )
