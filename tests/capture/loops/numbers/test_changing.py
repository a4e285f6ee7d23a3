"""Numbers that change with the step where ops write in place, and inside functions that steps call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.capture.loops.part_loops import agrees, fewer, loops
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["fewer"]

STEPS = 12

IN_PLACE: dict[str, Callable[[Tensor, Tensor, int], object]] = {
    "scaled and added": lambda h, y, t: h.mul_(1 / (t + 1)).add_(y, alpha=t * 0.1),
    "what is added reads it": lambda h, y, t: h.add_(torch.sin(h) + y, alpha=t * 0.1),
    "products": lambda h, y, t: h.addcmul_(h.cos(), y, value=0.1 * t).addcdiv_(y, y.abs() + 1, value=0.2 * t),
    "powers": lambda h, y, t: h.abs_().add_(0.5).pow_(1 + 0.01 * t).lerp_(y, 0.05 * t),
    "limits": lambda h, y, t: h.clamp_(-0.1 * t, 1.0 + t).masked_fill_(y > 1, 0.1 * t),
    "filled": lambda h, y, t: h.add_((h + y).fill_(0.1 * t)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_written_in_place(name: str) -> None:
    """Into an input, which has them afterwards."""

    def run(y: Tensor, h: Tensor) -> Tensor:
        for t in range(STEPS):
            IN_PLACE[name](h, y, t)
        return h * 2

    def step(y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return run(y, h), h

    agrees(step, torch.randn(8), torch.randn(8), trains=False)


@pytest.mark.parametrize("name", ["scaled and added", "powers"])
def test_gradients_of_what_is_written_in_place(name: str) -> None:
    def run(y: Tensor, h: Tensor) -> Tensor:
        h = h * 1.5
        for t in range(STEPS):
            IN_PLACE[name](h, y, t)
        return h

    agrees(run, torch.randn(8), torch.rand(8) + 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
def test_of_other_types(dtype: torch.dtype) -> None:
    def run(y: Tensor, h: Tensor) -> Tensor:
        for t in range(STEPS):
            h.mul_(1 + t % 2 if dtype == torch.int64 else 1 / (t + 1)).add_(y, alpha=t)
        return h

    y, h = (torch.randn(64) * 4).to(dtype), (torch.randn(64) * 4).to(dtype)
    have = torch.compile(run, backend="tilewright", fullgraph=True)(y, h.clone())
    torch.testing.assert_close(have, run(y, h.clone()), rtol=0, atol=0)
    assert loops() == 1


def test_a_number_that_is_not_written_over() -> None:
    def run(y: Tensor, h: Tensor) -> Tensor:
        for t in range(STEPS):
            scale = 1.0 + t
            scale *= y
            h = torch.sin(h + scale)
        return h

    agrees(run, torch.randn(8), torch.randn(8))


def wave(h: Tensor, y: Tensor, by: float) -> Tensor:
    return F.leaky_relu(torch.sin(h * y + by), by)


CHECKPOINTED: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "one": lambda h, y, t: _kept(wave, h, y, 0.1 * t),
    "two": lambda h, y, t: _kept(wave, _kept(wave, h, y, 0.1 * t), y, 0.3 - 0.01 * t),
    "and one that stays": lambda h, y, t: _kept(wave, _kept(wave, h, y, 0.1 * t), y, 0.25),
    "whole": lambda h, y, t: _kept(lambda a, b, k: a.cos() + b * k, h, y, t),
}


def _kept(f: Callable[[Tensor, Tensor, float], Tensor], h: Tensor, y: Tensor, by: float) -> Tensor:
    made = checkpoint(f, h, y, by, use_reentrant=False)
    assert isinstance(made, Tensor)
    return made


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_inside_checkpointed_functions(name: str) -> None:
    def run(y: Tensor, h: Tensor) -> Tensor:
        for t in range(STEPS):
            h = CHECKPOINTED[name](h, y, t)
        return h

    agrees(run, torch.randn(8) / 2, torch.randn(8))


def test_functions_that_differ_in_more_stay_apart() -> None:
    def run(y: Tensor, h: Tensor) -> Tensor:
        for t in range(STEPS):
            h = _kept(lambda a, b, k: a.sin() + b if k % 2 else a.cos() * b, h, y, t)
        return h

    agrees(run, torch.randn(8) / 2, torch.randn(8), count=0)
