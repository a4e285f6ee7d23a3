"""`python -m benchmarks.cpu_convolutions --json FILE`: convolutions of fp32 on the CPU, beside eager and ONNX Runtime.

Each layer stands in a chain of several with weights of their own, as in a network: one weight alone would stay in a
cache, and a peer that turns its images around would do so for each layer. Times are of one layer of its chain. All
contestants run in turn, in one process per layer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import cpu_layers


@dataclass(frozen=True)
class Layer:
    """Channels, the side of the images, the side of the kernel, groups, images, and how many stand in a chain."""

    channels: int
    side: int
    kernel: int = 3
    groups: int = 1
    images: int = 1
    depth: int = 8

    def chain(self) -> nn.Module:
        """The layers, with biases and ReLU."""
        layers: list[nn.Module] = []
        for _ in range(self.depth):
            convolution = nn.Conv2d(
                self.channels, self.channels, self.kernel, padding=self.kernel // 2, groups=self.groups
            )
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            layers += [convolution, nn.ReLU()]
        return nn.Sequential(*layers)

    def given(self) -> Tensor:
        """An input."""
        return torch.randn(self.images, self.channels, self.side, self.side)

    @property
    def flops(self) -> int:
        """Operations of one layer, two for each product."""
        return 2 * self.images * self.channels * self.side**2 * self.channels // self.groups * self.kernel**2


LAYERS: Mapping[str, Layer] = {
    "3x3 32 at 112": Layer(32, 112),
    "3x3 64 at 56": Layer(64, 56),
    "3x3 96 at 48": Layer(96, 48),
    "3x3 128 at 28": Layer(128, 28),
    "3x3 256 at 14": Layer(256, 14),
    "3x3 512 at 7": Layer(512, 7, depth=4),
    "3x3 100 at 37, 3 images": Layer(100, 37, images=3),
    "1x1 256 at 28": Layer(256, 28, kernel=1),
    "1x1 64 at 56": Layer(64, 56, kernel=1),
    "depthwise 3x3 32 at 112": Layer(32, 112, groups=32),
    "depthwise 3x3 144 at 56": Layer(144, 56, groups=144),
    "depthwise 3x3 192 at 28": Layer(192, 28, groups=192),
    "depthwise 3x3 384 at 14": Layer(384, 14, groups=384),
    "depthwise 3x3 960 at 7": Layer(960, 7, groups=960),
    "depthwise 5x5 120 at 28": Layer(120, 28, kernel=5, groups=120),
}


if __name__ == "__main__":
    sys.exit(cpu_layers.main("benchmarks.cpu_convolutions", __doc__, LAYERS))
