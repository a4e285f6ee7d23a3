"""The numbers of convolutions with their channels innermost, over images and over lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewright.library.offers.offer import FrozenProduct
from tilewright.runtime.plan.tensors import same_layout


@dataclass(frozen=True, slots=True)
class ConvWindow:
    """The numbers of a 2-d convolution: kernel, stride, padding, dilation, each (y, x), and how much more padding
    is behind the image than in front of it. One over lines has height 1."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    behind: tuple[int, int] = (0, 0)

    @property
    def pointwise(self) -> bool:
        """Whether each place reads only itself."""
        return (
            self.kernel == (1, 1)
            and self.stride == (1, 1)
            and self.padding == (0, 0)
            and self.behind == (0, 0)
        )

    @property
    def is_small(self) -> bool:
        """Whether it is a square of few places whose sums the native side keeps in registers, at most half outside."""
        side, step = self.kernel[0], self.stride[0]
        beside = max(*self.padding, *(p + more for p, more in zip(self.padding, self.behind, strict=True)))
        return (
            self.kernel == (side, side)
            and side in (3, 5, 7)
            and self.stride == (step, step)
            and step in (1, 2)
            and self.dilation == (1, 1)
            and beside <= side // 2
        )

    @property
    def run(self) -> int:
        """Taps that lie one behind the other in every place that is read: all, or each is a run of its own."""
        pointwise = self.kernel[0] == 1 and self.dilation == (1, 1) and self.padding == self.behind == (0, 0)
        return self.kernel[1] if pointwise else 1

    def sizes(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the result."""
        out = [
            (size + 2 * p + more - d * (k - 1) - 1) // s + 1
            for size, k, s, p, more, d in zip(
                (height, width),
                self.kernel,
                self.stride,
                self.padding,
                self.behind,
                self.dilation,
                strict=True,
            )
        ]
        return out[0], out[1]


def window_of(task: FrozenProduct, weight: Tensor) -> ConvWindow | None:
    """The window of a convolution over lines or images; None if the task is another one."""
    rank = weight.dim() - 2
    if rank not in (1, 2) or any(len(n) != rank for n in (task.stride, task.padding, task.dilation)):
        return None
    numbers = (weight.shape[2:], task.stride, task.padding, task.dilation)
    both = [
        (n[0], n[1]) if rank == 2 else (alone, n[0]) for n, alone in zip(numbers, (1, 1, 0, 1), strict=True)
    ]
    window = ConvWindow(*both) if min(task.padding) >= 0 else None
    if window is None or not task.uneven:
        return window
    front, behind = zip(*((0, 0), *task.uneven)[-2:], strict=True)
    padding = window.padding[0] + front[0], window.padding[1] + front[1]
    return replace(window, padding=padding, behind=(behind[0] - front[0], behind[1] - front[1]))


def dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether these strides (elements) are those of a row-major tensor without gaps."""
    return same_layout(shape, [math.prod(shape[d + 1 :]) for d in range(len(shape))], strides)


def laid_out(x: Tensor) -> Tensor:
    """Images or lines with their channels innermost."""
    if x.dim() == 4:
        last = torch.channels_last
        return x if x.is_contiguous(memory_format=last) else x.contiguous(memory_format=last)
    turned = x.transpose(1, 2)
    return x if turned.is_contiguous() else turned.contiguous().transpose(1, 2)
