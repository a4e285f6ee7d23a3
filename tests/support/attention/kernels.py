"""Attention as one kernel by rows and one by columns, with masks as programs write them, for tests of blocks.

The row kernel divides after the product; the column kernel reads what the row kernel keeps: the log of its sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from tests.support.corpus import Case
from torch import Tensor

Mask = Callable[[Tensor, Tensor, int, int], Tensor]
"""(query places [S, 1], key places [1, T], S, T) -> where a query sees a key."""

MASKS: dict[str, Mask | None] = {
    "all": None,
    "causal": lambda i, j, s, t: j <= i,
    "aligned": lambda i, j, s, t: j <= i + (t - s),
    "window": lambda i, j, s, t: (j <= i) & (j > i - 70),
    "prefix": lambda i, j, s, t: (j <= i) | (j < 50),
    "sinks": lambda i, j, s, t: (j <= i) & ((j > i - 70) | (j < 4)),
}


@dataclass(frozen=True)
class Apart:
    """Masks that a program puts on scores one after the other: (scores, query places, key places) -> scores."""

    put: Callable[[Tensor, Tensor, Tensor], Tensor]


INF = float("inf")
APART: dict[str, Apart] = {
    "wheres": Apart(lambda z, i, j: torch.where(j > i - 70, torch.where(j <= i, z, -INF), -INF)),
    "fills": Apart(lambda z, i, j: z.masked_fill(j > i, -INF).masked_fill(j <= i - 70, -INF)),
    "fill and where": Apart(lambda z, i, j: torch.where(j > i - 70, z.masked_fill(j > i, -INF), -INF)),
    "where and bias": Apart(
        lambda z, i, j: torch.where(j <= i, z, -INF) + torch.where(j > i - 70, 0.0, -INF)
    ),
    "bias and fill": Apart(
        lambda z, i, j: (z + torch.where(j <= i, 0.0, -INF)).masked_fill(~(j > i - 70), -INF)
    ),
}
"""A causal mask and a window."""
LATE = Apart(lambda z, i, j: torch.where(j >= 40, torch.where(j <= i, z, -INF), -INF))
"""Every query sees a key by either mask, and the first ones see none by both."""


def scores(q: Tensor, k: Tensor, mask: Mask | Apart | None) -> Tensor:
    """Masked and scaled products, in fp32."""
    s, t = q.shape[-2], k.shape[-2]
    z = ((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5).float()
    if mask is None:
        return z
    i, j = torch.arange(s, device=q.device), torch.arange(t, device=q.device)
    if isinstance(mask, Apart):
        return mask.put(z, i[:, None], j[None, :])
    return torch.where(mask(i[:, None], j[None, :], s, t), z, float("-inf"))


def rows(mask: Mask | Apart | None) -> Callable[..., Tensor]:
    """softmax(q k^T) v, divided last."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = scores(q, k, mask)
        e = torch.exp(z - z.amax(-1, keepdim=True))
        return ((e.to(q.dtype) @ v).float() / e.sum(-1, keepdim=True)).to(q.dtype)

    return run


def columns(mask: Mask | Apart | None, squares: bool = False) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Sums over the queries of exp(score - lse), and of its square."""

    def run(q: Tensor, k: Tensor, lse: Tensor) -> Tensor | tuple[Tensor, ...]:
        p = torch.exp(scores(q, k, mask) - lse[..., None])
        return (p.sum(-2), (p * p).sum(-2)) if squares else p.sum(-2)

    return run


@dataclass(frozen=True)
class Attention(Case):
    """A case of one floating type; the third input of a column kernel is what a row kernel keeps."""

    dtype: torch.dtype = field(default=torch.float16)
    mask: Mask | Apart | None = None

    def inputs(self, scale: int = 1, seed: int = 0) -> list[Tensor]:
        q, k, v = (x.to(self.dtype) for x in super().inputs(scale, seed))
        return [q, k, v if v.dim() == 4 else torch.logsumexp(scores(q, k, self.mask), -1)]


def attention(
    kind: str, mask: str | Apart, s: int, t: int, d: int, *, heads: Sequence[int] = (1, 2), dv: int = 0,
    dtype: torch.dtype = torch.float16, dynamic: bool = False,
) -> Attention:  # fmt: skip
    """A row (`rows`), column (`columns`) or two-column (`squares`) kernel of `s` queries and `t` keys."""
    q, k, last = (*heads, s, d), (*heads, t, d), (*heads, t, dv or d) if kind == "rows" else (*heads, s)
    own = {2: "s"}
    other = own if s == t and mask != "aligned" else {2: "t"}
    shared = (own, other, other if kind == "rows" else own) if dynamic else ()
    put = MASKS[mask] if isinstance(mask, str) else mask
    run = rows(put) if kind == "rows" else columns(put, kind == "squares")
    return Attention(f"{kind}_{mask}", run, (q, k, last), shared, (), dtype, put)
