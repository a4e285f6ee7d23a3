"""Weights of convolutions with fewer products (`native/winograd.cpp`), packed."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.ir.expr import Expr
from tilewright.ir.sizes import dims
from tilewright.rewrite.winograd import THREE, TWO, weights_of
from tilewright.runtime.cpu.huge_pages import on_large_pages
from tilewright.tuning.runtime_thresholds import OWN_KERNELS

from .conv_window import ConvWindow

TILE = len(TWO.back), len(THREE.back)
"""Places of the result, down and across, that are made together."""


def fits(window: ConvWindow, weight: Tensor, shape: Sequence[Expr]) -> bool:
    """Whether it is a convolution of 3 x 3 that moves by one place, with channels enough that what is turned pays,
    and a result `shape` large enough that reading more weights does."""
    one, (images, _, *space) = (1, 1), map(dims.static, shape)
    usual = window.kernel == (3, 3) and window.stride == one and window.dilation == one
    blocks = [-(-n // by) for n, by in zip(space, TILE, strict=True) if n is not None]
    known = images is not None and len(blocks) == len(space)
    enough = not known or math.prod(blocks, start=images or 0) >= OWN_KERNELS.min_winograd_tiles
    return usual and enough and min(weight.shape[:2]) >= OWN_KERNELS.min_winograd_channels


@functools.cache
def _turning() -> Tensor:
    """What stands for the weights of a window: [number, tap]. Rounded once, when they are packed."""
    return torch.tensor([[float(f) for f in row] for row in weights_of(TWO, THREE)], dtype=torch.float64)


def pack(weight: Tensor, panel: int) -> Tensor:
    """[N, C, 3, 3] as [N / panel, number, C, panel], the last panel filled up with zeros."""
    turning, (columns, channels) = _turning(), weight.shape[:2]
    packed = on_large_pages(torch.empty((-(-columns // panel), len(turning), channels, panel)))
    for to, part in zip(packed, weight.detach().split(panel), strict=True):
        taps = part.reshape(len(part), channels, -1).double()
        to[:, :, len(part) :] = 0.0
        to[:, :, : len(part)] = torch.einsum("ft,nct->fcn", turning, taps)
    return packed
