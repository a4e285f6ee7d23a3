"""What a block loads and computes for an operand of a product: a matrix as it lies in memory, or one that is unpacked
on the way (words of packed numbers, with scales)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.analysis.contraction import stored_half
from tilewright.analysis.runs import side_by_side, words_of
from tilewright.ir.dtype import DType, i64
from tilewright.ir.expr import SCALARS, Axis, Expr, axes_of, axis, walk
from tilewright.ir.graph import Value
from tilewright.tuning.thresholds import CONTRACTION, GPU_COST


@dataclass(frozen=True, slots=True)
class OperandWork:
    """For each element of an operand: bytes that are loaded, and operations that make it of them. `gathered`: threads
    load single elements, since none lie side by side that could be copied at once."""

    loaded_bytes: float
    operations: float
    gathered: bool


def operand_work(operand: Expr, axes: Sequence[Axis], params: Sequence[Value], dtype: DType) -> OperandWork:
    """The work of an operand over two classes, which products take as numbers of type `dtype`."""
    if stored_half(operand, params) is not None:
        least, tile = GPU_COST.min_copy_bytes // dtype.bytes, CONTRACTION.min_block_side
        offsets = [x.args[0] for x in walk(operand) if x.op == "read"]
        return OperandWork(dtype.bytes, 0.0, any(side_by_side(e, axes, tile) < least for e in offsets))
    loaded, gathered = 0.0, False
    for x in walk(operand):
        if x.op != "read" or not isinstance(x.value, int):
            continue
        words, size = words_of(x.args[0], axes, CONTRACTION.min_block_side), params[x.value].dtype.bytes
        if words.is_whole:
            loaded += size / math.prod(words.counts.values())
            gathered |= words.side_by_side() * size < GPU_COST.min_copy_bytes
    whole = {axis(a) for a in axes}
    made = [x for x in walk(operand) if x.op in SCALARS and x.dtype is not i64 and axes_of(x) >= whole]
    return OperandWork(loaded, sum(SCALARS[x.op].cost for x in made), gathered)
