"""Equal steps between which something else is done again and again: each part is a loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.capture.loops.part_loops import agrees, loops
from torch import Tensor

import tilewright
from tilewright.capture.loops import rolled

PART, PARTS = 12, 3


@pytest.fixture(autouse=True)
def only_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """No part alone has steps enough, all of them have."""
    tilewright.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(rolled, "LOOPS", replace(rolled.LOOPS, max_unrolled_steps=2 * PART))


@pytest.mark.parametrize("first", [0, PART - 1])
def test_the_past_is_cut_off(first: int) -> None:
    """Truncated backpropagation. Where the first step cuts, no gradient comes to the beginning, not zeros."""

    def run(x: Tensor, h: Tensor, w: Tensor) -> Tensor:
        total = torch.zeros_like(h)
        for t in range(PART * PARTS):
            if t % PART == first:
                h = h.detach()
            h = torch.tanh(h @ w + x[t])
            total = total + h
        return total

    agrees(run, torch.randn(PART * PARTS, 2, 4), torch.randn(2, 4), torch.randn(4, 4), count=PARTS)


def test_too_few_together_stay_apart() -> None:
    def run(h: Tensor, y: Tensor) -> Tensor:
        for t in range(2 * PART):
            if t % PART == 0:
                h = h.detach()
            h = torch.sin(h * y)
        return h

    with torch.no_grad():
        given = torch.randn(4), torch.randn(4)
        torch.testing.assert_close(torch.compile(run, backend="tilewright")(*given), run(*given))
    assert loops() == 0
