"""One number less a power of another, near it, in doubles: how far the two are apart holds few digits of singles.

    1 - c**n        c = 0.999, n = 1: the power is off by 3e-8, what is left of it by 3e-5 of itself

This is how optimizers correct their first steps. In eager mode they compute it of Python's numbers, which are doubles;
captured, the step is a tensor of one single.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.ir.dtype import f32, f64
from tilewright.ir.expr import Expr, call, cast, make
from tilewright.ir.graph import Graph, Op, Value


def widen_powers(graph: Graph) -> Graph:
    """The graph with doubles within each difference of a constant and a power of a constant, where these are single
    numbers of f32. What the difference is stored in stays."""
    powers = {op.output: op for op in graph.ops if _is_power(op)}
    return graph.with_ops([_wide(op, powers) for op in graph.ops]) if powers else graph


def _is_of_one(op: Op) -> bool:
    """Whether an op makes one result of one operand, element by element, and belongs to no chosen kernel: what such a
    kernel makes on the way may not be read elsewhere."""
    alone = op.kernel < 0 and len(op.inputs) == len(op.outputs) == 1
    return alone and op.expr is not None and op.expr.is_pointwise


def _is_power(op: Op) -> bool:
    if not _is_of_one(op):
        return False
    assert op.expr is not None
    (x,) = op.expr.body
    number = op.output.dtype is f32 and not op.output.shape
    return number and x.op == "pow" and x.args[0].op == "const" and x.args[1].op in ("read", "cast")


def _wide(op: Op, powers: dict[Value, Op]) -> Op:
    """`op` itself, or the same of the power's own exponent."""
    if not _is_of_one(op) or op.inputs[0] not in powers or op.output.dtype is not f32:
        return op
    power = powers[op.inputs[0]]
    assert op.expr is not None and power.expr is not None
    (x,) = op.expr.body
    if x.op != "sub" or {a.op for a in x.args} != {"const", "read"}:
        return op
    base, exponent = power.expr.body[0].args
    of = {"const": _doubled, "read": lambda _: call("pow", _doubled(base), cast(exponent, f64))}
    body = cast(call("sub", *(of[a.op](a) for a in x.args)), f32)
    return replace(op, inputs=power.inputs, expr=replace(op.expr, body=(body,)))


def _doubled(number: Expr) -> Expr:
    """A constant with the digits that the program gave it."""
    return make("const", (), f64, number.value)
