"""Running sums of singles in doubles: what a scan has summed so far is rounded at every element, so over n of them one
of singles errs n times as much as the library's, whose state is a double on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.dtype import DType, f32, f64
from tilewright.ir.expr import Expr, Slot, call, cast, const, slot
from tilewright.ir.graph import Graph, Op
from tilewright.ir.reduction import Reduction


def widen_scans(graph: Graph) -> Graph:
    """The graph with doubles as the state of each scan whose state was singles."""
    return graph.with_ops([_wide_op(op) for op in graph.ops])


def _wide_op(op: Op) -> Op:
    expr = op.expr
    if expr is None or expr.scan is None or expr.reduction is None:
        return op
    if any(t is not f32 for t in expr.reduction.state):
        return op
    body = tuple(cast(e, f64) for e in expr.body)
    return replace(op, expr=replace(expr, body=body, reduction=in_doubles(expr.reduction)))


def in_doubles(reduction: Reduction) -> Reduction:
    """A reduction of singles with doubles as elements and state; results are rounded to singles."""
    finish = tuple(cast(_wide(e), f32) for e in reduction.finish)
    return replace(
        reduction, elements=_types(reduction.elements), state=_types(reduction.state),
        identity=_all(reduction.identity), lift=_all(reduction.lift), merge=_all(reduction.merge), finish=finish,
        step=_all(reduction.step), pooled=_all(reduction.pooled),
    )  # fmt: skip


def _types(types: Sequence[DType]) -> tuple[DType, ...]:
    return tuple(f64 if t is f32 else t for t in types)


def _all(exprs: Sequence[Expr]) -> tuple[Expr, ...]:
    return tuple(map(_wide, exprs))


def _wide(e: Expr) -> Expr:
    if isinstance(e.value, Slot):
        return slot(e.value.side, e.value.index, *_types([e.dtype]))
    if e.op == "const":
        return const(e.value, *_types([e.dtype]))  # pyright: ignore[reportArgumentType]  (what a constant holds)
    return call(e.op, *map(_wide, e.args))
