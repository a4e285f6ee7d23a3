"""Pooling: reductions over windows. Elements outside the tensor are not read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.ir import reduction
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import DType
from tilewright.ir.expr import Axis, Expr, call, cast, const, read, where
from tilewright.ir.expr import narrow as narrow_expr
from tilewright.ir.graph import Value
from tilewright.ir.reduction import lowest
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes

from .common import inside, position, within
from .pointwise import narrow as narrow_value


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding windows over the last dims of a tensor, one entry per dim; `ceil` rounds the number of windows up."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil: bool = False

    def count(self, k: int, size: Expr) -> Expr:
        """Number of windows along dim k. A window that starts in the padding behind the tensor is left out."""
        span = self.dilation[k] * (self.kernel[k] - 1) + 1
        room = dims.add(size, dims.integer(2 * self.padding[k] - span))
        step = dims.integer(self.stride[k])
        if not self.ceil:
            return dims.add(dims.floordiv(room, step), dims.ONE)
        up = dims.add(dims.ceildiv(room, step), dims.ONE)
        starts = dims.ceildiv(dims.add(size, dims.integer(self.padding[k])), step)
        return dims.minimum(up, starts)


@dataclass(frozen=True, slots=True)
class _Placed:
    axes: tuple[Axis, ...]
    reduce: tuple[Axis, ...]
    index: list[Expr]
    condition: Expr | None


def _place(x: Value, w: Window) -> _Placed:
    """Axes and read index of windows over x."""
    lead = len(x.shape) - len(w.kernel)
    space = [w.count(k, s) for k, s in enumerate(x.shape[lead:])]
    axes = output_axes((*x.shape[:lead], *space))
    reduce = tuple(Axis(f"r{k}", dims.integer(n)) for k, n in enumerate(w.kernel))
    index = [position(a) for a in axes[:lead]]
    conditions: list[Expr | None] = []
    for k, (a, r) in enumerate(zip(axes[lead:], reduce, strict=True)):
        start = dims.sub(dims.mul(position(a), dims.integer(w.stride[k])), dims.integer(w.padding[k]))
        place = dims.add(start, dims.mul(position(r), dims.integer(w.dilation[k])))
        index.append(place)
        conditions.append(inside(place, x.shape[lead + k]))
    return _Placed(axes, reduce, index, within(conditions))


def max_pool(b: Builder, x: Value, w: Window) -> Value:
    """The maximum of each window; NaN wins."""
    p = _place(x, w)
    body = _guarded(p.condition, read(0, p.index, x.dtype), const(lowest(x.dtype), x.dtype))
    (out,) = b.emit("max_pool", (x,), TensorExpr(p.axes, (body,), p.reduce, reduction.maximum(x.dtype)))
    return out


def max_pool_with_index(b: Builder, x: Value, w: Window) -> tuple[Value, Value]:
    """(maximum, its row-major place in the pooled dims) of each window; the first of equals."""
    p = _place(x, w)
    space = len(w.kernel)
    strides = dims.dense_strides(x.shape[-space:])
    flat = dims.add(*[dims.mul(i, s) for i, s in zip(p.index[-space:], strides, strict=True)])
    value = _guarded(p.condition, read(0, p.index, x.dtype), const(lowest(x.dtype), x.dtype))
    place = _guarded(p.condition, flat, dims.integer(-1))
    value, index = b.emit(
        "max_pool", (x,), TensorExpr(p.axes, (value, place), p.reduce, reduction.argmax(x.dtype))
    )
    return value, index


def _guarded(condition: Expr | None, yes: Expr, no: Expr) -> Expr:
    return yes if condition is None else where(condition, yes, no)


def avg_pool(b: Builder, x: Value, w: Window, include_pad: bool = True, divisor: int | None = None) -> Value:
    """The mean of each window; padding counts as zeros if `include_pad`, else not at all; or `divisor` is the count."""
    p = _place(x, w)
    acc = x.dtype.compute
    body = _guarded(p.condition, cast(read(0, p.index, x.dtype), acc), const(0, acc))
    (total,) = b.emit("window_sum", (x,), TensorExpr(p.axes, (body,), p.reduce, reduction.sum_(acc)))
    count = dims.integer(divisor) if divisor else _window_count(x, w, p, include_pad)
    element = read(0, [position(a) for a in p.axes], acc)
    (out,) = b.emit("avg_pool", (total,), TensorExpr(p.axes, (_mean(element, count, x.dtype),)))
    return out


def _mean(total: Expr, count: Expr, dtype: DType) -> Expr:
    """total / count; integers round towards zero."""
    return narrow_expr(call("div" if dtype.is_float else "truncdiv", total, cast(count, total.dtype)), dtype)


def _window_count(x: Value, w: Window, p: _Placed, include_pad: bool) -> Expr:
    """Number of counted places of each window, which ends at the padded border."""
    if include_pad and not w.ceil:  # none reaches over the border
        return dims.prod([dims.integer(n) for n in w.kernel])
    total = dims.ONE
    lead = len(x.shape) - len(w.kernel)
    for k, a in enumerate(p.axes[lead:]):
        size, border = x.shape[lead + k], dims.integer(w.padding[k])
        start = dims.sub(dims.mul(position(a), dims.integer(w.stride[k])), border)
        end = dims.minimum(dims.add(start, dims.integer(w.kernel[k])), dims.add(size, border))
        if not include_pad:
            start, end = dims.maximum(start, dims.ZERO), dims.minimum(end, size)
        total = dims.mul(total, dims.sub(end, start))
    return total


def avg_pool_gradient(
    b: Builder, gradient: Value, x: Value, w: Window, include_pad: bool = True, divisor: int | None = None
) -> Value:
    """The sum, for each element of x, of its shares of the gradients of the windows that it is in. Windows must not
    overlap, or start at each place."""
    p, acc = _place(x, w), gradient.dtype.compute
    count = dims.integer(divisor) if divisor else _window_count(x, w, p, include_pad)
    element = cast(read(0, [position(a) for a in p.axes], gradient.dtype), acc)
    share = call("div", element, cast(count, acc))
    (shares,) = b.emit("window_share", (gradient,), TensorExpr(p.axes, (share,)))
    axes, reduce, index, condition = _covering(x.shape, gradient.shape, w)
    body = _guarded(condition, read(0, index, acc), const(0, acc))
    (out,) = b.emit("avg_pool_gradient", (shares,), TensorExpr(axes, (body,), reduce, reduction.sum_(acc)))
    return narrow_value(b, out, gradient.dtype)


def _covering(
    shape: Sequence[Expr], windows: Sequence[Expr], w: Window
) -> tuple[tuple[Axis, ...], tuple[Axis, ...], list[Expr], Expr | None]:
    """For each element of a tensor of `shape`, those of its `windows` that hold it, in their order: axes, reduce axes,
    the index of a window, and the condition under which it is there and holds the element."""
    lead = len(shape) - len(w.kernel)
    axes = output_axes(tuple(shape))
    index = [position(a) for a in axes[:lead]]
    reduce: list[Axis] = []
    conditions: list[Expr | None] = []
    for k, a in enumerate(axes[lead:]):
        size, step = w.kernel[k], w.stride[k]
        most = -(-size // step)
        reduce.append(Axis(f"r{k}", dims.integer(most)))
        shifted = dims.add(position(a), dims.integer(w.padding[k]))
        last = dims.floordiv(shifted, dims.integer(step))
        window = dims.add(last, position(reduce[-1]), dims.integer(1 - most))
        index.append(window)
        conditions.append(inside(window, windows[lead + k]))
        conditions.append(inside(dims.sub(shifted, dims.mul(window, dims.integer(step))), dims.integer(size)))
    return axes, tuple(reduce), index, within(conditions)


def _bins(
    x: Value, sizes: Sequence[Expr]
) -> tuple[tuple[Axis, ...], tuple[Axis, ...], list[Expr], Expr | None, Expr]:
    """Adaptive windows: output place o covers [o * n // m, ceil((o + 1) * n / m)). Returns axes, reduce axes, the read
    index, its condition and the number of elements per window."""
    lead = len(x.shape) - len(sizes)
    axes = output_axes((*x.shape[:lead], *sizes))
    index = [position(a) for a in axes[:lead]]
    reduce: list[Axis] = []
    conditions: list[Expr | None] = []
    count = dims.ONE
    for k, (n, m) in enumerate(zip(x.shape[lead:], sizes, strict=True)):
        o = position(axes[lead + k])
        even = dims.exact_div(n, m)
        if even is not None:
            reduce.append(Axis(f"r{k}", even))
            index.append(dims.add(dims.mul(o, even), position(reduce[-1])))
            count = dims.mul(count, even)
            continue
        start = dims.floordiv(dims.mul(o, n), m)
        length = dims.sub(dims.ceildiv(dims.mul(dims.add(o, dims.ONE), n), m), start)
        reduce.append(Axis(f"r{k}", dims.minimum(dims.add(dims.ceildiv(n, m), dims.ONE), n)))
        r = position(reduce[-1])
        index.append(dims.add(start, r))
        conditions.append(call("lt", r, length))
        count = dims.mul(count, length)
    return axes, tuple(reduce), index, within(conditions), count


def adaptive_avg_pool(b: Builder, x: Value, sizes: Sequence[Expr]) -> Value:
    """The mean over windows that divide the last dims into `sizes` parts."""
    axes, reduce, index, condition, count = _bins(x, sizes)
    acc = x.dtype.compute
    body = _guarded(condition, cast(read(0, index, x.dtype), acc), const(0, acc))
    (total,) = b.emit("window_sum", (x,), TensorExpr(axes, (body,), reduce, reduction.sum_(acc)))
    element = read(0, [position(a) for a in axes], acc)
    (out,) = b.emit("adaptive_avg_pool", (total,), TensorExpr(axes, (_mean(element, count, x.dtype),)))
    return out


def adaptive_max_pool(b: Builder, x: Value, sizes: Sequence[Expr]) -> tuple[Value, Value]:
    """(maximum, its row-major place) over windows that divide the last dims into `sizes` parts."""
    axes, reduce, index, condition, _ = _bins(x, sizes)
    strides = dims.dense_strides(x.shape[-len(sizes) :])
    flat = dims.add(*[dims.mul(i, s) for i, s in zip(index[-len(sizes) :], strides, strict=True)])
    value = _guarded(condition, read(0, index, x.dtype), const(lowest(x.dtype), x.dtype))
    place = _guarded(condition, flat, dims.integer(-1))
    out, where_ = b.emit(
        "adaptive_max_pool", (x,), TensorExpr(axes, (value, place), reduce, reduction.argmax(x.dtype))
    )  # fmt: skip
    return out, where_
