"""Softmax and the norms, decomposed. Everything between is held in the accumulation type; only results are narrowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.ir.builder import Builder
from tilewright.ir.dtype import DType
from tilewright.ir.expr import Expr, call, cast, narrow, read
from tilewright.ir.graph import Value
from tilewright.ir.reduction import scaled
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes

from .common import number, pointwise, position, wide
from .reduce import accumulated, amax, centred, count
from .view import reshape


def softmax(b: Builder, x: Value, dim: int, dtype: DType | None = None) -> Value:
    """exp(x - max) / sum(exp(x - max)) along `dim`, as `dtype`; a row of -inf gives NaN, as in eager."""
    powers, total = exponentials(b, x, dim)
    result = dtype or x.dtype
    return pointwise(b, "softmax", lambda e, s: narrow(call("div", e, s), result), powers, total)


def exponentials(b: Builder, x: Value, dim: int) -> tuple[Value, Value]:
    """(exp(x - max along dim), their sum with the dim kept)."""
    top = amax(b, x, [dim], True)
    powers = pointwise(b, "exp", lambda e, m: call("exp", call("sub", wide(e), wide(m))), x, top)
    return powers, accumulated(b, powers, [dim], True)


def log_softmax(b: Builder, x: Value, dim: int, dtype: DType | None = None) -> Value:
    """x - max - log(sum(exp(x - max))) along `dim`, as `dtype`."""
    top = amax(b, x, [dim], True)
    powers = pointwise(b, "exp", lambda e, m: call("exp", call("sub", wide(e), wide(m))), x, top)
    total = accumulated(b, powers, [dim], True)
    result = dtype or x.dtype

    def compute(e: Expr, m: Expr, s: Expr) -> Expr:
        return narrow(call("sub", call("sub", wide(e), wide(m)), call("log", s)), result)

    return pointwise(b, "log_softmax", compute, x, top, total)


def _affine(e: Expr, weight: Expr | None, bias: Expr | None) -> Expr:
    if weight is not None:
        e = call("mul", e, cast(weight, e.dtype))
    return e if bias is None else call("add", e, cast(bias, e.dtype))


def _inverse_deviation(b: Builder, squares: Value, n: Expr, eps: float) -> Value:
    return pointwise(b, "rstd", lambda s: call("rsqrt", call("add", scaled(s, n), number(eps, s))), squares)


def _normalised(
    b: Builder, name: str, x: Value, parts: Sequence[Value], weight: Value | None, bias: Value | None
) -> Value:
    """(x - mean) * rstd (or x * rstd), then weight and bias, which align from the right, in x's type."""
    extra = [v for v in (weight, bias) if v is not None]

    def compute(e: Expr, *rest: Expr) -> Expr:
        stats, affine = rest[: len(parts)], list(rest[len(parts) :])
        e = wide(e)
        if len(stats) == 2:
            e = call("sub", e, stats[0])
        e = call("mul", e, stats[-1])
        w = affine.pop(0) if weight is not None else None
        return narrow(_affine(e, w, affine.pop(0) if bias is not None else None), x.dtype)

    return pointwise(b, name, compute, x, *parts, *extra)


