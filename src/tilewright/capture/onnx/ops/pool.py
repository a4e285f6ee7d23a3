"""Pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.capture.onnx.registry import op
from tilewright.capture.onnx.values.run import Dim, Host, is_static, sym_max

from .nn import constant_pad, spatial_pads


def _max_pool1d(x: Tensor, *window: object) -> Tensor:
    """With the places of the maxima, which nobody reads: without them torch's function fixes the length on a CPU."""
    return F.max_pool1d_with_indices(x, *window)[0]  # pyright: ignore[reportArgumentType]


_MAX = {1: _max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@op("GlobalAveragePool")
def global_average_pool(x: Tensor) -> Tensor:
    """Mean over all spatial dims, kept as size 1."""
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


@op("GlobalMaxPool")
def global_max_pool(x: Tensor) -> Tensor:
    """Maximum over all spatial dims, kept as size 1."""
    return torch.amax(x, tuple(range(2, x.dim())), keepdim=True)


@op("GlobalLpPool", since=2)
def global_lp_pool(x: Tensor, *, p: int = 2) -> Tensor:
    """p-norm over all spatial dims, kept as size 1."""
    return x.abs().pow(p).sum(tuple(range(2, x.dim())), keepdim=True).pow(1.0 / p)


def rounds_up(ceil_mode: int, auto_pad: str) -> bool:
    """Whether a window that starts inside may reach past the end; padding to the same size leaves none."""
    return bool(ceil_mode) and not auto_pad.startswith("SAME")


def pool_pads(
    x: Tensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int] | None,
    auto_pad: str,
    ceil_mode: int,
) -> tuple[list[Dim], list[Dim], list[Dim]]:
    """Padding before, after, and how far past that a ceil-mode window may reach."""
    before, after = spatial_pads(auto_pad, pads, x.shape[2:], kernel, strides, dilations)
    beyond: list[Dim] = [0] * len(kernel)
    if rounds_up(ceil_mode, auto_pad):
        for i, (k, s, d) in enumerate(zip(kernel, strides, dilations, strict=True)):
            size = x.shape[2 + i]
            span = size + before[i] + after[i] - (k - 1) * d - 1
            out = (span + s - 1) // s + 1
            if (out - 1) * s >= size + before[i]:
                out = out - 1
            beyond[i] = sym_max((out - 1) * s - span, 0)
    return list(before), list(after), beyond


def windows(x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Tensor:
    """[N, C, *spatial] to [N, C, *out, *kernel], a view."""
    rank = len(kernel)
    for i in range(rank):
        extent = (kernel[i] - 1) * dilations[i] + 1
        x = x.unfold(2 + i, extent, strides[i])
        if dilations[i] > 1:
            x = x[..., :: dilations[i]]
    return x


@op("AveragePool", since=7)
def average_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Mean over windows; padding counts only if `count_include_pad`."""
    rank = len(kernel_shape)
    strides = strides or (1,) * rank
    dilations = dilations or (1,) * rank
    before, after, beyond = pool_pads(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    symmetric = all(is_static(p) for p in (*before, *after)) and before == after
    fits = symmetric and all(2 * b <= k for b, k in zip(before, kernel_shape, strict=True))
    if fits and max(dilations) == 1 and rank in _AVERAGE:
        pad = tuple(before)
        return _AVERAGE[rank](
            x,
            tuple(kernel_shape),
            tuple(strides),
            pad,
            rounds_up(ceil_mode, auto_pad),
            bool(count_include_pad),
        )
    dims = tuple(range(-rank, 0))
    ones = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    padded = constant_pad(x, before, after)
    counted = constant_pad(ones, before, after, 1.0 if count_include_pad else 0.0)
    padded, counted = (constant_pad(t, [0] * rank, beyond) for t in (padded, counted))
    total = windows(padded, kernel_shape, strides, dilations).sum(dims)
    return total / windows(counted, kernel_shape, strides, dilations).sum(dims)


@op("LpPool", since=2)
def lp_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int],
    p: int = 2,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """p-norm over windows."""
    rank = len(kernel_shape)
    strides = strides or (1,) * rank
    dilations = dilations or (1,) * rank
    before, after, beyond = pool_pads(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    padded = constant_pad(constant_pad(x, before, after), [0] * rank, beyond)
    parts = windows(padded, kernel_shape, strides, dilations)
    return parts.abs().pow(p).sum(tuple(range(-rank, 0))).pow(1.0 / p)


@op("MaxPool")
def max_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    storage_order: int = 0,
    strides: Sequence[int] | None = None,
    outputs: int,
) -> Tensor | tuple[Tensor, Tensor]:
    """Maximum over windows, with the flat index of each if asked for."""
    rank = len(kernel_shape)
    strides = strides or (1,) * rank
    dilations = dilations or (1,) * rank
    before, after, beyond = pool_pads(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    symmetric = all(is_static(p) for p in (*before, *after)) and before == after
    fits = symmetric and all(2 * b <= k for b, k in zip(before, kernel_shape, strict=True))
    if fits and outputs == 1 and rank in _MAX and x.is_floating_point():
        return _MAX[rank](
            x,
            tuple(kernel_shape),
            tuple(strides),
            tuple(before),
            tuple(dilations),
            rounds_up(ceil_mode, auto_pad),
        )
    low = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    padded = constant_pad(constant_pad(x, before, after, low), [0] * rank, beyond, low)
    parts = windows(padded, kernel_shape, strides, dilations).flatten(-rank)
    if outputs == 1:
        return parts.amax(-1)
    best = parts.argmax(-1, keepdim=True)
    index = _flat_index(x, bool(storage_order))
    index = constant_pad(constant_pad(index, before, after), [0] * rank, beyond)
    places = windows(index, kernel_shape, strides, dilations).flatten(-rank)
    return parts.gather(-1, best).squeeze(-1), places.gather(-1, best).squeeze(-1)


def _flat_index(x: Tensor, column_major: bool) -> Tensor:
    """The index of each element in the flattened tensor (spatial dims in column-major order if asked)."""
    index = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    if not column_major:
        return index
    spatial = list(range(2, x.dim()))
    backwards = torch.arange(x.numel(), device=x.device).reshape(*x.shape[:2], *reversed(x.shape[2:]))
    return backwards.permute(0, 1, *reversed(spatial))


@op("MaxUnpool", since=9, host=(2,))
def max_unpool(
    x: Tensor,
    index: Tensor,
    output_shape: Host | None = None,
    *,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Put values back at the flat indices that MaxPool gave; zero elsewhere."""
    rank = len(kernel_shape)
    strides = strides or (1,) * rank
    pads = pads or (0,) * (2 * rank)
    inferred = [
        (x.shape[2 + i] - 1) * strides[i] - pads[i] - pads[rank + i] + kernel_shape[i] for i in range(rank)
    ]
    small = [*x.shape[:2], *inferred]
    count = 1
    for d in small:
        count = count * d
    flat = torch.zeros(count, dtype=x.dtype, device=x.device)
    result = flat.scatter(0, index.reshape(-1), x.reshape(-1)).reshape(small)
    if output_shape is None:
        return result
    after = [want - have for want, have in zip(output_shape.ints()[2:], inferred, strict=True)]
    return constant_pad(result, [0] * rank, after)
