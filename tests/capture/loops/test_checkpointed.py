"""Loops in functions that are computed again (checkpoints): they stay loops, with eager's gradients and draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.capture.loops.part_loops import fewer
from tests.capture.loops.rolled_loops import loops
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["fewer"]

STEPS = 12
Step = Callable[[Tensor, Tensor, int], Tensor]


def plain(h: Tensor, w: Tensor, k: int) -> Tensor:
    return torch.tanh(h @ w) * (1 - 0.01 * k)


def dropping(h: Tensor, w: Tensor, k: int) -> Tensor:
    return F.dropout(torch.tanh(h @ w), 0.3)


def annealed(h: Tensor, w: Tensor, k: int) -> Tensor:
    return F.dropout(torch.tanh(h @ w), 0.1 + 0.05 * k)


def noisy(h: Tensor, w: Tensor, k: int) -> Tensor:
    return torch.tanh(h @ w) * torch.rand_like(h)


def compared(f: Callable[..., Tensor]) -> None:
    """Results, gradients and what is drawn afterwards are eager's."""
    x, w = torch.randn(3, 8), torch.randn(8, 8) / 2
    found: list[list[Tensor]] = []
    for g in (torch.compile(f, backend="tilewright", fullgraph=True), f):
        torch.manual_seed(3)
        given = [t.clone().requires_grad_() for t in (x, w)]
        made = g(*given)
        made.square().sum().backward()
        found.append([made.detach(), *(t.grad for t in given if t.grad is not None), torch.rand(2)])
    torch.testing.assert_close(found[0], found[1], rtol=5e-5, atol=5e-6)


@pytest.mark.parametrize("step", [plain, dropping, annealed, noisy])
def test_a_loop_in_a_checkpoint(step: Step) -> None:
    def steps(h: Tensor, w: Tensor) -> Tensor:
        for k in range(STEPS):
            h = step(h, w, k)
        return h

    def program(h: Tensor, w: Tensor) -> Tensor:
        made = checkpoint(steps, h * 2, w, use_reentrant=False)
        assert isinstance(made, Tensor)
        return made + 1

    compared(program)
    assert loops() >= (2 if step is plain else 0)


def test_loops_in_and_around_checkpoints() -> None:
    def steps(h: Tensor, w: Tensor) -> Tensor:
        for _ in range(STEPS):
            h = torch.tanh(h @ w)
        return h

    def program(h: Tensor, w: Tensor) -> Tensor:
        for k in range(3):
            made = checkpoint(steps, h * (1 + k), w, use_reentrant=False)
            assert isinstance(made, Tensor)
            h = made + h
        return h

    compared(program)
    assert loops() >= 6


def test_checkpoints_of_unlike_steps() -> None:
    """Functions that differ in the steps of their loops alone."""

    def looping(step: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def steps(h: Tensor) -> Tensor:
            for _ in range(STEPS):
                h = step(h)
            return h

        return steps

    kinds = [looping(torch.tanh), looping(torch.sin), looping(lambda h: h * 0.9), looping(lambda h: h * 0.8)]

    def program(h: Tensor, w: Tensor) -> Tensor:
        h = h @ w
        for f in kinds:
            made = checkpoint(f, h, use_reentrant=False)
            assert isinstance(made, Tensor)
            h = made
        return h

    compared(program)
