"""Torch's differentiation of scans, mended."""

from __future__ import annotations

import copy

import torch
from torch import nn

import tilewright


def test_recurrent_layers_are_trained_with_a_free_batch() -> None:
    """A step of theirs would save the size of the batch for its gradient, which torch would stack."""
    torch.manual_seed(0)
    net = nn.GRU(3, 4, batch_first=True)
    plain = copy.deepcopy(net)
    fast = tilewright.compile(net, dims={"input": {0: "batch"}})
    for rows in (2, 3):
        x = torch.randn(rows, 70, 3)
        for module, call in ((net, fast), (plain, plain)):
            module.zero_grad()
            call(x)[0].square().sum().backward()  # pyright: ignore[reportIndexIssue]
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
