"""Activation functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.capture.onnx.registry import op
from tilewright.capture.onnx.values.run import place_of


@op("Relu", since=6)
def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return torch.relu(x)


@op("Sigmoid", since=6)
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return torch.sigmoid(x)


@op("HardSigmoid", since=6)
def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    """clamp(alpha * x + beta, 0, 1)."""
    return torch.clamp(x * alpha + beta, 0.0, 1.0)


@op("HardSwish", since=14)
def hard_swish(x: Tensor) -> Tensor:
    """x * clamp(x / 6 + 1/2, 0, 1)."""
    return F.hardswish(x)


@op("Elu", since=6)
def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """x if positive, else alpha * (exp(x) - 1)."""
    return F.elu(x, alpha)


@op("Celu", since=12)
def celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """max(0, x) + min(0, alpha * (exp(x / alpha) - 1))."""
    return F.celu(x, alpha)


@op("Selu", since=6)
def selu(
    x: Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875
) -> Tensor:
    """gamma * (x if positive, else alpha * (exp(x) - 1))."""
    return torch.where(x > 0, x, alpha * torch.expm1(x)) * gamma


@op("LeakyRelu", since=6)
def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    """x if positive, else alpha * x."""
    return F.leaky_relu(x, alpha)


@op("PRelu", since=7)
def prelu(x: Tensor, slope: Tensor) -> Tensor:
    """x if positive, else slope * x, slope broadcast to x."""
    return torch.where(x < 0, x * slope, x)


@op("ThresholdedRelu", since=10)
def thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """x where it exceeds alpha, else 0: also for NaN, which exceeds nothing."""
    return torch.where(x > alpha, x, 0.0)


@op("Shrink", since=9)
def shrink(x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    """Move values outside [-lambd, lambd] towards zero by bias; the others become zero."""
    zero = torch.zeros_like(x)
    low = torch.where(x < -lambd, (x + bias).to(x.dtype), zero)
    return torch.where(x > lambd, (x - bias).to(x.dtype), low)


@op("Softplus")
def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x))."""
    return F.softplus(x)


@op("Softsign")
def softsign(x: Tensor) -> Tensor:
    """x / (1 + |x|)."""
    return F.softsign(x)


@op("Mish", since=18)
def mish(x: Tensor) -> Tensor:
    """x * tanh(softplus(x))."""
    return F.mish(x)


@op("Gelu", since=20)
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x * Phi(x), exact or by tanh."""
    return F.gelu(x, approximate=approximate)


@op("Swish", since=24)
def swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """x * sigmoid(alpha * x)."""
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(x * alpha)


@op("Softmax")
def softmax_2d(x: Tensor, *, axis: int = 1) -> Tensor:
    """Softmax over all dims from `axis` on."""
    if axis in (-1, x.dim() - 1):
        return torch.softmax(x, -1)
    return torch.softmax(x.flatten(axis), -1).reshape(x.shape)


@op("Softmax", since=13)
def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Softmax over one axis."""
    return torch.softmax(x, place_of(axis, x.dim()))


@op("LogSoftmax")
def log_softmax_2d(x: Tensor, *, axis: int = 1) -> Tensor:
    """Logarithm of softmax over all dims from `axis` on."""
    if axis in (-1, x.dim() - 1):
        return torch.log_softmax(x, -1)
    return torch.log_softmax(x.flatten(axis), -1).reshape(x.shape)


@op("LogSoftmax", since=13)
def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Logarithm of softmax over one axis."""
    return torch.log_softmax(x, place_of(axis, x.dim()))


@op("Hardmax")
def hardmax_2d(x: Tensor, *, axis: int = 1) -> Tensor:
    """One at the first maximum over all dims from `axis` on, else zero."""
    return hardmax(x.flatten(axis), axis=-1).reshape(x.shape)


@op("Hardmax", since=13)
def hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """One at the first maximum along the axis, else zero."""
    best = torch.argmax(x, axis, keepdim=True)
    return torch.zeros_like(x).scatter(axis, best, 1.0)
