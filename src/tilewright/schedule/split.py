"""The role *split*, as a rewrite: a fold over much with few results becomes two, so that its parts run side by side.

    s[i] = sum over r < N of f(i, r)
 => t[i, p] = sum over q < Q of (f(i, p*Q + q) where p*Q + q < N)        Q = ceil(N / P)
    s[i] = sum over p < P of t[i, p]

The parts are merged in index order, and P follows from the sizes alone, so the result does not depend on threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..errors import IllegalSchedule
from ..ir import dims
from ..ir.expr import Axis, Expr, axis, call, read, slot, substitute, where
from ..ir.graph import Graph, Layout, Op, Value
from ..ir.kernel import Kernel
from ..ir.reduction import Reduction
from ..ir.tensor import TensorExpr
from .search import estimate

Price = Callable[[Kernel, Mapping[Value, Layout]], float]

SMALLEST = 1 << 14
"""Elements folded into one result below which a split is not tried."""

LEAST_PARTS, LARGEST_PARTS = 8, 64


def split_folds(graph: Graph, price: Price) -> Graph:
    """Split each fold whose two kernels are modelled as faster than one."""
    fresh = 1 + max((v.id for op in graph.ops for v in op.outputs), default=0)
    ops: list[Op] = []
    for op in graph.ops:
        halves = split_fold(op, fresh)
        if halves is not None and _cheaper(op, halves, graph.layouts, price):
            fresh += len(halves[0].outputs)
            ops += halves
        else:
            ops.append(op)
    return graph.with_ops(ops)


def _cheaper(op: Op, halves: tuple[Op, Op], layouts: Mapping[Value, Layout], price: Price) -> bool:
    try:
        whole = price(Kernel((op,), op.outputs), layouts)
        return sum(price(Kernel((h,), h.outputs), layouts) for h in halves) < whole
    except IllegalSchedule:
        return False


def split_fold(op: Op, fresh: int) -> tuple[Op, Op] | None:
    """The two halves of a fold (their partial results numbered from `fresh`), or None if it is too small, ordered, or
    its reduction has no neutral element."""
    expr = op.expr
    if expr is None or expr.reduction is None or expr.scan is not None:
        return None
    neutral = _neutral(expr.reduction)
    whole = estimate(dims.prod(a.extent for a in expr.reduce))
    kept = estimate(dims.prod(expr.shape))
    if neutral is None or whole < SMALLEST or kept >= LARGEST_PARTS:
        return None
    wide = [a for a in expr.reduce if estimate(a.extent) >= LEAST_PARTS]
    r = wide[0] if wide else max(expr.reduce, key=lambda a: estimate(a.extent))
    most = min(LARGEST_PARTS, estimate(r.extent), whole // (SMALLEST // 4))
    parts = dims.integer(1 << (most.bit_length() - 1))
    return _halves(op, expr, r, parts, neutral, fresh)


def _neutral(reduction: Reduction) -> tuple[Expr, ...] | None:
    """Elements whose state is the identity, where such elements exist."""
    return reduction.identity if reduction.lifted(reduction.identity) == reduction.identity else None


def _halves(
    op: Op, expr: TensorExpr, r: Axis, parts: Expr, neutral: tuple[Expr, ...], fresh: int
) -> tuple[Op, Op]:
    assert expr.reduction is not None
    length = dims.ceildiv(r.extent, parts)
    p, q = Axis("p", parts), Axis("q", length)
    place = dims.add(dims.mul(axis(p), length), axis(q))
    body = [substitute(b, {axis(r): place}) for b in expr.body]
    if not dims.equal(dims.mul(parts, length), r.extent):
        inside = call("lt", place, r.extent)
        body = [where(inside, b, n) for b, n in zip(body, neutral, strict=True)]
    state = replace(expr.reduction, finish=_slots(expr.reduction))
    reduce = tuple(q if a == r else a for a in expr.reduce)
    partial = TensorExpr((*expr.axes, p), tuple(body), reduce, state)
    values = tuple(Value(fresh + k, partial.shape, t) for k, t in enumerate(state.results))
    first = Op(f"{op.name}_part", op.inputs, values, expr=partial, origin=op.origin)
    index = [dims.ZERO if a.extent is dims.ONE else axis(a) for a in expr.axes]
    merge = TensorExpr(
        expr.axes,
        tuple(read(k, (*index, axis(p)), v.dtype) for k, v in enumerate(values)),
        (p,),
        expr.reduction,
    )
    return first, Op(op.name, values, op.outputs, expr=merge, origin=op.origin)


def _slots(reduction: Reduction) -> tuple[Expr, ...]:
    return tuple(slot("a", k, t) for k, t in enumerate(reduction.state))
