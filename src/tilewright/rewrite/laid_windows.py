"""Weights of windows by channel, laid as a block of channels reads them.

    y[n, c, p, q] = sum of x[n, c, s p + i, s q + j] * w[c, 0, i, j]   over i, j
                  = sum of x[n, c, s p + i, s q + j] * w'[i, j, c]

Images have their channels innermost, so threads have channels side by side. Of w, these lie as far apart as a window is
large, so that each number is a load of its own; of w', a thread loads those of all its channels at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilewright.ir.expr import Axis, Expr, axes_of, axis, read, transform
from tilewright.ir.graph import Layout, Op, Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr

from .prepared_product import PreparedProduct
from .split.products import only_sum


def lay_windows(kernel: Kernel, layouts: Mapping[Value, Layout], fresh: int) -> PreparedProduct | None:
    """`kernel` with the weights of its one sum as the value number `fresh`, with what lies innermost in the image
    innermost; None if it is no sum over windows whose weights have a window for each of these, if they lie so already,
    or if the kernel makes them."""
    op = only_sum(kernel)
    made = {v for other in kernel.ops for v in other.outputs}
    found = None if op is None or set(op.inputs) & made or len(op.inputs) != 2 else _weight(op, layouts)
    if op is None or found is None:
        return None
    weight, lane = found
    laid = _laid(op, weight, lane, fresh)
    changed = tuple(_over(op, weight, lane, laid.output) if other is op else other for other in kernel.ops)
    layout = Layout(dims.dense_strides(laid.output.shape))
    return PreparedProduct((laid,), Kernel(changed, kernel.outputs, kernel.reason), {laid.output: layout})


def _weight(op: Op, layouts: Mapping[Value, Layout]) -> tuple[Expr, Axis] | None:
    """The read of the operand that has windows, one for each place along the axis that walks the other operand step by
    step in memory, and that axis; None if weights lie side by side along it."""
    expr = op.expr
    assert expr is not None and expr.reduction is not None
    reads = expr.reads()
    if expr.reduction.combiner != "add" or expr.scan is not None or len(expr.body) != 1:
        return None
    if sorted(x.value for x in reads if isinstance(x.value, int)) != [0, 1] or expr.body[0].op != "mul":
        return None
    windows = {axis(a) for a in expr.reduce if a.extent is not dims.ONE}
    for weight, image in (reads, reads[::-1]):
        walked = axes_of(weight)
        each_has_a_dim = len(walked) == sum(i is not dims.ZERO for i in weight.args)
        alone = each_has_a_dim and all(_walks(op, weight, d) for d in range(len(weight.args)))
        if not alone or not windows < walked <= axes_of(image):
            continue
        for lane in expr.axes:
            steps = [dims.coefficient(_offset(op, x, layouts), axis(lane)) for x in (image, weight)]
            if axis(lane) in walked and steps[0] is dims.ONE and steps[1] is not dims.ONE:
                return weight, lane
    return None


def _offset(op: Op, x: Expr, layouts: Mapping[Value, Layout]) -> Expr:
    """Where in memory a read of an op is."""
    assert isinstance(x.value, int)
    value = op.inputs[x.value]
    layout = layouts.get(value)
    strides = dims.dense_strides(value.shape) if layout is None else layout.strides
    return dims.add(dims.ZERO, *(dims.mul(i, s) for i, s in zip(x.args, strides, strict=True)))


def _walks(op: Op, weight: Expr, dim: int) -> bool:
    """Whether one axis walks all of a dim, or this has one place."""
    assert op.expr is not None and isinstance(weight.value, int)
    index, size = weight.args[dim], op.inputs[weight.value].shape[dim]
    if index is dims.ZERO:
        return size is dims.ONE
    extents = [a.extent for a in (*op.expr.axes, *op.expr.reduce) if axis(a) is index]
    return any(dims.equal(extent, size) for extent in extents)


def _order(op: Op, weight: Expr, lane: Axis) -> list[int]:
    """The dims of weights as they are laid: windows, whatever else there is, and `lane`."""
    assert op.expr is not None
    windows = {axis(a) for a in op.expr.reduce}
    walked = [d for d, i in enumerate(weight.args) if i is not dims.ZERO]
    return sorted(walked, key=lambda d: (weight.args[d] is axis(lane), weight.args[d] not in windows, d))


def _laid(op: Op, weight: Expr, lane: Axis, fresh: int) -> Op:
    """The op that lays weights."""
    assert isinstance(weight.value, int)
    value, order = op.inputs[weight.value], _order(op, weight, lane)
    axes = {d: Axis(f"i{k}", value.shape[d]) for k, d in enumerate(order)}
    index = [axis(axes[d]) if d in axes else dims.ZERO for d in range(len(value.shape))]
    made = TensorExpr(tuple(axes[d] for d in order), (read(0, index, value.dtype),))
    return Op("lay_windows", (value,), (Value(fresh, made.shape, value.dtype),), expr=made, origin=op.origin)


def _over(op: Op, weight: Expr, lane: Axis, laid: Value) -> Op:
    """The sum over laid weights."""
    expr, number = op.expr, weight.value
    assert expr is not None and isinstance(number, int)
    moved = read(number, [weight.args[d] for d in _order(op, weight, lane)], weight.dtype)
    body = tuple(transform(b, lambda e: moved if e is weight else None) for b in expr.body)
    inputs = tuple(laid if k == number else v for k, v in enumerate(op.inputs))
    return replace(op, inputs=inputs, expr=replace(expr, body=body))
