"""Sizes that torch computes by factors that are no whole numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tilewright


def test_resampling_by_a_fraction_at_sizes_that_are_not_known() -> None:
    torch._dynamo.reset()
    tilewright.reset()
    compiled = torch.compile(
        lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"), backend="tilewright", dynamic=True
    )
    for height, width in ((5, 7), (9, 4)):
        x = torch.randn(2, 3, height, width)
        want = F.interpolate(x, scale_factor=1.7, mode="bilinear")
        torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-5)
    assert len(tilewright.compilations()) == 1
