"""Layers as in Llama 2 around an attention core, with random weights, and prefill in chunks with eviction.

A stack runs its layers one after another through `step`, which contestants compile: the layers differ in
their weights only, so what is compiled for the first serves all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.attention.workloads import WORKLOADS, Attention, Tensors

EPSILON = 1e-5
BASE = 10000.0
SPREAD = 0.02
"""Standard deviation of the weights."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a stack; those of Llama-2-7b unless told otherwise."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 32
    intermediate: int = 11008

    @property
    def depth(self) -> int:
        """Of a head."""
        return self.hidden // self.heads


class Norm(nn.Module):
    """RMS norm with a weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Over the last dim, in fp32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        return self.weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, S, H, D]; `cos` and `sin` are [S, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


class Layer(nn.Module):
    """A layer; the keys and values of earlier places may come from a cache, already rotated."""

    def __init__(self, core: Attention, shape: Shape) -> None:
        super().__init__()
        self.core = core
        self.shape = shape
        width, narrow = shape.hidden, shape.kv_heads * shape.depth
        self.before, self.after = Norm(width), Norm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, narrow, bias=False)
        self.v = nn.Linear(width, narrow, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, shape.intermediate, bias=False)
        self.up = nn.Linear(width, shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensors, noise: Tensor | None) -> Tensors:
        """The layer's result, all its keys and values [B, S_kv, H_kv, D], and the core's statistics."""
        batch, places, _ = x.shape
        y = self.before(x)
        q = rotate(self.q(y).view(batch, places, self.shape.heads, self.shape.depth), cos, sin)
        k = rotate(self.k(y).view(batch, places, self.shape.kv_heads, self.shape.depth), cos, sin)
        v = self.v(y).view(batch, places, self.shape.kv_heads, self.shape.depth)
        if cache:
            k, v = torch.cat((cache[0], k), dim=1), torch.cat((cache[1], v), dim=1)
        made = self.core(q, k, v, noise)
        out, *kept = (made,) if isinstance(made, Tensor) else made
        x = x + self.o(out.flatten(2))
        y = self.after(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return x, k, v, *kept


Step = Callable[[Layer, Tensor, Tensor, Tensor, Tensors, Tensor | None], Tensors]


def step(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensors, noise: Tensor | None) -> Tensors:
    """One layer: what is compiled."""
    return layer(x, cos, sin, cache, noise)


def stack(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Layer]:
    """The layers around the core `name`."""
    layers: list[Layer] = []
    for _ in range(shape.layers):
        with torch.device(device):
            layer = Layer(WORKLOADS[name](), shape).to(dtype)
        for weight in layer.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=SPREAD)
        layers.append(layer.eval().requires_grad_(False))
    return layers


def angles(positions: Tensor, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, D] of the rotary embedding."""
    rates = BASE ** (-torch.arange(0, depth, 2, device=positions.device).float() / depth)
    angle = positions[:, None].float() * rates
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def forward(run: Step, layers: Sequence[Layer], x: Tensor, noise: Tensor | None = None) -> Tensors:
    """All layers over `x` [B, S, hidden]: the result and each layer's statistics."""
    cos, sin = angles(torch.arange(x.shape[1], device=x.device), layers[0].shape.depth, x.dtype)
    kept: list[Tensor] = []
    for layer in layers:
        x, _, _, *more = run(layer, x, cos, sin, (), noise)
        kept += more
    return x, *kept


def prefill(
    run: Step, layers: Sequence[Layer], x: Tensor, chunk: int, budget: int, chosen: Sequence[Tensor] = ()
) -> tuple[Tensor, list[Tensor]]:
    """All layers over `x` in chunks of places; after each, a layer keeps the `budget` keys of each head that have
    received most attention so far, or those `chosen`. The result, and what was chosen, in order.

    The core must give one statistic, and as many heads of keys as of queries."""
    caches: list[Tensors] = [() for _ in layers]
    scores: list[Tensor | None] = [None for _ in layers]
    made: list[Tensor] = []
    kept: list[Tensor] = []
    for start in range(0, x.shape[1], chunk):
        y = x[:, start : start + chunk].clone()  # dense, as later layers' are: one graph serves all
        places = torch.arange(start, start + y.shape[1], device=x.device)
        cos, sin = angles(places, layers[0].shape.depth, x.dtype)
        for i, layer in enumerate(layers):
            y, k, v, score = run(layer, y, cos, sin, caches[i], None)
            before = scores[i]
            if before is not None:
                score[..., : before.shape[-1]] += before
            best = chosen[len(kept)] if chosen else best_keys(score, budget)
            caches[i], scores[i] = (gathered(k, best), gathered(v, best)), score.gather(2, best)
            kept.append(best)
        made.append(y)
    return torch.cat(made, dim=1), kept


def best_keys(score: Tensor, budget: int) -> Tensor:
    """[B, H, kept]: places of the best scores [B, H, S], in order."""
    return score.topk(min(budget, score.shape[-1]), dim=-1).indices.sort(dim=-1).values


def gathered(x: Tensor, places: Tensor) -> Tensor:
    """The keys or values of [B, S, H, D] at `places` [B, H, kept] of each head."""
    return x.gather(1, places.transpose(1, 2)[..., None].expand(-1, -1, -1, x.shape[-1]))
