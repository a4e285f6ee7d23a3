"""Quantised arithmetic, written out in float or wide integers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.capture.onnx.registry import op
from tilewright.capture.onnx.values.run import FLOAT8, torch_dtype

from .cast import cast_to
from .nn import conv


def along(scale: Tensor, x: Tensor, axis: int, block: int = 0) -> Tensor:
    """A scale or zero point shaped to x: per tensor, per slice of `axis`, or per block along it."""
    if scale.dim() == 0 or (scale.dim() == 1 and scale.shape[0] == 1):
        return scale.reshape(())
    axis = axis + x.dim() if axis < 0 else axis
    if block:
        return scale.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    shape = [1] * x.dim()
    shape[axis] = -1
    return scale.reshape(shape)


def _to_range(y: Tensor, dtype: torch.dtype) -> Tensor:
    info = torch.iinfo(dtype)
    return y.clamp(info.min, info.max).to(torch.int64).to(dtype)


@op("QuantizeLinear", since=10)
def quantize(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Tensor:
    """round(x / scale) + zero point, saturated."""
    if zero is not None:
        dtype = zero.dtype
    else:
        dtype = torch_dtype(output_dtype) if output_dtype else torch.uint8
    y = x.to(torch.float32) / along(scale, x, axis, block_size).to(torch.float32)
    if dtype in FLOAT8:
        shift = 0.0 if zero is None else along(zero.to(torch.float32), x, axis, block_size)
        return cast_to(y + shift, dtype, bool(saturate))
    shift = 0 if zero is None else along(zero.to(torch.int64), x, axis, block_size).to(torch.float32)
    return _to_range(torch.round(y) + shift, dtype)


@op("DequantizeLinear", since=10)
def dequantize(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:
    """(x - zero point) * scale."""
    dtype = torch_dtype(output_dtype) if output_dtype else scale.dtype
    wide = torch.float32
    y = x.to(wide)
    if zero is not None:
        if x.dtype in FLOAT8:
            y = y - along(zero.to(wide), x, axis, block_size)
        else:
            y = (x.to(torch.int64) - along(zero.to(torch.int64), x, axis, block_size)).to(wide)
    return (y * along(scale, x, axis, block_size).to(wide)).to(dtype)


@op("DynamicQuantizeLinear", since=11)
def dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 values with a scale and zero point from the range of x (which includes 0).

    Where all of x is 0 that range is taken as 1, as in the standard's reference: by a scale of 0 nothing divides."""
    low = torch.clamp(x.amin(), max=0.0)
    high = torch.clamp(x.amax(), min=0.0)
    scale = torch.where(high == low, 1.0, high - low) / 255.0
    zero = torch.round((0 - low) / scale).clamp(0, 255)
    y = (torch.round(x / scale) + zero).clamp(0, 255).to(torch.uint8)
    return y, scale, zero.to(torch.uint8)


def _shifted(x: Tensor, zero: Tensor | None, axis: int, dtype: torch.dtype) -> Tensor:
    if zero is None:
        return x.to(dtype)
    return x.to(dtype) - along(zero, x, axis).to(dtype)


@op("MatMulInteger", since=10)
def matmul_integer(
    a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None
) -> Tensor:
    """Matrix product of shifted 8-bit integers, in int32."""
    left = _rows_shifted(a, a_zero)
    right = _columns_shifted(b, b_zero)
    return torch.matmul(left.to(torch.float64), right.to(torch.float64)).to(torch.int32)


def _rows_shifted(a: Tensor, zero: Tensor | None) -> Tensor:
    wide = a.to(torch.int32)
    if zero is None:
        return wide
    z = zero.to(torch.int32)
    return wide - (z.unsqueeze(-1) if z.dim() == 1 and z.shape[0] > 1 else z)


def _columns_shifted(b: Tensor, zero: Tensor | None) -> Tensor:
    wide = b.to(torch.int32)
    return wide if zero is None else wide - zero.to(torch.int32)


@op("ConvInteger", since=10)
def conv_integer(
    x: Tensor,
    w: Tensor,
    x_zero: Tensor | None = None,
    w_zero: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Convolution of shifted 8-bit integers, in int32."""
    wide = torch.float64
    y = conv(
        _shifted(x, x_zero, 1, wide),
        _shifted(w, w_zero, 0, wide),
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        pads=pads,
        strides=strides,
    )
    return torch.round(y).to(torch.int32)


@op("QLinearMatMul", since=10)
def qlinear_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
) -> Tensor:
    """Matrix product of quantised tensors, quantised again."""
    total = torch.matmul(
        _rows_shifted(a, a_zero).to(torch.float64), _columns_shifted(b, b_zero).to(torch.float64)
    )
    rows = a_scale.unsqueeze(-1) if a_scale.dim() == 1 and a_scale.shape[0] > 1 else a_scale
    factor = rows.to(torch.float64) * b_scale.to(torch.float64) / y_scale.to(torch.float64)
    return _to_range(torch.round(total * factor) + y_zero.to(torch.float64), y_zero.dtype)


@op("QLinearConv", since=10)
def qlinear_conv(
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Convolution of quantised tensors, quantised again."""
    wide = torch.float64
    total = conv(
        _shifted(x, x_zero, 1, wide),
        _shifted(w, w_zero, 0, wide),
        None if bias is None else bias.to(wide),
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        pads=pads,
        strides=strides,
    )
    factor = x_scale.to(wide) * along(w_scale.to(wide), total, 1) / y_scale.to(wide)
    return _to_range(torch.round(total * factor) + y_zero.to(wide), y_zero.dtype)
