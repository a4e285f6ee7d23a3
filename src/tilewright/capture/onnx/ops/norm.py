"""Normalisations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.capture.onnx.registry import op
from tilewright.capture.onnx.values.run import torch_dtype

from .cast import cast_to


@op("BatchNormalization", since=7)
def batch_norm_old(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
) -> Tensor:
    """Inference form: normalise each channel by the stored statistics."""
    return batch_norm(x, scale, bias, mean, var, epsilon=epsilon, momentum=momentum, training_mode=0)  # type: ignore[return-value]


@op("BatchNormalization", since=14)
def batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Normalise each channel; in training mode by the batch's statistics, with running ones as outputs."""
    if not training_mode:
        scale, bias = cast_to(scale, mean.dtype), cast_to(bias, mean.dtype)
        return F.batch_norm(x, mean, var, scale, bias, False, 0.0, epsilon)
    dims = [d for d in range(x.dim()) if d != 1]
    now_mean = x.mean(dims)
    now_var = x.var(dims, unbiased=False)
    y = F.batch_norm(x, now_mean, now_var, scale, bias, False, 0.0, epsilon)
    return y, mean * momentum + now_mean * (1 - momentum), var * momentum + now_var * (1 - momentum)


@op("InstanceNormalization", since=6)
def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Normalise each channel of each sample over its spatial dims."""
    return F.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


def _stash(code: int, x: Tensor) -> torch.dtype:
    wanted = torch_dtype(code)
    return x.dtype if x.dtype == torch.float64 else wanted


@op("LayerNormalization", since=17)
def layer_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    outputs: int = 1,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Normalise over the dims from `axis` on; optional outputs are the mean and 1 / standard deviation."""
    axis = axis + x.dim() if axis < 0 else axis
    shape = x.shape[axis:]
    if scale.shape == shape and (bias is None or bias.shape == shape) and scale.dtype == x.dtype:
        y = F.layer_norm(x, shape, scale, bias, epsilon)
    else:
        y = F.layer_norm(x, shape, None, None, epsilon) * scale
        y = y if bias is None else y + bias
    if outputs == 1:
        return y
    dims = list(range(axis, x.dim()))
    wide = x.to(_stash(stash_type, x))
    var, mean = torch.var_mean(wide, dims, unbiased=False, keepdim=True)
    return y, mean, torch.rsqrt(var + epsilon)


@op("RMSNormalization", since=23)
def rms_norm(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """Divide by the root of the mean square over the dims from `axis` on."""
    dims = list(range(axis + x.dim() if axis < 0 else axis, x.dim()))
    wide = x.to(_stash(stash_type, x))
    normal = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + epsilon)
    return normal.to(x.dtype) * scale


@op("GroupNormalization", since=18)
def group_norm_old(
    x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5, num_groups: int
) -> Tensor:
    """Opset 18: scale and bias per group."""
    size = x.shape[1] // num_groups
    return F.group_norm(x, num_groups, scale.repeat_interleave(size), bias.repeat_interleave(size), epsilon)


@op("GroupNormalization", since=21)
def group_norm(
    x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5, num_groups: int, stash_type: int = 1
) -> Tensor:
    """Normalise over groups of channels and all spatial dims."""
    return F.group_norm(x, num_groups, scale, bias, epsilon)


@op("LRN")
def local_response_norm(
    x: Tensor, *, alpha: float = 0.0001, beta: float = 0.75, bias: float = 1.0, size: int
) -> Tensor:
    """Divide by a power of the mean square over neighbouring channels."""
    before = (size - 1) // 2
    squares = F.pad(x.square().flatten(2).unsqueeze(1), (0, 0, before, size - 1 - before))
    total = F.avg_pool2d(squares, (size, 1), 1).squeeze(1).reshape(x.shape) * size
    return x / torch.pow(bias + alpha / size * total, beta)


@op("LpNormalization")
def lp_norm(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    """Divide by the L1 or L2 norm along the axis; a zero vector stays zero."""
    size = x.abs().sum(axis, keepdim=True) if p == 1 else x.square().sum(axis, keepdim=True).sqrt()
    return torch.where(size == 0, torch.zeros_like(x), x / size)


@op("MeanVarianceNormalization", since=9)
def mean_variance_norm(x: Tensor, *, axes: tuple[int, ...] = (0, 2, 3)) -> Tensor:
    """Subtract the mean and divide by the standard deviation over `axes`."""
    mean = x.mean(axes, keepdim=True)
    variance = x.square().mean(axes, keepdim=True) - mean.square()
    return (x - mean) / (variance.sqrt() + 1e-9)
