"""An attention that nobody wrote a kernel for, in plain PyTorch: one generated kernel, no scores in memory.

    python examples/own_attention.py [LENGTH]

Scores are capped by a tanh, fall with the distance, see a sliding window, and every eighth key is seen by all.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import tilewright

LENGTH, WINDOW, CAP = 512, 128, 30.0


def attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """q, k, v: [heads, length, depth]; slopes: [heads]."""
    places = torch.arange(q.shape[1], device=q.device)
    distance = (places[:, None] - places[None, :]).abs()
    scores = CAP * torch.tanh(q @ k.mT * q.shape[2] ** -0.5 / CAP) - slopes[:, None, None] * distance
    seen = (distance < WINDOW) | (places % 8 == 0)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def main(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """The result, and that of the same program in float64."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, length, 64) for _ in range(3))
    slopes = 2.0 ** -torch.arange(1.0, 5.0)
    fast = tilewright.compile(attention, (q, k, v, slopes), dims={name: {1: "length"} for name in "qkv"})
    made = fast(q, k, v, slopes)
    assert isinstance(made, Tensor)
    exact = attention(q.double(), k.double(), v.double(), slopes.double())
    print(fast.coverage)
    for kernel in fast.kernels:
        print(kernel)
    print(f"largest error against float64: {(made - exact).abs().max():.1e}")
    return made, exact


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
