"""What kernels and calls do, counted, and how long one core takes for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tilewright.ir.dtype import i64
from tilewright.ir.expr import SCALARS, Axis, Expr, Symbol, cost, walk
from tilewright.ir.graph import Op, Value
from tilewright.ir.kernel import Kernel, LibraryStep
from tilewright.ir.sizes import dims
from tilewright.target import MemoryKind, Target
from tilewright.tuning.runtime_thresholds import CPU_WORK

EXPONENTIALS = ("exp", "exp2", "expm1", "sigmoid")
"""Functions that take one exponential each."""


def work_of(ops: Sequence[Op]) -> tuple[Expr, Expr]:
    """Scalar operations on data, and exponentials, of some ops."""
    exps = dims.ZERO
    for op in ops:
        if op.expr is not None:
            powers = sum(x.op in EXPONENTIALS for b in op.expr.body for x in walk(b))
            exps = dims.add(exps, dims.mul(op.expr.points(), dims.integer(powers)))
    return _summed(ops, _on_data), exps


def _summed(ops: Sequence[Op], each: Callable[[Expr], int]) -> Expr:
    """The operations of all points of some ops, of which a body has `each`, and a reduction one more."""
    total = dims.ZERO
    for op in ops:
        if op.expr is not None:
            count = sum(map(each, op.expr.body)) + (op.expr.reduction is not None)
            total = dims.add(total, dims.mul(op.expr.points(), dims.integer(count)))
    return total


@lru_cache(1 << 12)
def _on_data(e: Expr) -> int:
    """The same as `cost`, without what places alone decide: where a window leaves its input, or a mask its triangle."""
    data: dict[Expr, bool] = {}
    total = 0
    for x in walk(e):
        placed = x.op == "const" or isinstance(x.value, (Axis, Symbol))
        data[x] = x.op == "read" or (any(data[a] for a in x.args) if x.args else not placed)
        if (
            data[x]
            and not (x.op == "where" and not data[x.args[0]])
            and x.op in SCALARS
            and x.dtype is not i64
        ):
            total += SCALARS[x.op].cost
    return total


def bytes_of(values: Sequence[Value]) -> Expr:
    """Bytes of some tensors."""
    return (
        dims.add(*(dims.mul(v.numel, dims.integer(v.dtype.bytes)) for v in values)) if values else dims.ZERO
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
        flops = _summed(ops, cost)  # instructions, with those that decide about places
        rates = (
            CPU_WORK.reached_peak_ratio * target.flops / target.cores,
            CPU_WORK.reached_peak_ratio * shared.bandwidth,
        )
        times = [
            dims.floordiv(n, dims.integer(max(1, int(rate * 1e-9))))
            for n, rate in zip((flops, bytes_of(values)), rates, strict=True)
        ]
        return dims.maximum(*times)
