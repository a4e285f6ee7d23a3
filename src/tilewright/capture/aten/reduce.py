"""Reductions, scans, softmax and norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tilewright.ir.dtype import DType, bf16, f32
from tilewright.ir.graph import Value
from tilewright.ir.ops import norm, pointwise, scan
from tilewright.ir.ops import reduce as ops
from tilewright.ir.sizes import dims

from .registry import Call, NoDeclaration, Number, Size, dtype_or, known, lower

aten = torch.ops.aten
Dims = int | Sequence[int] | None


def _list(over: Dims) -> Sequence[int] | None:
    return [over] if isinstance(over, int) else over


@lower(aten.sum.dim_IntList, aten.sum.default)
def _sum(
    c: Call, x: Value, over: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value:
    return ops.sum_(c.b, _cast_operand(c, x, dtype), _list(over), keepdim, c.dtype)


@lower(aten.prod.dim_int, aten.prod.default)
def _prod(
    c: Call, x: Value, over: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value:
    return ops.prod(c.b, _cast_operand(c, x, dtype), _list(over), keepdim, c.dtype)


@lower(aten.mean.dim, aten.mean.default)
def _mean(
    c: Call, x: Value, over: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value:
    return ops.mean(c.b, _cast_operand(c, x, dtype), _list(over), keepdim, c.dtype)


def _cast_operand(c: Call, x: Value, dtype: torch.dtype | None) -> Value:
    """An asked type converts the elements before they are folded, unless the accumulation type holds them anyway."""
    to = dtype_or(dtype, x.dtype)
    return x if to == x.dtype or (x.dtype.is_float and to == x.dtype.compute) else c.to(x, to)


def _refuse_empty(c: Call, x: Value, over: Sequence[int] | None) -> None:
    """No elements have no extremum: torch's own call says so, or we where only a run can tell."""
    sizes = x.shape if not over else [x.shape[d] for d in over] if x.shape else []
    if any(dims.static(n) == 0 for n in sizes):
        raise NoDeclaration("no elements")
    for n in sizes:
        c.b.require(n)


def _extremum(declare: Callable[..., Value]) -> Callable[..., Value]:
    def rule(c: Call, x: Value, over: Dims = None, keepdim: bool = False) -> Value:
        _refuse_empty(c, x, _list(over))
        return declare(c.b, x, _list(over), keepdim)

    return rule


lower(aten.amax.default)(_extremum(ops.amax))
lower(aten.amin.default)(_extremum(ops.amin))
lower(aten.max.default)(_extremum(ops.amax))
lower(aten.min.default)(_extremum(ops.amin))


def _any(declare: Callable[..., Value]) -> Callable[..., Value]:
    def rule(c: Call, x: Value, over: Dims = None, keepdim: bool = False) -> Value:
        if isinstance(over, Sequence) and not over:
            return c.to(pointwise.copy(c.b, x), c.dtype)
        return c.to(declare(c.b, x, _list(over), keepdim), c.dtype)

    return rule


lower(aten.any.default, aten.any.dim, aten.any.dims)(_any(ops.any_))
lower(aten.all.default, aten.all.dim, aten.all.dims)(_any(ops.all_))


