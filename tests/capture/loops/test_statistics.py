"""Loops whose steps update running statistics, which autograd does not see, and steps that begin with an input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.capture.loops.part_loops import agrees, fewer, loops
from torch import Tensor, nn

import tilewright

__all__ = ["fewer"]
STEPS = 9
"""One more than are no loop: all of them must be found."""


class _Normed(nn.Module):
    def __init__(self, norm: nn.Module, *, before: bool) -> None:
        super().__init__()
        self.norm, self.before = norm, before

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) if self.before else x
        for _ in range(STEPS):
            x = torch.sin(self.norm(x)) + 0.5 * x
        return x


def _trained(module: _Normed, x: Tensor, *, compiled: bool) -> list[Tensor]:
    """Results of two calls, gradients, and the statistics behind them."""
    call = torch.compile(module, backend="tilewright", fullgraph=True) if compiled else module
    x = x.clone().requires_grad_()
    made = [call(x), call(2 * x)]
    weights = torch.linspace(0.5, 1.5, x.numel()).view_as(x)
    (weights * (made[0] + made[1])).sum().backward()
    found = [t.grad for t in (x, *module.parameters()) if t.grad is not None]
    return [*(t.detach() for t in made), *found, *module.buffers()]


@pytest.mark.parametrize("before", [False, True], ids=["", "before"])
@pytest.mark.parametrize("dims", [1, 2])
def test_a_batch_norm_that_all_steps_share(dims: int, before: bool) -> None:
    norm = nn.BatchNorm1d if dims == 1 else nn.BatchNorm2d
    x = torch.randn(8, 4, *([3, 3] if dims == 2 else []))
    have = _trained(_Normed(norm(4), before=before), x, compiled=True)
    assert loops() == 2
    tilewright.reset()
    want = _trained(_Normed(norm(4), before=before), x, compiled=False)
    torch.testing.assert_close(have, want, rtol=2e-5, atol=2e-6)


def test_statistics_made_by_the_program_and_read_behind_the_loop() -> None:
    def run(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = torch.zeros(4), torch.ones(4)
        for _ in range(STEPS):
            x = torch.sin(F.batch_norm(x, mean, var, w, None, True)) + x * w
        return x, var * w + mean

    agrees(run, torch.randn(8, 4), torch.rand(4))


def test_the_first_step_reads_an_input() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(STEPS):
            x = torch.tanh(x * w + x)
        return x

    agrees(run, torch.randn(8, 4), torch.rand(4))


def test_the_first_steps_read_another_weight() -> None:
    def run(x: Tensor, w: Tensor, first: Tensor) -> Tensor:
        for k in range(STEPS + 1):
            x = torch.tanh(x * (w if k else first) + 1)
        return x

    agrees(run, torch.randn(8, 4), torch.rand(4), torch.rand(4))
