"""Convolutions on a GPU that take what stands behind them: results, NaN, sizes, graphs, training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tilewright
from tilewright import accuracy

FUSED = "cudnn.convolution_relu"


class Residual(nn.Module):
    """Two convolutions with a sum around them."""

    def __init__(self, channels: int, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 1)
        self.last = nn.Conv2d(channels, channels, 3, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of x."""
        return torch.relu(self.last(torch.relu(self.first(x))) + x)


def network(channels: int) -> nn.Module:
    """A stem, blocks, one of which is depthwise, and a head."""
    blocks = (Residual(channels), Residual(channels, channels), Residual(channels))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return nn.Sequential(nn.Conv2d(3, channels, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *blocks, head)


def rectified_convolutions() -> str:
    """Batches, types, memory formats and graphs; NaN stays; gradients."""
    calls = 0
    for dtype in (torch.float16, torch.bfloat16):
        for layout in (torch.channels_last, torch.contiguous_format):
            # Without a clock the library's way is taken; with one, kernels may be faster than its fused calls.
            for options in ({}, {"cuda_graphs": True, "tune_seconds": 0}):
                calls += _judge(dtype, layout, {"dynamic": False, "options": options})
            assert not _judge(dtype, layout, {"dynamic": True}), "sizes are not known"
    assert calls, "no convolution took what stands behind it"
    return f"{calls} fused calls"


def _judge(dtype: torch.dtype, layout: torch.memory_format, how: dict[str, Any]) -> int:
    torch.compiler.reset()
    tilewright.reset()
    torch.manual_seed(0)
    wide = network(64).eval().cuda().double()
    net = _laid(copy.deepcopy(wide).to(dtype), layout)
    run = torch.compile(net, backend=tilewright.backend, **how)
    for batch, side in ((2, 64), (3, 64), (5, 96)):
        x = torch.randn(batch, 3, side, side, device="cuda").to(dtype).to(memory_format=layout)
        with torch.no_grad():
            verdict = accuracy.compare(run(x), net(x), wide(x.double()), k=4)
            assert verdict.passed, f"{dtype} {layout} {batch}: {verdict}"
            x[0, 0, 9, 9] = float("nan")
            assert torch.equal(run(x).isnan(), net(x).isnan()), "NaN"
    found = sum(c.name == FUSED for made in tilewright.compilations() for c in made.calls)
    x = torch.randn(4, 3, 64, 64, device="cuda").to(dtype).to(memory_format=layout)
    verdict = accuracy.compare(_gradient(run, x), _gradient(net, x), _gradient(wide, x.double()), k=4)
    assert verdict.passed, f"gradient {dtype} {layout}: {verdict}"
    return found


def _laid(net: nn.Module, layout: torch.memory_format) -> nn.Module:
    for weight in net.parameters():
        if weight.dim() == 4:
            weight.data = weight.data.to(memory_format=layout)
    return net


def _gradient(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    given = x.detach().requires_grad_()
    (made,) = torch.autograd.grad(run(given).square().sum(), given)
    return made
