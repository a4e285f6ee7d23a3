"""Weights of convolutions with fewer products (`native/winograd.cpp`), packed."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tilewright.rewrite.winograd import THREE, TWO, weights_of
from tilewright.runtime.cpu.huge_pages import on_large_pages
from tilewright.tuning.thresholds import OWN_KERNELS

from .conv_window import Window


def fits(window: Window, weight: Tensor) -> bool:
    """Whether it is a convolution of 3 x 3 that moves by one place, with channels enough that what is turned pays."""
    one = (1, 1)
    usual = window.kernel == (3, 3) and window.stride == one and window.dilation == one
    return usual and min(weight.shape[:2]) >= OWN_KERNELS.min_winograd_channels


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
