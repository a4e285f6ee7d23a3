"""What one pass leaves in scratch is right wherever a later one reads it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.support.normal_graph import Function
from torch import Tensor

import tilewright


def two_sides(x: Tensor, y: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """Both results have choices around one dear value, each on other elements; its reads lie in a part alone."""
    whole = torch.zeros_like(x).slice_scatter(part, 0, x.shape[0] - part.shape[0])
    dear = whole * 0.7 + torch.sign(torch.maximum(x, y) - x) / (x * x + 1) / (y * y + 2)
    first = torch.where(x > y, 0.0, dear)
    return first, torch.where(x < y, 0.0, dear) * first.sum()


def test_a_value_behind_different_conditions_is_whole() -> None:
    inputs = torch.randn(70), torch.randn(70), torch.randn(35)
    made = tilewright.compile(Function(two_sides), inputs)(*inputs)
    exact = two_sides(*(x.double() for x in inputs))
    for one, wanted in zip(made, exact, strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=1e-5, atol=1e-5)


def masked_side(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """One pass sums a dear value behind a mask of places, which splits its loop; another needs it everywhere."""
    dear = F.batch_norm(x, None, None, training=True)
    return x.norm(dim=3, keepdim=True) - dear, torch.einsum("...i,ji->...j", dear.triu(1), y)


def test_a_value_behind_a_mask_of_places_is_whole() -> None:
    inputs = torch.randn(1, 2, 2, 8), torch.randn(1, 8)
    made = tilewright.compile(Function(masked_side), inputs)(*inputs)
    exact = masked_side(*(x.double() for x in inputs))
    assert isinstance(made, tuple)
    for one, wanted in zip(made, exact, strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=1e-5, atol=1e-5)
