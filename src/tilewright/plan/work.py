"""What kernels and calls do, counted, and how long one core takes for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.ir.expr import Expr, axes_of, axis, cost, walk
from tilewright.ir.graph import Op, Value
from tilewright.ir.kernel import Kernel, LibraryStep
from tilewright.ir.sizes import dims
from tilewright.target import MemoryKind, Target
from tilewright.tuning.thresholds import CPU_WORK

EXPONENTIALS = ("exp", "exp2", "expm1", "sigmoid")
"""Functions that take one exponential each."""


def work_of(ops: Sequence[Op]) -> tuple[Expr, Expr]:
    """Scalar operations and exponentials of some ops."""
    flops = exps = dims.ZERO
    for op in ops:
        if op.expr is not None:
            each = sum(cost(b) for b in op.expr.body) + (op.expr.reduction is not None)
            flops = dims.add(flops, dims.mul(op.expr.points(), dims.integer(each)))
            powers = sum(x.op in EXPONENTIALS for b in op.expr.body for x in walk(b))
            exps = dims.add(exps, dims.mul(op.expr.points(), dims.integer(powers)))
    return flops, exps


def bytes_of(values: Sequence[Value]) -> Expr:
    """Bytes of some tensors."""
    return (
        dims.add(*(dims.mul(v.numel, dims.integer(v.dtype.bytes)) for v in values)) if values else dims.ZERO
    )


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


def ops_by_origin(captured: Sequence[Op]) -> Mapping[int, Sequence[Op]]:
    """The ops that each captured node became, by the node's number."""
    found: dict[int, list[Op]] = {}
    for op in captured:
        found.setdefault(op.origin, []).append(op)
    return found


def origins_of(step: LibraryStep) -> tuple[int, ...]:
    """The captured nodes that a call stands for."""
    return step.origins or ((step.op.origin,) if step.op.origin >= 0 else ())


def done_by(step: LibraryStep, by_origin: Mapping[int, Sequence[Op]]) -> list[Op]:
    """The captured ops that a call does."""
    return [op for origin in sorted(origins_of(step)) for op in by_origin.get(origin, ())]


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Says how long one core of `target` takes for a step; `by_origin` as for `done_by`."""

    target: Target
    by_origin: Mapping[int, Sequence[Op]]

    def __call__(self, step: Kernel | LibraryStep) -> Expr | None:
        """Modelled nanoseconds; None where nothing tells how much there is to do, or threads are no question."""
        if isinstance(step, Kernel):
            ops, values = step.ops, (*step.inputs, *step.outputs)
        else:
            ops = done_by(step, self.by_origin)
            read = dict.fromkeys(v for op in ops for v in op.inputs)
            values = (*read, *step.op.outputs)
        target = self.target
        if not target.alone_seconds or not ops or any(op.expr is None for op in ops):
            return None
        shared = target.level(MemoryKind.L2) or target.device
        flops, _ = work_of(ops)
        rates = (
            CPU_WORK.reached_peak_ratio * target.flops / target.cores,
            CPU_WORK.reached_peak_ratio * shared.bandwidth,
        )
        times = [
            dims.floordiv(n, dims.integer(max(1, int(rate * 1e-9))))
            for n, rate in zip((flops, bytes_of(values)), rates, strict=True)
        ]
        return dims.maximum(*times)