def layer_norm(
    b: Builder, x: Value, trailing: int, weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    """(result, mean, 1 / sqrt(variance + eps)) over the last `trailing` dims; statistics keep them, in f32 or f64."""
    rank = len(x.shape)
    over = range(rank - trailing, rank)
    m, squares = centred(b, x, over)
    rstd = _inverse_deviation(b, squares, count(x, over), eps)
    return _normalised(b, "layer_norm", x, (m, rstd), weight, bias), m, rstd


def rms_norm(b: Builder, x: Value, trailing: int, weight: Value | None, eps: float) -> tuple[Value, Value]:
    """(x / sqrt(mean(x^2) + eps) * weight, 1 / that root) over the last `trailing` dims."""
    rank = len(x.shape)
    over = range(rank - trailing, rank)
    squares = pointwise(b, "square", lambda e: call("mul", wide(e), wide(e)), x)
    rstd = _inverse_deviation(b, accumulated(b, squares, over, True), count(x, over), eps)
    return _normalised(b, "rms_norm", x, (rstd,), weight, None), rstd


def group_norm(
    b: Builder, x: Value, groups: int, weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    """(result, mean, rstd) of x [N, C, ...] over each of `groups` groups of channels; statistics are [N, groups]."""
    n, channels, *space = x.shape
    each = dims.floordiv(channels, dims.integer(groups))
    grouped = reshape(b, x, (n, dims.integer(groups), each, *space))
    over = range(2, len(grouped.shape))
    m, squares = centred(b, grouped, over)
    rstd = _inverse_deviation(b, squares, count(grouped, over), eps)
    m, rstd = (reshape(b, v, (n, dims.integer(groups))) for v in (m, rstd))
    axes = output_axes(x.shape)
    index = [position(a) for a in axes]
    group = [index[0], dims.floordiv(index[1], each)]
    e = call("sub", wide(read(0, index, x.dtype)), read(1, group, m.dtype))
    e = call("mul", e, read(2, group, rstd.dtype))
    extra = [v for v in (weight, bias) if v is not None]
    terms = [read(3 + k, [index[1]], v.dtype) for k, v in enumerate(extra)]
    body = _affine(e, terms[0] if weight is not None else None, terms[-1] if bias is not None else None)
    (out,) = b.emit("group_norm", (x, m, rstd, *extra), TensorExpr(axes, (narrow(body, x.dtype),)))
    return out, m, rstd


def per_channel(
    b: Builder, name: str, x: Value, compute: Callable[..., Expr], parameters: Sequence[Value]
) -> Value:
    """out = compute(x, parameters at x's dim 1), elementwise; parameters are vectors over the channels."""
    axes = output_axes(x.shape)
    index = [position(a) for a in axes]
    elements = [read(k + 1, [index[1]], p.dtype) for k, p in enumerate(parameters)]
    body = compute(read(0, index, x.dtype), *elements)
    (out,) = b.emit(name, (x, *parameters), TensorExpr(axes, (body,)))
    return out


def batch_norm_inference(
    b: Builder, x: Value, mean: Value, variance: Value, weight: Value | None, bias: Value | None, eps: float
) -> Value:
    """(x - mean) / sqrt(variance + eps) * weight + bias per channel (dim 1), with stored statistics."""
    return _batch_normalised(b, x, mean, inverse_deviation(b, variance, eps), weight, bias)


def inverse_deviation(b: Builder, variance: Value, eps: float) -> Value:
    """1 / sqrt(variance + eps), of halves in singles."""
    return pointwise(b, "rstd", lambda v: call("rsqrt", call("add", wide(v), number(eps, wide(v)))), variance)


def _batch_normalised(
    b: Builder, x: Value, mean: Value, rstd: Value, weight: Value | None, bias: Value | None
) -> Value:
    scale = rstd
    if weight is not None:
        scale = pointwise(b, "scale", lambda r, w: call("mul", r, cast(w, r.dtype)), rstd, weight)

    def compute(e: Expr, m: Expr, s: Expr, *shift: Expr) -> Expr:
        e = call("mul", call("sub", cast(e, s.dtype), cast(m, s.dtype)), s)
        return narrow(_affine(e, None, shift[0] if shift else None), x.dtype)

    return per_channel(b, "batch_norm", x, compute, [mean, scale, *([bias] if bias is not None else [])])


def batch_norm_training(
    b: Builder, x: Value, weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value, Value]:
    """(result, mean, rstd, biased variance) with the statistics of x itself over all dims but 1."""
    over = [d for d in range(len(x.shape)) if d != 1]
    m, squares = centred(b, x, over)
    n = count(x, over)
    flat = (x.shape[1],)
    m, squares = reshape(b, m, flat), reshape(b, squares, flat)
    variance = pointwise(b, "var", lambda s: scaled(s, n), squares)
    rstd = _inverse_deviation(b, squares, n, eps)
    return _batch_normalised(b, x, m, rstd, weight, bias), m, rstd, variance


def running_statistics(
    b: Builder,
    mean: Value,
    variance: Value,
    batch_mean: Value,
    batch_variance: Value,
    n: Expr,
    momentum: float,
) -> tuple[Value, Value]:
    """The stored statistics moved towards those of the batch of n elements (variance unbiased) by `momentum`."""

    def moved(old: Expr, new: Expr) -> Expr:
        weighted = call("mul", cast(old, new.dtype), number(1 - momentum, new))
        return narrow(call("add", call("mul", new, number(momentum, new)), weighted), old.dtype)

    def unbiased(old: Expr, new: Expr) -> Expr:
        return moved(
            old, call("mul", new, call("div", cast(n, new.dtype), cast(dims.sub(n, dims.ONE), new.dtype)))
        )

    return pointwise(b, "running_mean", moved, mean, batch_mean), pointwise(
        b, "running_var", unbiased, variance, batch_variance
    )
