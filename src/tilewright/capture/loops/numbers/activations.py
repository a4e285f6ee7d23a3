"""Activations and norms whose plain numbers change with the step of a loop, as `twins` has other ops. Their gradients
are those of the ops at the places too where two pieces meet. What an op is told to write `inplace`, who calls its twin
writes (`stepping`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .twins import Number, Twin, computing, number, rounded


def _leaky_relu(
    input: Tensor, negative_slope: Number = 0.01, inplace: bool = False, *, kind: torch.dtype
) -> Tensor:
    x = input.to(computing(input.dtype))
    return torch.where(x > 0, x, x * number(negative_slope, kind)).to(kind)


def _elu(input: Tensor, alpha: Number = 1.0, inplace: bool = False, *, kind: torch.dtype) -> Tensor:
    x = input.to(computing(input.dtype))
    return torch.where(x > 0, x, F.elu(x) * number(alpha, kind)).to(kind)


def _celu(input: Tensor, alpha: Number = 1.0, inplace: bool = False, *, kind: torch.dtype) -> Tensor:
    x, scale = input.to(computing(input.dtype)), number(alpha, kind)
    bent = torch.where(x > 0, torch.zeros_like(x), x) / scale  # above 0 where the scale is below
    return torch.where(x > 0, x, torch.expm1(bent) * scale).to(kind)


def _softplus(input: Tensor, beta: Number = 1, threshold: float = 20, *, kind: torch.dtype) -> Tensor:
    x = input.to(computing(input.dtype))
    scale = rounded(beta, computing(kind), input)
    scaled, divisor = x * scale, torch.where(scale == 0, torch.ones_like(scale), scale)
    bent = torch.where(scaled > threshold, x, F.softplus(x * divisor, 1, threshold) / divisor)
    # of 0 the op makes infinities whose slope is a half
    endless = (x - x.detach()) / 2 + math.log(2) / scale
    return torch.where(scale == 0, endless, bent).to(kind)


def _threshold(
    input: Tensor, threshold: Number, value: Number, inplace: bool = False, *, kind: torch.dtype
) -> Tensor:
    return torch.where(input <= rounded(threshold, kind, input), rounded(value, kind, input), input)


def _hardtanh(
    input: Tensor, min_val: Number = -1.0, max_val: Number = 1.0, inplace: bool = False, *, kind: torch.dtype
) -> Tensor:
    low, high = rounded(min_val, kind, input), rounded(max_val, kind, input)
    outside = (input <= low) | (input >= high)  # no gradient passes at the bounds, unlike `clamp`
    return torch.where(outside, torch.clamp(input.detach(), low, high), input)


def _hardshrink(input: Tensor, lambd: Number = 0.5, *, kind: torch.dtype) -> Tensor:
    most = rounded(lambd, kind, input)
    return torch.where((input >= -most) & (input <= most), torch.zeros_like(input), input)


def _softshrink(input: Tensor, lambd: Number = 0.5, *, kind: torch.dtype) -> Tensor:
    most = rounded(lambd, kind, input)
    moved = input - torch.copysign(most, input.detach())
    return torch.where((input >= -most) & (input <= most), torch.zeros_like(input), moved)


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: Number = 1e-5, *, kind: torch.dtype,
) -> Tensor:  # fmt: skip
    x = input.to(computing(kind))
    dims = list(range(-len(normalized_shape), 0))
    var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    x = (x - mean) * torch.rsqrt(var + number(eps, kind))
    x = x if weight is None else x * weight
    return (x if bias is None else x + bias).to(kind)


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: Number | None = None,
    *, kind: torch.dtype,
) -> Tensor:  # fmt: skip
    x = input.to(computing(kind))
    dims = list(range(-len(normalized_shape), 0))
    assert eps is not None
    x = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + number(eps, kind))
    return (x if weight is None else x * weight).to(kind)


ACTIVATIONS: dict[object, Twin] = {
    F.leaky_relu: Twin(_leaky_relu, ("negative_slope",)),
    F.elu: Twin(_elu, ("alpha",)),
    F.celu: Twin(_celu, ("alpha",), accepts=lambda alpha: alpha != 0),
    F.softplus: Twin(_softplus, ("beta",), accepts=math.isfinite),  # of infinity the twin has other gradients
    F.threshold: Twin(_threshold, ("threshold", "value")),
    torch.threshold: Twin(_threshold, ("threshold", "value")),
    F.hardtanh: Twin(_hardtanh, ("min_val", "max_val")),
    F.hardshrink: Twin(_hardshrink, ("lambd",)),
    torch.hardshrink: Twin(_hardshrink, ("lambd",)),
    F.softshrink: Twin(_softshrink, ("lambd",)),
    F.layer_norm: Twin(_layer_norm, ("eps",)),
    F.rms_norm: Twin(_rms_norm, ("eps",)),
    torch.rms_norm: Twin(_rms_norm, ("eps",)),
}
"""By what a node calls."""
