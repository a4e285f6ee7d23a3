"""Programs of halves: some widen them and must compute in singles from there on, some make a statistic of them that two
kernels read and must both read as it is stored."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def columns(x: Tensor) -> Tensor:
    v = x.float()
    return (v @ v.mT / 4).softmax(-2).mT @ v


def rows(x: Tensor) -> Tensor:
    v = x.float()
    return (v @ v.mT / 4).softmax(-1) @ v


def fused(x: Tensor) -> Tensor:
    v = x.float()
    return F.scaled_dot_product_attention(v, v, v)


def written_out(x: Tensor) -> Tensor:
    v = x.float()
    return ((v @ v.mT).sigmoid().unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


def column_weights(x: Tensor) -> Tensor:
    return (x @ x.mT / 4).softmax(-2) @ x


def columns_and_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    p = (x @ x.mT / 4).softmax(-1)
    return p @ x, p.sum(-2)


def half_rows(x: Tensor) -> Tensor:
    return (x @ x.mT / 4).softmax(-1) @ x


def normed_scores(x: Tensor) -> Tensor:
    scores = x @ x.mT / 4
    return (scores - scores.amax((-2, -1), keepdim=True)).exp().sum(-2)


def loss_of_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    scores = x @ x.mT / 4
    return scores.log_softmax(-2).mean(-1), scores.logsumexp(-1)


WIDENED: tuple[Callable[[Tensor], Tensor], ...] = (columns, rows, fused, written_out)
"""What they make of widened halves is no half."""
SHARED: tuple[Callable[[Tensor], Tensor | tuple[Tensor, ...]], ...] = (
    column_weights, columns_and_sums, half_rows, normed_scores, loss_of_columns,
)  # fmt: skip
"""They make statistics of half scores that several kernels read."""
HALVES = (torch.float16, torch.bfloat16)
