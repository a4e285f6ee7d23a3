"""Pointwise ops that make an operand of a product out of less memory: words of packed numbers, or bytes, with scales.

A product that computes them on its way reads that memory instead of what they make, and nothing is stored between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.expr import walk
from tilewright.ir.graph import Op, Value
from tilewright.tuning.search_limits import PRODUCTS


def unpacking_ops(
    operand: Value,
    producer: Mapping[Value, Op],
    readers: Mapping[Value, Sequence[Op]],
    kept: Set[Value],
    hints: SizeHints,
) -> set[Op]:
    """What makes an operand, if nobody else reads it and it reads less than it makes; nothing else. `readers` are those
    of values that somebody reads, `kept` what leaves the graph."""
    found: set[Op] = set()
    inputs: dict[Value, None] = {operand: None}
    while len(found) <= PRODUCTS.max_ops:
        op = next(
            (
                p
                for v in inputs
                if (p := producer.get(v)) is not None and _joins(p, found, operand, readers, kept)
            ),
            None,
        )
        if op is None:
            break
        found.add(op)
        for v in op.outputs:
            inputs.pop(v, None)
        inputs |= dict.fromkeys(op.inputs)
    read = sum(hints.estimate(v.numel) * v.dtype.bytes for v in inputs)
    made = hints.estimate(operand.numel) * operand.dtype.bytes
    return found if read <= PRODUCTS.max_unpacked_ratio * made else set()


def _joins(
    op: Op, found: Set[Op], operand: Value, readers: Mapping[Value, Sequence[Op]], kept: Set[Value]
) -> bool:
    """Whether an op is pointwise at places that no data decide, and read by those `found` alone, or, of the operand, by
    one product."""
    e = op.expr
    if e is None or op.kernel >= 0 or not e.is_pointwise or len(op.outputs) != 1:
        return False
    if any(
        x.op == "read"
        for body in e.body
        for r in walk(body)
        if r.op == "read"
        for a in r.args
        for x in walk(a)
    ):
        return False
    by, made = readers.get(op.output, ()), op.output
    return made not in kept and (len(by) == 1 if made is operand else all(r in found for r in by))