@lower(aten.argmax.default)
def _argmax(c: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    _refuse_empty(c, x, _list(dim))
    return ops.argmax(c.b, x, dim, keepdim)


@lower(aten.argmin.default)
def _argmin(c: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    _refuse_empty(c, x, _list(dim))
    return ops.argmin(c.b, x, dim, keepdim)


def _with_index(name: str, plain: Callable[..., Value]) -> Callable[..., tuple[Value | None, ...]]:
    def rule(c: Call, x: Value, dim: int, keepdim: bool = False) -> tuple[Value | None, ...]:
        _refuse_empty(c, x, [dim])
        if 1 not in c.used:
            return plain(c.b, x, [dim], keepdim), None
        return ops.with_index(c.b, name, x, dim, keepdim)

    return rule


lower(aten.max.dim)(_with_index("argmax", ops.amax))
lower(aten.min.dim)(_with_index("argmin", ops.amin))


@lower(aten.var.correction)
def _var(
    c: Call, x: Value, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> Value:
    return ops.var(c.b, x, _list(dim), _correction(correction), keepdim)


@lower(aten.var_mean.correction)
def _var_mean(
    c: Call, x: Value, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> tuple[Value, ...]:
    return ops.var_mean(c.b, x, _list(dim), _correction(correction), keepdim)


@lower(aten.std.correction)
def _std(
    c: Call, x: Value, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> Value:
    # A variance of bf16 is rounded once, as a root, and may be beyond what singles hold (`widen_moments`).
    wide = pointwise.to(c.b, x, f32) if x.dtype is bf16 else x
    root = pointwise.sqrt(c.b, ops.var(c.b, wide, _list(dim), _correction(correction), keepdim))
    return pointwise.narrow(c.b, root, x.dtype)


def _correction(value: Number | None) -> float:
    if value is None:
        return 1
    if isinstance(value, (int, float)):
        return value
    raise NoDeclaration("symbolic attribute")


@lower(aten.logsumexp.default)
def _logsumexp(c: Call, x: Value, dim: Dims, keepdim: bool = False) -> Value:
    return ops.logsumexp(c.b, c.to(x, c.dtype), _list(dim) or (), keepdim)


@lower(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def _count_nonzero(c: Call, x: Value, dim: Dims = None) -> Value:
    return ops.count_nonzero(c.b, x, _list(dim))


@lower(aten.linalg_vector_norm.default)
def _vector_norm(c: Call, x: Value, ord: Number = 2, dim: Dims = None, keepdim: bool = False, *,
                 dtype: torch.dtype | None = None) -> Value:  # fmt: skip
    if not isinstance(ord, (int, float)):
        raise NoDeclaration("symbolic attribute")
    if math.isinf(ord) or ord < 0:
        _refuse_empty(c, x, _list(dim))
    return ops.vector_norm(c.b, x, ord, _list(dim), keepdim, c.dtype)


def _running(declare: Callable[..., Value]) -> Callable[..., Value]:
    def rule(c: Call, x: Value, dim: int, *, dtype: torch.dtype | None = None) -> Value:
        return declare(c.b, _cast_operand(c, x, dtype), dim, c.dtype)

    return rule


lower(aten.cumsum.default)(_running(scan.cumsum))
lower(aten.cumprod.default)(_running(scan.cumprod))


@lower(aten.logcumsumexp.default)
def _logcumsumexp(c: Call, x: Value, dim: int) -> Value:
    return scan.logcumsumexp(c.b, x, dim)


@lower(aten.cummax.default)
def _cummax(c: Call, x: Value, dim: int) -> tuple[Value, Value]:
    return scan.extremum(c.b, x, dim, smallest=False)


@lower(aten.cummin.default)
def _cummin(c: Call, x: Value, dim: int) -> tuple[Value, Value]:
    return scan.extremum(c.b, x, dim, smallest=True)


@lower(aten._softmax.default)
def _softmax(c: Call, x: Value, dim: int, half_to_float: bool = False) -> Value:
    return norm.softmax(c.b, x, dim, c.dtype)


@lower(aten._log_softmax.default)
def _log_softmax(c: Call, x: Value, dim: int, half_to_float: bool = False) -> Value:
    return norm.log_softmax(c.b, x, dim, c.dtype)


def _stats(c: Call, values: Sequence[Value]) -> tuple[Value, ...]:
    """Results after the first, in the types that torch gives them."""
    return (values[0], *[pointwise.narrow(c.b, v, t) for v, t in zip(values[1:], c.results[1:], strict=True)])


@lower(aten.native_layer_norm.default)
def _layer_norm(c: Call, x: Value, normalized_shape: Sequence[Size], weight: Value | None, bias: Value | None,
                eps: float) -> tuple[Value, ...]:  # fmt: skip
    return _stats(c, norm.layer_norm(c.b, x, len(normalized_shape), weight, bias, eps))


@lower(aten.rms_norm.default, aten._fused_rms_norm.default)
def _rms_norm(c: Call, x: Value, normalized_shape: Sequence[Size], weight: Value | None = None,
              eps: float | None = None) -> Value | tuple[Value, ...]:  # fmt: skip
    if eps is None:
        eps = _epsilon(x.dtype)
    both = norm.rms_norm(c.b, x, len(normalized_shape), weight, eps)
    return _stats(c, both) if len(c.results) == 2 else both[0]


def _epsilon(dtype: DType) -> float:
    """Torch's default: that of the type in which it computes the norm."""
    return torch.finfo(torch.float64 if dtype.bytes == 8 else torch.float32).eps


@lower(aten.native_group_norm.default)
def _group_norm(c: Call, x: Value, weight: Value | None, bias: Value | None, n: Size, channels: Size, space: Size,
                group: Size, eps: float) -> tuple[Value, ...]:  # fmt: skip
    return _stats(c, norm.group_norm(c.b, x, known(group), weight, bias, eps))


@lower(aten._native_batch_norm_legit_no_training.default)
def _batch_norm_inference(c: Call, x: Value, weight: Value | None, bias: Value | None, running_mean: Value,
                          running_var: Value, momentum: float, eps: float) -> tuple[Value, ...]:  # fmt: skip
    out = norm.batch_norm_inference(c.b, x, running_mean, running_var, weight, bias, eps)
    return (out, *_kept_for_gradients(c, running_mean, running_var, eps))


def _kept_for_gradients(c: Call, mean: Value, variance: Value, eps: float) -> list[Value]:
    """The second and third result of a norm that only reads its statistics: those as they were used, or nothing, as
    each device's kernels have it."""
    if any(dims.static(n) == 0 for s in c.sizes_of_results[1:3] for n in s):
        return [
            pointwise.full(c.b, s, c.number(0, t))
            for s, t in zip(c.sizes_of_results[1:3], c.results[1:3], strict=True)
        ]
    used = (mean, norm.inverse_deviation(c.b, variance, eps))
    return [pointwise.copy(c.b, pointwise.to(c.b, v, t)) for v, t in zip(used, c.results[1:3], strict=True)]


@lower(aten._native_batch_norm_legit.no_stats)
def _batch_norm_of_batch(c: Call, x: Value, weight: Value | None, bias: Value | None, training: bool, momentum: float,
                         eps: float) -> tuple[Value, ...]:  # fmt: skip
    return _stats(c, norm.batch_norm_training(c.b, x, weight, bias, eps)[:3])


@lower(aten._native_batch_norm_legit_functional.default)
def _batch_norm_training(
    c: Call, x: Value, weight: Value | None, bias: Value | None, running_mean: Value, running_var: Value,
    training: bool, momentum: float, eps: float,
) -> tuple[Value, ...]:  # fmt: skip
    if not training:
        out = norm.batch_norm_inference(c.b, x, running_mean, running_var, weight, bias, eps)
        statistics = _kept_for_gradients(c, running_mean, running_var, eps)
        moved = [
            pointwise.copy(c.b, pointwise.to(c.b, v, t))
            for v, t in zip((running_mean, running_var), c.results[3:], strict=True)
        ]
        return (out, *statistics, *moved)
    out, mean, rstd, variance = norm.batch_norm_training(c.b, x, weight, bias, eps)
    n = dims.prod(s for d, s in enumerate(x.shape) if d != 1)
    moved = norm.running_statistics(c.b, running_mean, running_var, mean, variance, n, momentum)
    return _stats(c, (out, mean, rstd, *moved))


@lower(aten._cdist_forward.default)
def _cdist(c: Call, x: Value, y: Value, p: float, compute_mode: int | None = None) -> Value:
    return ops.distances(c.b, x, y, p)
