"""Convolutions with one place each, as products of matrices: the window there sees the image, or the zeros around it.

    y[n, o] = sum of x[n, c, j * d - p] * weight[o, c, j] over c and the taps j that see the image

On CPUs alone: a kernel along so few places has nothing to put in its lanes but the taps, a product has all channels.
Kernels of one tap are left alone: libraries take them for products already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format


def multiply_whole_windows(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """`aten.convolution` of x [n, c, ...] and weight [o, c, ...] as one product [n, c * taps] by [c * taps, o]; or
    NotImplemented, by which torch keeps the op."""
    del output_padding
    if x.device.type != "cpu" or transposed or groups != 1 or not _fits(x, weight, bias):
        return NotImplemented
    numbers = (*x.shape[1:], *weight.shape[1:], *stride, *dilation)
    known = all(not isinstance(n, torch.SymInt) and n > 0 for n in numbers) and all(n >= 0 for n in padding)
    if not known or any(len(of) != x.dim() - 2 for of in (stride, padding, dilation)):
        return NotImplemented
    spread = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    if math.prod(weight.shape[2:]) == 1 or any(_places(*dim) != 1 for dim in spread):
        return NotImplemented
    for k, (size, window, border, step) in enumerate(
        zip(x.shape[2:], weight.shape[2:], padding, dilation, strict=True), start=2
    ):
        low, high = _seen(size, window, border, step)
        if low >= high:
            return NotImplemented  # zeros alone
        weight = weight.narrow(k, low, high - low)
        x = x[(slice(None),) * k + (slice(low * step - border, (high - 1) * step - border + 1, step),)]
    return _product(x, weight, bias)


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the operands are those of a convolution; the op itself refuses others."""
    same = x.dim() == weight.dim() > 2 and x.shape[1] == weight.shape[1] and x.shape[1] > 0
    return same and (bias is None or bias.shape == weight.shape[:1])


def _places(size: int, window: int, stride: int, border: int, step: int) -> int:
    return (size + 2 * border - step * (window - 1) - 1) // stride + 1


def _seen(size: int, window: int, border: int, step: int) -> tuple[int, int]:
    """The taps from the first to behind the last that lie in the image, where the window begins at -`border`."""
    return -(-border // step), min(window, (size - 1 + border) // step + 1)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of what a window sees and the weights there; as contiguous as the convolution's result."""
    last = x.dim() == 4 and torch.channels_last in (suggest_memory_format(x), suggest_memory_format(weight))
    rows, columns = x.flatten(1), weight.flatten(1).t()
    made = torch.mm(rows, columns) if bias is None else torch.addmm(bias, rows, columns)
    ones = (1,) * (x.dim() - 2)
    if last:
        return made.view(x.shape[0], *ones, weight.shape[0]).permute(0, 3, 1, 2)
    return made.view(x.shape[0], weight.shape[0], *ones)
