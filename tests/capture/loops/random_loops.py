"""Loops whose steps draw random numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def dropped(h: Tensor, w: Tensor, steps: int) -> Tensor:
    """A recurrence with dropout."""
    for _ in range(steps):
        h = functional.dropout(torch.tanh(h @ w), 0.3)
    return h


def disturbed(h: Tensor, w: Tensor, steps: int) -> Tensor:
    """Three kinds of numbers in each step, all states."""
    made: list[Tensor] = []
    for _ in range(steps):
        h = torch.tanh(h @ w) + 0.1 * torch.randn_like(h)
        h = h * torch.bernoulli(h.sigmoid().detach()) + torch.rand(3, 8, device=h.device)
        made.append(h)
    return torch.stack(made)


def attended(h: Tensor, w: Tensor, steps: int) -> Tensor:
    """Attention with dropout in each step: its gradient draws the same numbers again."""
    for _ in range(steps):
        q = (h @ w).view(1, 1, 3, 8)
        made = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
        h = torch.tanh(h + made.view(3, 8))
    return h
