"""Autocast around a call does not reach the library calls of a program that switched it off."""

from __future__ import annotations

import torch
from torch import Tensor

import tilewright


def test_calls_under_autocast_keep_their_types() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return (x @ w) + 1

    compiled = tilewright.compile(f)
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(compiled(x, w), f(x, w))
    torch.testing.assert_close(compiled(x, w), f(x, w))
