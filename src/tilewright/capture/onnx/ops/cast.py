"""Conversions between element types."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.capture.onnx.registry import op
from tilewright.capture.onnx.values import FLOAT8, torch_dtype


def cast_to(x: Tensor, dtype: torch.dtype, saturate: bool = True) -> Tensor:
    """x in another type; to 8-bit floats with saturation, unless `saturate` is False."""
    if x.dtype == dtype:
        return x
    if dtype in FLOAT8 and dtype != torch.float8_e8m0fnu:
        return _to_float8(x, dtype, saturate)
    if dtype == torch.bool:
        return (x.to(torch.float32) if x.dtype in FLOAT8 else x) != 0
    if x.dtype in FLOAT8:
        return x.to(torch.float32).to(dtype)
    if x.dtype.is_floating_point and dtype in (torch.uint16, torch.uint32, torch.uint64):
        return x.to(torch.int64).to(dtype)
    return x.to(dtype)


def _to_float8(x: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    wide = x.to(torch.float32)
    largest = torch.finfo(dtype).max
    if saturate:
        keeps_inf = dtype == torch.float8_e5m2 and False
        wide = wide if keeps_inf else torch.where(torch.isnan(wide), wide, wide.clamp(-largest, largest))
    return wide.to(dtype)


@op("Cast", since=6)
def cast(x: Tensor, *, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    """x in the type `to`."""
    return cast_to(x, torch_dtype(to), bool(saturate))


@op("CastLike", since=15)
def cast_like(x: Tensor, like: Tensor, *, saturate: int = 1, round_mode: str = "up") -> Tensor:
    """x in the type of the second input."""
    return cast_to(x, like.dtype, bool(saturate))


@op("BitCast", since=26)
def bit_cast(x: Tensor, *, to: int) -> Tensor:
    """The same bits read as another type of the same width."""
    return x.view(torch_dtype(to))
