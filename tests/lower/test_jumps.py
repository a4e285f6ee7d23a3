"""Steps that a mask of data hides are jumped over where the mask is known, and nowhere else."""

from __future__ import annotations

import torch
from torch import Tensor

import tilewright


def chosen(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
    return (torch.where(torch.where(x > gate, x > 0, gate > 0.5), x, gate * 0.5).unsqueeze(-1) * w).sum(-2)


def test_a_mask_that_reads_along_a_loop_further_in() -> None:
    """Its gradient sums over four classes with loops of their own; the mask reads along three, so that the outer loops
    know no truth of it. These jumped all the same, which the verifier refused: the step ran without generated code."""
    x = torch.randn(2, 4, 3, 4).to(memory_format=torch.channels_last)
    w = torch.randn(4, 17)
    gates = [torch.randn(4, requires_grad=True) for _ in range(2)]
    with torch.no_grad():
        gates[1].copy_(gates[0])
    compiled = torch.compile(chosen, backend="tilewright", options={"measure": False, "strict": True})
    for f, gate in zip((compiled, chosen), gates, strict=True):
        f(x, gate, w).square().sum().backward()
    torch.testing.assert_close(gates[0].grad, gates[1].grad)
    assert tilewright.stats().fallbacks == 0
