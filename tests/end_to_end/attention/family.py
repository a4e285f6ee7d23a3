"""Random programs of the attention family: scores, masks, normalisers, statistics of rows and of columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

Tensors = tuple[Tensor, ...]
INF = float("inf")


@dataclass(frozen=True)
class Extra:
    """What programs read besides q, k and v: ids of documents, a slope and a sink logit per head, a gate per query, a
    bias per distance."""

    query_ids: Tensor
    key_ids: Tensor
    slopes: Tensor
    sinks: Tensor
    gates: Tensor
    distances: Tensor


FAR = 5
"""Distances beyond share a bias."""

Score = Callable[[Tensor, Tensor, Extra], Tensor]
"""From scores [B, H, S_q, S_kv] and how far each key lies behind its query [S_q, S_kv]."""

SCORES: Mapping[str, Score] = {
    "scale": lambda s, far, x: s * 0.35,
    "cap": lambda s, far, x: 2.0 * torch.tanh(s / 2.0),
    "slope": lambda s, far, x: s - x.slopes[:, None, None] * far,
    "distance": lambda s, far, x: s + x.distances[(far + FAR).clamp(0, 2 * FAR)],
    "gate": lambda s, far, x: s * torch.sigmoid(x.gates),
    "product": lambda s, far, x: s * (s - 0.5),
}

MASKS: Mapping[str, Callable[[Tensor, Tensor, Extra], Tensor]] = {
    "none": lambda far, j, x: torch.ones_like(far, dtype=torch.bool),
    "causal": lambda far, j, x: far >= 0,
    "window": lambda far, j, x: (far >= 0) & (far < 6),
    "sink": lambda far, j, x: (far >= 0) & ((far < 4) | (j < 2)),
    "prefix": lambda far, j, x: (far >= 0) | (j < 5),
    "documents": lambda far, j, x: (x.query_ids[:, None] == x.key_ids) & (far >= 0),
}
"""Which keys are seen."""

HIDE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda s, seen: s + torch.zeros_like(seen, dtype=s.dtype).masked_fill(~seen, -INF),
    "where": lambda s, seen: torch.where(seen, s, -INF),
    "masked_fill": lambda s, seen: s.masked_fill(~seen, -INF),
    "lowest": lambda s, seen: s.masked_fill(~seen, -1e9),
}


def _with_sink(s: Tensor, x: Extra) -> Tensor:
    sinks = x.sinks[:, None, None].expand(*s.shape[:-1], 1)
    return torch.softmax(torch.cat((s, sinks), -1), -1)[..., :-1]


NORMALISERS: Mapping[str, Callable[[Tensor, Extra], Tensor]] = {
    "softmax": lambda s, x: torch.softmax(s, -1),
    "logsumexp": lambda s, x: torch.exp(s - torch.logsumexp(s, -1, keepdim=True)),
    "sigmoid": lambda s, x: torch.sigmoid(s),
    "relu": lambda s, x: torch.relu(s) / (torch.relu(s).sum(-1, keepdim=True) + 1e-3),
    "sink": _with_sink,
    "squared relu": lambda s, x: torch.relu(s).square(),
}

ROWS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "max": lambda s, p: s.amax(-1),
    "logsumexp": lambda s, p: torch.logsumexp(s, -1),
    "entropy": lambda s, p: -(p * torch.log(p + 1e-6)).sum(-1),
    "squares": lambda s, p: p.square().sum(-1),
}
COLUMNS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda p: p.sum(2),
    "squares": lambda p: p.square().sum(2),
    "max": lambda p: p.amax(2),
    "any": lambda p: (p >= 0.3).any(2),
    "margin": lambda p: p.amax(2) - 0.3,  # whose sign `any` is
}


@dataclass(frozen=True)
class Program:
    """One program; its name is its printed form."""

    scores: tuple[str, ...]
    mask: str
    hide: str
    normaliser: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *extra: Tensor) -> Tensors:
        """q [B, H, S_q, D], k and v [B, H, S_kv, D]: the result, statistics of rows, statistics of columns."""
        x = Extra(*extra)
        i = torch.arange(q.shape[2], device=q.device)[:, None] + (k.shape[2] - q.shape[2])
        j = torch.arange(k.shape[2], device=q.device)
        s = q @ k.transpose(-1, -2)
        for name in self.scores:
            s = SCORES[name](s, i - j, x)
        if self.mask != "none":
            s = HIDE[self.hide](s, MASKS[self.mask](i - j, j, x))
        p = NORMALISERS[self.normaliser](s, x)
        rows = [ROWS[name](s, p) for name in self.rows]
        return p @ v, *rows, *(COLUMNS[name](p) for name in self.columns)

    def deciding(self, *inputs: Tensor) -> Tensor:
        """The floats behind `any`."""
        return replace(self, rows=(), columns=("margin",))(*inputs)[1]


def inputs(batch: int, heads: int, queries: int, keys: int, depth: int) -> Tensors:
    """Random inputs of any program, documents in order of place."""
    q, k, v = (torch.randn(batch, heads, n, depth) * depth**-0.25 for n in (queries, keys, keys))
    ids = torch.sort(torch.randint(0, 3, (keys,))).values
    own = ids[keys - queries :] if keys >= queries else torch.cat((ids[:1].expand(queries - keys), ids))
    extra = (torch.rand(heads), torch.randn(heads), torch.randn(batch, heads, queries, 1))
    return q, k, v, own.clone(), ids, *extra, torch.randn(2 * FAR + 1)


NAMES = ("q", "k", "v", "query_ids", "key_ids", "slopes", "sinks", "gates", "distances")


def some(table: Mapping[str, object], most: int, but: str = "") -> st.SearchStrategy[tuple[str, ...]]:
    """Up to `most` different names of a table."""
    return st.lists(st.sampled_from([n for n in table if n != but]), max_size=most, unique=True).map(tuple)


def programs() -> st.SearchStrategy[Program]:
    """Any program."""
    return st.builds(
        Program,
        some(SCORES, 3),
        st.sampled_from(list(MASKS)),
        st.sampled_from(list(HIDE)),
        st.sampled_from(list(NORMALISERS)),
        some(ROWS, 2),
        some(COLUMNS, 2, "margin"),
    )
