"""Loops that draw with a chance that changes with the step: the numbers are those of eager mode, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.capture.loops.part_loops import fewer
from tests.capture.loops.rolled_loops import loops
from torch import Tensor

__all__ = ["fewer"]

STEPS = 12
Step = Callable[[Tensor, int], Tensor]


def growing(h: Tensor, k: int) -> Tensor:
    return F.dropout(torch.tanh(h), 0.1 + 0.05 * k)


def twice(h: Tensor, k: int) -> Tensor:
    h = F.dropout(torch.tanh(h), 0.4, training=True)
    return torch.dropout(h + 1, 0.1 + 0.05 * k, True) * F.dropout(torch.ones_like(h), p=0.2)


def to_the_end(h: Tensor, k: int) -> Tensor:
    return h + F.dropout(torch.tanh(h), (k + 1) / STEPS)


def path(h: Tensor, k: int) -> Tensor:
    keep = 1 - 0.05 * k
    return h + torch.tanh(h) * h.new_empty(h.shape[0], 1).bernoulli_(keep).div_(keep)


def uniform(h: Tensor, k: int) -> Tensor:
    return torch.tanh(h) + torch.empty(3, 8).uniform_(-0.1 * k - 0.1, 0.2 * k)


def normal(h: Tensor, k: int) -> Tensor:
    return torch.tanh(h) + torch.normal(0.0, 0.1 * k, (3, 8)) + torch.empty(3, 8).normal_(0.5, 0.1 * k)


def gumbel(h: Tensor, k: int) -> Tensor:
    return h + F.gumbel_softmax(h, tau=1 / (k + 1))


def unused(h: Tensor, k: int) -> Tensor:
    return F.dropout(torch.tanh(h), 0.05 * k, training=False)


def compared(step: Step, count: int, x: Tensor | None = None) -> None:
    """Results, gradients and what is drawn afterwards are eager's, and `count` loops run in each pass."""

    def program(h: Tensor) -> Tensor:
        for k in range(STEPS):
            h = step(h, k)
        return h

    def results(f: Callable[[Tensor], Tensor], given: Tensor) -> list[Tensor]:
        torch.manual_seed(3)
        leaf = given.clone().requires_grad_()
        with torch.no_grad():
            made = [f(leaf)]
        out = f(leaf)
        out.sum().backward()
        assert leaf.grad is not None
        return [*made, out.detach(), leaf.grad, torch.rand(2)]

    x = torch.randn(3, 8) if x is None else x
    fast = torch.compile(program, backend="tilewright", fullgraph=True)
    torch.testing.assert_close(results(fast, x), results(program, x), rtol=2e-5, atol=2e-6)
    assert loops() == count


@pytest.mark.parametrize("step", [growing, twice, to_the_end, path, uniform, normal, gumbel, unused])
def test_they_are_loops(step: Step) -> None:
    compared(step, 3)


def test_doubles() -> None:
    compared(growing, 3, torch.randn(3, 8, dtype=torch.float64))


def test_steps_that_drop_nothing_are_no_part_of_the_loop() -> None:
    """Dropout is its operand there, and draws nothing."""
    compared(lambda h, k: F.dropout(torch.tanh(h), 0.05 * max(0, k - 2)), 3)


def test_other_draws_keep_their_order() -> None:
    compared(lambda h, k: F.dropout(torch.tanh(h), 0.1 + 0.05 * k) + torch.rand_like(h), 0)


def test_chances_that_tensors_tell() -> None:
    chances = torch.linspace(0.1, 0.9, STEPS)
    compared(lambda h, k: torch.tanh(h) * torch.empty_like(h).bernoulli_(chances[k]), 3)


def test_any_batch() -> None:
    def program(h: Tensor) -> Tensor:
        for k in range(STEPS):
            h = growing(h, k)
        return h

    fast = torch.compile(program, backend="tilewright", fullgraph=True, dynamic=True)
    for rows in (3, 5):
        x, made = torch.randn(rows, 8), list[Tensor]()
        for f in (fast, program):
            torch.manual_seed(1)
            made.append(f(x))
        torch.testing.assert_close(made[0], made[1])
    assert loops() == 1
