"""What the steps of a loop read through a fold that does not use the loop's class is whole before the loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.accuracy import compare, in_float64

BATCH, CHANNELS, GROUPS = 2, 8, 4


def centred(x: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of channels without a share of their group, and its sums by channel over batch and places."""
    by_channel = x.flatten(2).sum(-1)
    by_group = by_channel.view(BATCH, GROUPS, -1).sum(-1)
    left = (x.view(BATCH, GROUPS, -1, x.shape[2], x.shape[3]) - by_group[:, :, None, None, None] * 0.01).view(
        x.shape
    )
    return left, left.sum((0, 2, 3))


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same through two folds, and a share that is known for each place."""
    by_group = (x.square().flatten(2).sum(-1)).view(BATCH, GROUPS, -1).amax(-1)
    left = (x.view(BATCH, GROUPS, -1, x.shape[2], x.shape[3]) / by_group[:, :, None, None, None]).view(
        x.shape
    )
    return left, (left * x.mean(1, keepdim=True)).sum((0, 2, 3))


@pytest.mark.parametrize("size", [4, 16, 23])
@pytest.mark.parametrize("program", [centred, scaled])
def test_sums_over_places_behind_sums_of_groups(
    program: Callable[[Tensor], tuple[Tensor, Tensor]], size: int
) -> None:
    x = torch.randn(BATCH, CHANNELS, size, size)
    got = torch.compile(program, backend="tilewright")(x)
    eager, exact = program(x), in_float64(program)(x)
    for y, e, r in zip(got, eager, exact, strict=True):
        torch.testing.assert_close(y, e, rtol=1e-4, atol=1e-4)
        verdict = compare(y, e, r, k=4)
        assert verdict.passed, verdict


def test_a_shift_by_channel_before_a_group_norm() -> None:
    def loss(x: Tensor, shift: Tensor, weights: Tensor) -> Tensor:
        return (F.group_norm(x + shift[:, None, None], GROUPS) * weights).sum()

    given = [torch.randn(s) for s in ((2, 16, 32, 32), (16,), (2, 16, 32, 32))]
    gradients: list[tuple[Tensor, ...]] = []
    for run in (loss, torch.compile(loss, backend="tilewright")):
        x, shift = (t.clone().requires_grad_() for t in given[:2])
        gradients.append(torch.autograd.grad(run(x, shift, given[2]), (x, shift)))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-3)
