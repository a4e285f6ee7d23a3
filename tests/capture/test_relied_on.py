"""Calls get their operands as the program showed them, also where sizes are sums that torch writes in another way."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright


def folded(x: Tensor, w: Tensor) -> Tensor:
    """The gradient of the reshape views a copy whose rows are max(1, n) elements apart."""
    y = F.conv2d(x, w, None, stride=2, padding=1)
    return y.reshape(y.shape[-1], -1).sum(-2)


def test_rows_of_a_sum_of_sizes_are_views_of_their_copy() -> None:
    x, w = torch.randn(2, 4, 7, 6, requires_grad=True), torch.randn(10, 4, 2, 2, requires_grad=True)
    compiled = tilewright.compile(folded, (x, w), dims={"x": {0: "b", 2: "n"}})
    for shape in ((2, 4, 7, 6), (6, 4, 11, 6)):
        x = torch.randn(shape, requires_grad=True)
        wanted = torch.autograd.grad(folded(x, w).square().sum(), (x, w))
        have = torch.autograd.grad(compiled(x, w).square().sum(), (x, w))
        torch.testing.assert_close(have, wanted)
