"""Sums inside kernels with products: no long chains of additions, which round more than eager's blocked sums."""

from __future__ import annotations

import pytest
import torch
from tests.attention.run import Tensors, built, wrong
from torch import Tensor


def normalised(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Large scores that their sums divide."""
    p = torch.where(hidden, -1e9, q @ k.transpose(-1, -2) * 0.125).abs()
    return (p / (p.sum(-1, keepdim=True) + 1e-6)) @ v


def sums(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The same sums, of rows and of columns, for themselves."""
    p = torch.where(hidden, -1e9, q @ k.transpose(-1, -2) * 0.125).abs()
    return p.sum(-1), p.sum(-2)


def inputs(keys: int) -> Tensors:
    shapes = ((1, 4, 64, 64), (1, 4, keys, 64), (1, 4, keys, 64))
    q, k, v = (torch.randn(s) * scale for s, scale in zip(shapes, (30, 30, 1), strict=True))
    return q, k, v, torch.rand(1, 1, 64, keys) < 0.4


@pytest.mark.parametrize("keys", [40, 100, 257])
@pytest.mark.parametrize("program", [normalised, sums])
def test_sums_are_as_exact_as_eagers(program: object, keys: int) -> None:
    assert callable(program)
    compiled = built(program, inputs(keys), "inside")
    assert not wrong(program, compiled, [inputs(keys) for _ in range(4)])
