"""Convolutions with one place each, as products of matrices: the window there sees the image, or the zeros around it.

    y[n, o] = sum of x[n, c, j * d - p] * weight[o, c, j] over c and the taps j that see the image

On CPUs alone, where a kernel along so few places has nothing but the taps to put in its lanes, and a product has all
channels; on GPUs nobody has measured which is faster. Kernels of one tap are left alone: libraries take them for
products already.
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
    if x.device.type != "cpu" or transposed or groups != 1 or not x.dim() == weight.dim() > 2:
        return NotImplemented
    numbers = (*x.shape[1:], *weight.shape[1:], *stride, *padding, *dilation)
    fits = not any(isinstance(n, torch.SymInt) for n in numbers) and _fits(x, weight, bias)
    if not fits or any(len(of) != x.dim() - 2 for of in (stride, padding, dilation)):
        return NotImplemented
    if min((*stride, *dilation)) < 1 or min(padding) < 0 or math.prod(weight.shape[2:]) == 1:
        return NotImplemented
    spread = list(zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True))
    seen = [_seen(size, window, border, step) for size, window, _, border, step in spread]
    if any(_places(*dim) != 1 for dim in spread) or any(low >= high for low, high in seen):
        return NotImplemented
    last = LAST.get(x.dim())
    formats = [suggest_memory_format(x), suggest_memory_format(weight)]
    for k, ((_, _, _, border, step), (low, high)) in enumerate(zip(spread, seen, strict=True), start=2):
        weight = weight.narrow(k, low, high - low)
        x = x[(slice(None),) * k + (slice(low * step - border, (high - 1) * step - border + 1, step),)]
    made = _product(x, weight, bias, channels_last=formats[1] == last)
    ones = (1,) * (x.dim() - 2)
    if last in formats:
        return made.view(x.shape[0], *ones, weight.shape[0]).movedim(-1, 1)
    return made.view(x.shape[0], weight.shape[0], *ones)


LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The format whose channels lie innermost, by the dims of an image. A convolution's result has it if an operand has."""


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the operands are those of a convolution that sums something; the op itself refuses others."""
    some = min((*x.shape[1:], *weight.shape[1:])) > 0
    return some and x.shape[1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])


def _places(size: int, window: int, stride: int, border: int, step: int) -> int:
    return (size + 2 * border - step * (window - 1) - 1) // stride + 1


def _seen(size: int, window: int, border: int, step: int) -> tuple[int, int]:
    """The taps from the first to behind the last that lie in the image, where the window begins at -`border`."""
    return -(-border // step), min(window, (size - 1 + border) // step + 1)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, *, channels_last: bool) -> Tensor:
    """The product of what a window sees and the weights there, both in the order in which the weights lie in memory."""
    if channels_last:
        x, weight = x.movedim(1, -1), weight.movedim(1, -1)
    rows, columns = x.flatten(1), weight.flatten(1).t()
    return torch.mm(rows, columns) if bias is None else torch.addmm(bias, rows, columns)
