"""Conversions between element types."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.capture.onnx.registry import op
from tilewright.capture.onnx.values.run import FLOAT8, torch_dtype


def cast_to(x: Tensor, dtype: torch.dtype, saturate: bool = True, round_mode: str = "up") -> Tensor:
    """x in another type; to 8-bit floats with saturation, unless `saturate` is False.

    `round_mode` (up, down, nearest) is for the exponent-only type, whose values are powers of two.
    """
    if x.dtype == dtype:
        return x
    if dtype == torch.float8_e8m0fnu:
        return _to_power(x, saturate, round_mode)
    if dtype in FLOAT8:
        return _to_float8(x, dtype, saturate)
    if dtype == torch.bool:
        return (x.to(torch.float32) if x.dtype in FLOAT8 else x) != 0
    if x.dtype in FLOAT8:
        return x.to(torch.float32).to(dtype)
    if x.dtype.is_floating_point and dtype in (torch.uint16, torch.uint32, torch.uint64):
        return x.to(torch.int64).to(dtype)
    return x.to(dtype)


_E4M3_LIMIT = 464.0
"""Halfway between the largest float8_e4m3fn and the next step, which stands for NaN."""


def _to_float8(x: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    wide = x.to(torch.float32)
    if saturate:
        largest = torch.finfo(dtype).max
        wide = torch.where(torch.isnan(wide), wide, wide.clamp(-largest, largest))
    elif dtype == torch.float8_e4m3fn:
        wide = torch.where(wide.abs() > _E4M3_LIMIT, torch.nan, wide)
    return wide.to(dtype)


def _to_power(x: Tensor, saturate: bool, mode: str) -> Tensor:
    """The exponent bits of x, rounded by its fraction bits."""
    bits = x.to(torch.float32).view(torch.int32)
    exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if mode == "up":
        more = fraction > 0
    elif mode == "nearest":
        more = (fraction > 0x400000) | ((fraction == 0x400000) & (exponent > 0))
    else:
        more = torch.zeros_like(fraction, dtype=torch.bool)
    if saturate:
        more = more & (exponent != 0xFE)
    rounded = torch.where(more & (exponent != 0xFF), exponent + 1, exponent)
    return rounded.to(torch.uint8).view(torch.float8_e8m0fnu)


@op("Cast", since=6)
def cast(x: Tensor, *, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    """x in the type `to`."""
    return cast_to(x, torch_dtype(to), bool(saturate), round_mode)


@op("CastLike", since=15)
def cast_like(x: Tensor, like: Tensor, *, saturate: int = 1, round_mode: str = "up") -> Tensor:
    """x in the type of the second input."""
    return cast_to(x, like.dtype, bool(saturate), round_mode)


@op("BitCast", since=26)
def bit_cast(x: Tensor, *, to: int) -> Tensor:
    """The same bits read as another type of the same width."""
    return x.view(torch_dtype(to))
