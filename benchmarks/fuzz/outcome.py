"""One run of a program: what it makes, and what differentiating it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """What a run made: results, gradients of inputs, and the inputs as they are afterwards."""

    results: list[Tensor]
    gradients: list[Tensor]
    inputs: list[Tensor]


@dataclass(frozen=True)
class Draw:
    """What one draw made: ours, eager's and that of float64. `seed` is that of the inputs."""

    seed: int
    outcomes: tuple[Outcome, Outcome, Outcome]


def ran(
    forward: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    *,
    training: bool = True,
    draw: int = 0,
) -> Outcome:
    """Run, and where an input wants a gradient, differentiate a sum of all results, weighted by the numbers of a
    `draw`. Raises what the program raises, on its device too."""
    asked = [x for x in inputs if x.requires_grad]
    leaves = list(inputs)
    with nullcontext() if training and asked else torch.no_grad():
        results = forward(*leaves)
    gradients: list[Tensor] = []
    live = [r for r in results if r.requires_grad]
    if training and asked and live:
        weights = [_weights(r, k, draw) for k, r in enumerate(live)]
        found = torch.autograd.grad(live, asked, weights, allow_unused=True)
        gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(asked, found, strict=True)]
    if any(r.is_cuda for r in results):
        torch.cuda.synchronize()  # what a kernel did wrong is told here, not in the next program
    return Outcome([r.detach() for r in results], gradients, [x.detach() for x in inputs])


def _weights(r: Tensor, k: int, draw: int) -> Tensor:
    numbers = torch.Generator().manual_seed(1000 * (1 + draw) + k)
    return torch.randn(r.shape, generator=numbers, device="cpu").to(r.device, r.dtype)
