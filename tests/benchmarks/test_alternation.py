"""The benchmark of steps in turn computes the same as its steps."""

from __future__ import annotations

import torch

from benchmarks import alternation


def test_the_graph_is_its_steps() -> None:
    x, w = torch.randn(3, 4), torch.eye(4)
    wanted = x
    for _ in range(alternation.STEPS):
        wanted = alternation.norm(alternation.product(wanted, w))
    torch.testing.assert_close(alternation.alternating(x, w), wanted)
