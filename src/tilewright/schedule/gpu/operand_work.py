"""What a block loads and computes for an operand of a product: a matrix as it lies in memory, or one that is unpacked
on the way (words of packed numbers, with scales)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.analysis.runs import side_by_side, words_of
from tilewright.ir.dtype import DType, i64
from tilewright.ir.expr import SCALARS, Axis, Expr, axes_of, axis, walk
from tilewright.ir.graph import Value
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import CONTRACTION, GPU_COST


@dataclass(frozen=True, slots=True)
class OperandWork:
    """For each element of an operand: bytes that are loaded, copies that do so (parts of one, of up to 16 bytes), and
    operations that make it of them. `gathered`: threads load single elements, since none lie side by side that could be
    copied at once. `described`: a tensor descriptor reaches its blocks, so that no thread computes addresses."""

    loaded_bytes: float
    copies: float
    operations: float
    gathered: bool
    described: bool = False


def operand_work(operand: Expr, axes: Sequence[Axis], params: Sequence[Value], dtype: DType) -> OperandWork:
    """The work of an operand over two classes, which products take as numbers of type `dtype`. What is made of floats
    counts as if it lay in memory."""
    tile, whole = CONTRACTION.min_block_side, {axis(a) for a in axes}
    reads = [x for x in walk(operand) if x.op == "read" and isinstance(x.value, int)]
    words = [
        (words_of(x.args[0], axes, tile), params[x.value].dtype) for x in reads if isinstance(x.value, int)
    ]
    packed = [(w, of) for w, of in words if not of.is_float and w.is_whole]
    if not packed:
        run = min((side_by_side(x.args[0], axes, tile) for x in reads), default=tile) * dtype.bytes
        copies = dtype.bytes / min(run, GPU_COST.max_copy_bytes)
        described = operand in reads and _is_matrix(operand, axes, dtype)
        return OperandWork(dtype.bytes, copies, 0.0, run < GPU_COST.min_copy_bytes, described)
    loaded = sum(of.bytes / math.prod(w.counts.values()) for w, of in packed)
    gathered = any(w.side_by_side() * of.bytes < GPU_COST.min_copy_bytes for w, of in packed)
    made = [x for x in walk(operand) if x.op in SCALARS and x.dtype is not i64 and axes_of(x) >= whole]
    copies = loaded / GPU_COST.max_copy_bytes
    return OperandWork(loaded, copies, sum(SCALARS[x.op].cost for x in made), gathered)


def _is_matrix(read: Expr, axes: Sequence[Axis], dtype: DType) -> bool:
    """Whether a read goes along memory by one class and by whole granules by the others (see
    `lower.access.descriptors`)."""
    steps = [dims.coefficient(read.args[0], axis(a)) for a in axes]
    granule = max(1, GPU_COST.descriptor_granule_bytes // dtype.bytes)
    near = [step for step in steps if step is dims.ONE]
    return len(near) == 1 and all(
        step is dims.ONE or (step is not None and not axes_of(step) and _is_whole(step, granule))
        for step in steps
    )


def _is_whole(step: Expr, granule: int) -> bool:
    """Whether a step is a multiple of a granule, if it is known."""
    number = dims.static(step)
    return number is None or number % granule == 0
