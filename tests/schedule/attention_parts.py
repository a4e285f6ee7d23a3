"""Attention as its parts, for kernels of a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Mask = Callable[[Tensor, Tensor], Tensor]


def score(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * 0.25


def masked(s: Tensor, mask: Mask) -> Tensor:
    rows, columns = torch.arange(s.shape[-2]), torch.arange(s.shape[-1])
    return torch.where(mask(rows[:, None], columns[None, :]), s, float("-inf"))


def causal(i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def attended(s: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e @ v) / e.sum(-1, keepdim=True)


def columns(q: Tensor, k: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    p = torch.exp(masked(score(q, k), causal) - lse[..., None])
    return p.sum(-2), (p * p).sum(-2), p.amax(-2), (p > 0.5).any(-2)


def qkv(b: int, s: int, t: int, d: int, wide: int) -> tuple[tuple[int, ...], ...]:
    return (b, s, d), (b, t, d), (b, t, wide)


PLAIN = lambda q, k, v: attended(score(q, k), v)  # noqa: E731
CAUSAL = lambda q, k, v: attended(masked(score(q, k), causal), v)  # noqa: E731
