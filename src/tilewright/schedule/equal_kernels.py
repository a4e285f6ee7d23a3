"""Where on its inputs a kernel begins: kernels that differ in nothing else, as the steps of a loop that is written out
do, cost the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.ir.expr import Expr, make, walk
from tilewright.ir.graph import Layout, Op, Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.sizes import dims


def at_first_step(kernel: Kernel, layouts: Mapping[Value, Layout], aligned: int) -> Kernel:
    """A kernel of the same cost that reads its inputs near their beginnings, moved by multiples of `aligned` elements:
    at the second place where it could begin, since at the first one its indices would be shorter. The same kernel if it
    begins there already."""
    back: dict[Value, tuple[Expr, ...]] = {}
    for v, indices in _indices(kernel).items():
        layout = layouts.get(v)
        strides = layout.strides if layout is not None else dims.dense_strides(v.shape)
        dims_read = zip(zip(*indices, strict=True), strides, strict=False)  # nothing where none is read
        steps = tuple(_steps_back(index, stride, aligned) for index, stride in dims_read)
        if any(n is not dims.ZERO for n in steps):
            back[v] = steps
    if not back:
        return kernel
    return replace(kernel, ops=tuple(_moved(op, back) for op in kernel.ops))


def _indices(kernel: Kernel) -> dict[Value, list[tuple[Expr, ...]]]:
    """The indices at which each input is read."""
    found: dict[Value, list[tuple[Expr, ...]]] = {v: [] for v in kernel.inputs}
    for op in kernel.ops:
        for x in op.expr.reads() if op.expr is not None else ():
            v = op.inputs[x.value] if isinstance(x.value, int) else None
            if v in found:
                found[v].append(x.args)
    return found


def _steps_back(index: Sequence[Expr], stride: Expr, aligned: int) -> Expr:
    """By how much all indices of one dim may be less. Data may point anywhere."""
    n = dims.static(stride)
    if n is None or any(x.op in ("read", "checked") for i in index for x in walk(i)):
        return dims.ZERO
    step = aligned // math.gcd(aligned, n)
    lows = [dims.int_range(i)[0] for i in index]
    first = min((0 if low is None else low for low in lows), default=0)
    return dims.integer(max(0, first // step - 1) * step)


def _moved(op: Op, back: Mapping[Value, Sequence[Expr]]) -> Op:
    def change(x: Expr) -> Expr | None:
        steps = back.get(op.inputs[x.value]) if isinstance(x.value, int) else None
        if steps is None:
            return None
        return make("read", tuple(map(dims.sub, x.args, steps)), x.dtype, x.value)

    if op.expr is None or back.keys().isdisjoint(op.inputs):
        return op
    return replace(op, expr=op.expr.map_reads(change))
