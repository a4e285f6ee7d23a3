"""What is made of a running fold's steps is read in the pass that makes them."""

from __future__ import annotations

import torch
from torch import Tensor

import tilewright


def test_a_sum_over_one_element_of_a_running_fold() -> None:
    """It stands between the running fold and a reader behind another fold of the same class."""

    def distances(x: Tensor) -> Tensor:
        running = torch.atleast_3d(x.logcumsumexp(-1)).sum(0)
        return (x.log_softmax(0).exp().sum(0) - running).abs().mean()

    x = torch.tensor([0.3, -1.2, 0.8])
    torch.testing.assert_close(tilewright.compile(distances, (x,))(x), distances(x))
