"""Trains a small convolutional network, compiled and in eager mode, from the same start.

python examples/train.py [STEPS]
"""

from __future__ import annotations

import copy
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

STEPS = 8


def network() -> nn.Module:
    """Two convolutions with batch norm, and a head."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Images whose brightest channel is their class."""
    draw = torch.Generator().manual_seed(0)
    found: list[tuple[Tensor, Tensor]] = []
    for _ in range(steps):
        images = torch.randn(16, 3, 16, 16, generator=draw).to(memory_format=torch.channels_last)
        found.append((images, images.mean((2, 3)).argmax(1)))
    return found


def train(model: nn.Module, forward: nn.Module, steps: int) -> list[float]:
    """The loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for images, labels in batches(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(steps: int = STEPS) -> tuple[list[float], list[float]]:
    """Losses compiled and in eager mode."""
    torch.manual_seed(0)
    model = network().to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    compiled = train(model, torch.compile(model, backend="tilewright"), steps)
    eager = train(twin, twin, steps)
    for k, (ours, theirs) in enumerate(zip(compiled, eager, strict=True)):
        print(f"step {k}: loss {ours:.5f}, in eager mode {theirs:.5f}")
    return compiled, eager


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
