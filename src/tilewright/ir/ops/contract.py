"""Contractions: sums of products. Matmul and convolution are the same thing with different access maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.ir import reduction
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import DType
from tilewright.ir.expr import Axis, Expr, call, cast, const, narrow, read, where
from tilewright.ir.graph import Value
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes

from .common import Scalar, arith, inside, pointwise, position, within
from .pointwise import narrow as narrow_value

Axes = tuple[Axis, ...]


def _accumulator(dtype: DType) -> DType:
    return dtype.compute


def product_sum(
    b: Builder, name: str, x: Value, y: Value, shape: Sequence[Expr], over: Sequence[Expr],
    index: Callable[[list[Expr], list[Expr]], tuple[Sequence[Expr], Sequence[Expr]]],
) -> Value:  # fmt: skip
    """out[i] = sum over r of x[p] * y[q], where index(i, r) gives (p, q); in the accumulation type."""
    axes, reduce = output_axes(tuple(shape)), tuple(Axis(f"r{k}", e) for k, e in enumerate(over))
    p, q = index([position(a) for a in axes], [position(a) for a in reduce])
    acc = _accumulator(x.dtype)
    body = arith("mul", cast(read(0, p, x.dtype), acc), cast(read(1, q, y.dtype), acc))
    (out,) = b.emit(name, (x, y), TensorExpr(axes, (body,), reduce, reduction.sum_(acc)))
    return out


def matmul(b: Builder, x: Value, y: Value) -> Value:
    """[.., M, K] times [.., K, N] with equal leading dims, in x's type."""
    return narrow_value(b, wide_matmul(b, x, y), x.dtype)


def wide_matmul(b: Builder, x: Value, y: Value) -> Value:
    """`matmul` in the accumulation type."""
    shape = (*x.shape[:-1], y.shape[-1])
    return product_sum(
        b, "matmul", x, y, shape, (x.shape[-1],), lambda i, r: ([*i[:-1], r[0]], [*i[:-2], r[0], i[-1]])
    )  # fmt: skip


def dot(b: Builder, x: Value, y: Value) -> Value:
    """Sum of products of two vectors."""
    return narrow_value(b, product_sum(b, "dot", x, y, (), x.shape, lambda _, r: (r, r)), x.dtype)


def matvec(b: Builder, x: Value, y: Value) -> Value:
    """[M, K] times [K]."""
    return narrow_value(b, _wide_matvec(b, x, y), x.dtype)


def _wide_matvec(b: Builder, x: Value, y: Value) -> Value:
    return product_sum(b, "matvec", x, y, x.shape[:1], y.shape, lambda i, r: ([i[0], r[0]], r))


def added_matvec(b: Builder, bias: Value, x: Value, y: Value, beta: Scalar, alpha: Scalar) -> Value:
    """beta * bias + alpha * (x matvec y); scalars are of the accumulation type."""
    return _added(b, bias, _wide_matvec(b, x, y), beta, alpha, x.dtype)


def linear(b: Builder, x: Value, weight: Value, bias: Value | None) -> Value:
    """x [.., K] times weight [N, K] transposed, plus bias [N]."""
    shape = (*x.shape[:-1], *weight.shape[:-1])
    rank = len(x.shape) - 1
    out = product_sum(
        b, "linear", x, weight, shape, (x.shape[-1],), lambda i, r: ([*i[:rank], r[0]], [*i[rank:], r[0]])
    )  # fmt: skip
    if bias is None:
        return narrow_value(b, out, x.dtype)
    return pointwise(b, "bias", lambda e, c: narrow(arith("add", e, cast(c, e.dtype)), x.dtype), out, bias)


def added_matmul(b: Builder, bias: Value, x: Value, y: Value, beta: Scalar, alpha: Scalar) -> Value:
    """beta * bias + alpha * (x matmul y); with beta = 0 the bias is not read. Scalars are of the accumulation type."""
    return _added(b, bias, wide_matmul(b, x, y), beta, alpha, x.dtype)


def _added(b: Builder, bias: Value, product: Value, beta: Scalar, alpha: Scalar, dtype: DType) -> Value:
    """beta * bias + alpha * product, as `dtype`; with beta = 0 the bias is not read."""

    def scaled(e: Expr, by: Expr) -> Expr:
        return e if by.op == "const" and by.value == 1 else arith("mul", e, by)

    if beta.op == "const" and beta.value == 0:
        return pointwise(b, "scale", lambda e, a: narrow(scaled(e, a), dtype), product, alpha)

    def compute(e: Expr, c: Expr, k: Expr, a: Expr) -> Expr:
        return narrow(arith("add", scaled(cast(c, e.dtype), k), scaled(e, a)), dtype)

    return pointwise(b, "bias", compute, product, bias, beta, alpha)


