"""Modelled time of a graph in library calls and the kernels around them."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.graph import Op, Value
from tilewright.target import MemoryKind, Target
from tilewright.tuning.thresholds import LIBRARY


def call_seconds(
    ops: Sequence[Op], outputs: Sequence[Value], target: Target, hints: SizeHints, *, splits: bool = False
) -> float:
    """Seconds of one library call that does `ops` and makes `outputs`, all else staying on chip; of one that `splits`
    operands for matrix units, as no library does."""
    made = {v for op in ops for v in op.outputs}
    read = {v for op in ops for v in op.inputs if v not in made}
    moved = sum(hints.estimate(v.numel) * v.dtype.bytes for v in (*read, *outputs))
    cache = target.level(MemoryKind.L2)
    near = cache is not None and moved < cache.lasting_bytes
    bandwidth = cache.bandwidth if near and cache is not None else target.device.bandwidth
    work = sum(
        2 * hints.estimate(op.expr.points()) / matrix_flops(op, target, splits=splits)
        for op in ops
        if op.expr is not None and op.expr.reduction is not None and op.expr.reduction.combiner == "add"
    )
    return max(moved / bandwidth, work / LIBRARY.reached_peak_ratio) + target.launch_seconds


def touch_seconds(values: Sequence[Value], target: Target, hints: SizeHints) -> float:
    """Seconds that the system takes for the memory of values that live only within a call."""
    if not target.first_touch:
        return 0.0
    sizes = [hints.estimate(v.numel) * v.dtype.bytes for v in values]
    return sum(n for n in sizes if n >= LIBRARY.min_unkept_bytes) / target.first_touch


def matrix_flops(op: Op, target: Target, *, splits: bool = False) -> float:
    """Peak flop/s for the operands of a contraction: of a matrix unit that takes them as they are, or perhaps `splits`
    them, else of the vector units."""
    types = {v.dtype.name for v in op.inputs}
    units = [u for u in target.matrix_units if {u.operand} == types]
    return max((u.flops for u in units if splits or u.precision != "bf16x6"), default=target.flops)
