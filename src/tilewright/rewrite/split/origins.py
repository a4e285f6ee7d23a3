"""Means of columns that are counted from their first element, where that is closer.

    s = sum over r of x(r)      t = sum over r of (x(r) - o)      o = x(0)
    o + t / N  if |t| <= |s|  else  s / N

Both are the mean. Each is off by units of the size of its sum: of equal elements t is 0, and the mean is exact, as that
of a library which updates it from element to element. From an element far away t is the larger one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tilewright.ir.expr import Expr, axis, call, const, read, substitute, transform, walk, where
from tilewright.ir.graph import Op, Value
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.rewrite.algebra.region import renumber_reads

from .seen_reads import Inside

MAX_ORIGIN = 2.0**60
"""Columns do not count from an element of at least this size: the distance of another one could overflow."""

Divides = Callable[[Expr], bool]


def origin(expr: TensorExpr) -> Expr:
    """The first element of a column, from which all others are counted; 0 in the place of a large one, and where there
    is no element."""
    first = substitute(expr.body[0], {axis(a): dims.ZERO for a in expr.reduce})
    zero, most = const(0, first.dtype), const(MAX_ORIGIN, first.dtype)
    near = where(call("lt", call("abs", first), most), first, zero)
    count = dims.prod(a.extent for a in expr.reduce)
    return near if dims.at_least(count, 1) else where(call("gt", count, dims.ZERO), near, zero)


def from_memory(op: Op, inside: Inside) -> Op | None:
    """`op` over what lies in memory, with the pointwise ops before it as part of its body: another kernel that reads
    one element would have all of them stored. None where these are too deep."""
    assert op.expr is not None
    body = inside.inlined(inside.body(op))
    reads = [x for x in walk(body) if x.op == "read"]
    if any(inside.opened(x) is not x for x in reads):
        return None
    place = {n: k for k, n in enumerate(dict.fromkeys(x.value for x in reads if isinstance(x.value, int)))}
    expr = renumber_reads(replace(op.expr, body=(body,)), place.__getitem__)
    return replace(op, inputs=tuple(inside.values[n] for n in place), expr=expr)


def means(op: Op, total: Value, divides: Divides) -> list[Expr]:
    """Where `op` makes the mean of `total`: quotients by the number of elements, or products with its inverse."""
    if op.expr is None or total not in op.inputs:
        return []
    found = {x: None for e in op.expr.body for x in walk(e) if x.op in ("div", "mul")}
    return [
        x
        for x in found
        if x.args[0].op == "read"
        and _value(op, x.args[0]) is total
        and divides(x)
        and not _indices(x.args[1])
    ]


def count_from_origin(ops: Sequence[Op], first: Op, moved: Value, divides: Divides) -> list[Op]:
    """`ops` with every mean of the sums of `first` counted from its origin: `moved` holds the sums of the distances
    from there."""
    fresh = 1 + max(v.id for op in ops for v in (*op.inputs, *op.outputs))
    total, made, reused = first.output, list[Op](), dict[tuple[str, Expr], Value]()
    for op in ops:
        found = means(op, total, divides)
        for x in found:
            if (x.op, x.args[1]) not in reused:
                value = replace(total, id=fresh + len(reused))
                reused[x.op, x.args[1]] = value
                made.append(_mean(first, moved, value, x))
        made.append(_over(op, {x: reused[x.op, x.args[1]] for x in found}) if found else op)
    return made


def _mean(first: Op, moved: Value, made: Value, like: Expr) -> Op:
    """The op of such a mean, with the arithmetic of `like`."""
    assert first.expr is not None
    axes, dtype = first.expr.axes, made.dtype
    index = [dims.ZERO if a.extent is dims.ONE else axis(a) for a in axes]
    near, distance = (read(len(first.inputs) + k, index, dtype) for k in range(2))
    by_origin = call("add", origin(first.expr), call(like.op, near, like.args[1]))
    closer = call("le", call("abs", near), call("abs", distance))
    body = where(closer, by_origin, call(like.op, distance, like.args[1]))
    inputs = (*first.inputs, moved, first.output)
    return Op("mean", inputs, (made,), expr=TensorExpr(axes, (body,)), origin=first.origin)


def _over(op: Op, table: dict[Expr, Value]) -> Op:
    """`op` with reads of values for some of its expressions."""
    assert op.expr is not None
    inputs = (*op.inputs, *dict.fromkeys(table.values()))
    place = {v: k for k, v in enumerate(inputs)}

    def visit(e: Expr) -> Expr | None:
        value = table.get(e)
        return None if value is None else read(place[value], e.args[0].args, value.dtype)

    body = tuple(transform(e, visit) for e in op.expr.body)
    return replace(op, inputs=inputs, expr=replace(op.expr, body=body))


def _value(op: Op, x: Expr) -> Value | None:
    return op.inputs[x.value] if isinstance(x.value, int) else None


def _indices(e: Expr) -> bool:
    """Whether an expression differs from element to element."""
    return any(x.op == "read" or x.op == "axis" for x in walk(e))
