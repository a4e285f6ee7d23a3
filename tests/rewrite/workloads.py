"""Attention with statistics, as users write it: scores, mask, softmax, weighted values, sums over queries.

Shapes are [batch, heads, sequence, depth]; `scores_mask` is what is added to the scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_bias(queries: int, keys: int) -> Tensor:
    return torch.triu(torch.full((queries, keys), -math.inf), diagonal=keys - queries + 1)


def weights(q: Tensor, k: Tensor) -> Tensor:
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return torch.softmax(s + causal_bias(q.shape[-2], k.shape[-2]), -1)


def vanilla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights(q, k) @ v


def gemma2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    s = 50 * torch.tanh(s / 50) + causal_bias(q.shape[-2], k.shape[-2])
    return torch.softmax(s, -1) @ v


def h2o(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = weights(q, k)
    return p @ v, p.sum(2)


def roco(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p = weights(q, k)
    return p @ v, p.sum(2), (p**2).sum(2)


def snapkv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = weights(q, k)
    return p @ v, F.avg_pool1d(p.sum(2), 5, 1, 2)


def corm(q: Tensor, k: Tensor, v: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    p = weights(q, k)
    return p @ v, (p >= threshold).any(2)


def keyformer(q: Tensor, k: Tensor, v: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + causal_bias(q.shape[-2], k.shape[-2])
    return torch.softmax(s, -1) @ v, torch.softmax((s - torch.log(noise)) / 1.5, -1).sum(2)


WORKLOADS = {
    "vanilla": vanilla, "gemma2": gemma2, "h2o": h2o, "roco": roco, "snapkv": snapkv, "corm": corm,
    "keyformer": keyformer,
}  # fmt: skip


def inputs(name: str, heads: int, queries: int, keys: int, depth: int) -> list[Tensor]:
    """Random tensors for a workload; where they would be large there is nothing in them."""
    torch.manual_seed(0)
    shapes = [(1, heads, queries, depth), (1, heads, keys, depth), (1, heads, keys, depth)]
    shapes += {"corm": [(queries, keys)], "keyformer": [(1, heads, queries, keys)]}.get(name, [])
    if heads * queries * keys > 1 << 20:
        return [torch.empty(s) for s in shapes]
    return [torch.randn(s) if k < 3 else torch.rand(s) + 0.01 for k, s in enumerate(shapes)]