def _window_size(size: Expr, kernel: Expr, stride: int, padding: Expr, dilation: int) -> Expr:
    span = dims.add(dims.mul(dims.sub(kernel, dims.ONE), dims.integer(dilation)), dims.ONE)
    room = dims.sub(dims.add(size, padding, padding), span)
    return dims.add(dims.floordiv(room, dims.integer(stride)), dims.ONE)


def convolution(
    b: Builder, x: Value, weight: Value, bias: Value | None, stride: Sequence[int], padding: Sequence[Expr],
    dilation: Sequence[int], groups: int,
) -> Value:  # fmt: skip
    """x [N, C, spatial] with weight [O, C / groups, kernel]: a sum over channels and taps, zero outside x."""
    kernel = weight.shape[2:]
    space = [
        _window_size(s, k, st, p, d)
        for s, k, st, p, d in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    ]
    axes = output_axes((x.shape[0], weight.shape[0], *space))
    reduce = tuple(Axis(f"r{k}", e) for k, e in enumerate(weight.shape[1:]))
    i, r = [position(a) for a in axes], [position(a) for a in reduce]
    places = [
        dims.sub(dims.add(dims.mul(o, dims.integer(st)), dims.mul(t, dims.integer(d))), p)
        for o, t, st, p, d in zip(i[2:], r[1:], stride, padding, dilation, strict=True)
    ]
    group = dims.floordiv(i[1], dims.floordiv(weight.shape[0], dims.integer(groups)))
    channel = dims.add(dims.mul(group, weight.shape[1]), r[0])
    condition = within([inside(p, s) for p, s in zip(places, x.shape[2:], strict=True)])
    taps = [i[1], *r]
    return _finish(
        b, "convolution", x, weight, bias, axes, reduce, ([i[0], channel, *places], taps, condition)
    )


def _finish(
    b: Builder, name: str, x: Value, weight: Value, bias: Value | None, axes: Axes, reduce: Axes,
    reading: tuple[list[Expr], list[Expr], Expr | None],
) -> Value:  # fmt: skip
    source, taps, condition = reading
    acc = _accumulator(x.dtype)
    element = cast(read(0, source, x.dtype), acc)
    if condition is not None:
        element = where(condition, element, const(0, acc))
    body = arith("mul", element, cast(read(1, taps, weight.dtype), acc))
    (out,) = b.emit(name, (x, weight), TensorExpr(axes, (body,), reduce, reduction.sum_(acc)))
    if bias is None:
        return narrow_value(b, out, x.dtype)
    index = [position(a) for a in axes]
    total = arith("add", read(0, index, acc), cast(read(1, [index[1]], bias.dtype), acc))
    (out,) = b.emit("bias", (out, bias), TensorExpr(axes, (narrow(total, x.dtype),)))
    return out


def transposed_convolution(
    b: Builder, x: Value, weight: Value, bias: Value | None, stride: Sequence[int], padding: Sequence[Expr],
    dilation: Sequence[int], output_padding: Sequence[Expr], groups: int,
) -> Value:  # fmt: skip
    """x [N, C, spatial] with weight [C, O / groups, kernel]: the adjoint of `convolution` as a gather. Output place y
    takes tap t from input place (y + padding - t * dilation) / stride where that is whole and inside."""
    kernel = weight.shape[2:]
    space = [
        dims.add(
            dims.mul(dims.sub(s, dims.ONE), dims.integer(st)), dims.mul(p, dims.integer(-2)),
            dims.mul(dims.sub(k, dims.ONE), dims.integer(d)), extra, dims.ONE,
        )
        for s, k, st, p, d, extra in zip(x.shape[2:], kernel, stride, padding, dilation, output_padding, strict=True)
    ]  # fmt: skip
    each_in, each_out = dims.floordiv(x.shape[1], dims.integer(groups)), weight.shape[1]
    axes = output_axes((x.shape[0], dims.mul(each_out, dims.integer(groups)), *space))
    reduce = tuple(Axis(f"r{k}", e) for k, e in enumerate((each_in, *kernel)))
    i, r = [position(a) for a in axes], [position(a) for a in reduce]
    places: list[Expr] = []
    conditions: list[Expr | None] = []
    for y, t, st, p, d, s in zip(i[2:], r[1:], stride, padding, dilation, x.shape[2:], strict=True):
        raw = dims.sub(dims.add(y, p), dims.mul(t, dims.integer(d)))
        places.append(dims.floordiv(raw, dims.integer(st)))
        left = dims.mod(raw, dims.integer(st))
        conditions += [None if left is dims.ZERO else call("eq", left, dims.ZERO), inside(places[-1], s)]
    channel = dims.add(dims.mul(dims.floordiv(i[1], each_out), each_in), r[0])
    taps = [channel, dims.mod(i[1], each_out), *r[1:]]
    reading = ([i[0], channel, *places], taps, within(conditions))
    return _finish(b, "transposed_convolution", x, weight, bias, axes, reduce, reading)
