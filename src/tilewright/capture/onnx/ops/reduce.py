"""Reductions, arg-reductions, cumulative operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilewright.capture.onnx.registry import op
from tilewright.capture.onnx.values.run import WIDE, Host, is_static

Reducer = Callable[[Tensor, tuple[int, ...], bool], Tensor]


def _dims(x: Tensor, axes: Sequence[int] | None, noop: int = 0) -> tuple[int, ...] | None:
    """The dims to reduce; None when the reduction does nothing."""
    if not axes:
        return None if noop else tuple(range(x.dim()))
    return tuple(a + x.dim() if a < 0 else a for a in axes)


def _sum(x: Tensor, dims: tuple[int, ...], keep: bool) -> Tensor:
    if x.dtype in WIDE:
        return x.to(torch.int64).sum(dims, keep).to(x.dtype)
    return x.sum(dims, keep, dtype=x.dtype) if dims else x


def _mean(x: Tensor, dims: tuple[int, ...], keep: bool) -> Tensor:
    if not dims:
        return x
    return x.mean(dims, keep) if x.is_floating_point() else x.to(torch.float64).mean(dims, keep).to(x.dtype)


def _prod(x: Tensor, dims: tuple[int, ...], keep: bool) -> Tensor:
    for d in sorted(dims, reverse=True):
        x = x.prod(d, keep, dtype=x.dtype)
    return x


def _extreme(x: Tensor, dims: tuple[int, ...], keep: bool, largest: bool) -> Tensor:
    if not dims:
        return x
    empty = any(is_static(x.shape[d]) and x.shape[d] == 0 for d in dims)
    if empty:
        shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keep or d not in dims]
        if x.dtype == torch.bool:
            return torch.full(shape, not largest, dtype=x.dtype, device=x.device)
        if x.is_floating_point():
            edge = -torch.inf if largest else torch.inf
        else:
            edge = torch.iinfo(x.dtype).min if largest else torch.iinfo(x.dtype).max
        return torch.full(shape, edge, dtype=x.dtype, device=x.device)
    if x.dtype in WIDE:
        wide = x.to(torch.int64)
        return (wide.amax(dims, keep) if largest else wide.amin(dims, keep)).to(x.dtype)
    return x.amax(dims, keep) if largest else x.amin(dims, keep)


def _log_sum_exp(x: Tensor, dims: tuple[int, ...], keep: bool) -> Tensor:
    if not dims:
        return x
    wide = x if x.is_floating_point() else x.to(torch.float64)
    return torch.logsumexp(wide, dims, keep).to(x.dtype)


def _log(x: Tensor) -> Tensor:
    return torch.log(x) if x.is_floating_point() else torch.log(x.to(torch.float64)).to(x.dtype)


def _sqrt(x: Tensor) -> Tensor:
    return torch.sqrt(x) if x.is_floating_point() else torch.sqrt(x.to(torch.float64)).to(x.dtype)


_REDUCERS: dict[str, Reducer] = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceProd": _prod,
    "ReduceMax": lambda x, dims, keep: _extreme(x, dims, keep, True),
    "ReduceMin": lambda x, dims, keep: _extreme(x, dims, keep, False),
    "ReduceL1": lambda x, dims, keep: _sum(x.abs(), dims, keep),
    "ReduceL2": lambda x, dims, keep: _sqrt(_sum(x * x, dims, keep)),
    "ReduceSumSquare": lambda x, dims, keep: _sum(x * x, dims, keep),
    "ReduceLogSum": lambda x, dims, keep: _log(_sum(x, dims, keep)),
    "ReduceLogSumExp": _log_sum_exp,
}


def _enter(name: str, reducer: Reducer) -> None:
    """Axes are an attribute before opset 18 (13 for ReduceSum), an input from then on."""

    @op(name)
    def old(x: Tensor, *, axes: Sequence[int] | None = None, keepdims: int = 1) -> Tensor:
        dims = _dims(x, axes)
        return x if dims is None else reducer(x, dims, bool(keepdims))

    @op(name, since=13 if name == "ReduceSum" else 18, host=(1,))
    def new(
        x: Tensor, axes: Host | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Tensor:
        dims = _dims(x, None if axes is None else axes.ints(), noop_with_empty_axes)
        return reducer(x, () if dims is None else dims, bool(keepdims))


for _name, _reducer in _REDUCERS.items():
    _enter(_name, _reducer)


def _arg(x: Tensor, axis: int, keepdims: int, last: int, function: Callable[..., Tensor]) -> Tensor:
    if x.dtype in WIDE:
        x = x.to(torch.int64)
    if not last:
        return function(x, axis, keepdim=bool(keepdims))
    found = function(x.flip(axis), axis, keepdim=bool(keepdims))
    return x.shape[axis] - 1 - found


@op("ArgMax")
def arg_max(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """Index of the first (or last) maximum along the axis."""
    return _arg(x, axis, keepdims, select_last_index, torch.argmax)


@op("ArgMin")
def arg_min(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """Index of the first (or last) minimum along the axis."""
    return _arg(x, axis, keepdims, select_last_index, torch.argmin)


def _scan(
    x: Tensor, axis: int, exclusive: int, reverse: int, run: Callable[..., Tensor], unit: int
) -> Tensor:
    if reverse:
        x = x.flip(axis)
    y = run(x, axis, dtype=x.dtype)
    if exclusive:
        n = x.shape[axis]
        first = torch.full_like(y.narrow(axis, 0, 1), unit)
        y = torch.cat([first, y.narrow(axis, 0, n - 1)], axis)
    return y.flip(axis) if reverse else y


@op("CumSum", since=11, host=(1,))
def cum_sum(x: Tensor, axis: Host, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Running sum along the axis."""
    return _scan(x, axis.int(), exclusive, reverse, torch.cumsum, 0)


@op("CumProd", since=26, host=(1,))
def cum_prod(x: Tensor, axis: Host, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Running product along the axis."""
    return _scan(x, axis.int(), exclusive, reverse, torch.cumprod, 1)


@op("TopK")
def top_k_old(x: Tensor, *, axis: int = -1, k: int) -> tuple[Tensor, Tensor]:
    """The k largest along the axis (opset 1)."""
    return torch.topk(x, k, axis)  # type: ignore[return-value]


@op("TopK", since=10, host=(1,))
def top_k(x: Tensor, k: Host, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, Tensor]:
    """The k largest or smallest along the axis; equal values in order of their index."""
    count = k.int()
    wide = x.to(torch.int64) if x.dtype in WIDE else x
    values, index = torch.sort(wide, dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, count).to(x.dtype), index.narrow(axis, 0, count)
