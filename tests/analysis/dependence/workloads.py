"""Attention with statistics, as users write it: scores, mask, softmax, weighted values, sums over queries.

Shapes are [batch, heads, sequence, depth]; `scores_mask` is what is added to the scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.analysis.dependence.properties import ConstantRegion, Properties
from tilewright.interp import FLOATS
from tilewright.interp.algebra import Array
from tilewright.interp.evaluate import Evaluator, Symbols
from tilewright.interp.graph import run_values
from tilewright.ir.graph import Graph, Value
from tilewright.ir.tensor import output_axes


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


def elements(region: ConstantRegion, v: Value, values: Mapping[Value, Array], symbols: Symbols) -> Array:
    """Where the condition of a region of `v` holds, by evaluating it everywhere."""
    shape = values[v].shape
    places = np.indices(shape, sparse=True)
    axes = dict(zip(output_axes(v.shape), places, strict=True))
    by_id = {w.id: x for w, x in values.items()}
    found = Evaluator(FLOATS, by_id, symbols, axes).value(region.condition)  # type: ignore[arg-type]
    return np.broadcast_to(found, shape)


def check(graph: Graph, known: Properties, given_inputs: Sequence[Tensor]) -> None:
    """Every region and every sign of every value, against what the interpreter computes."""
    values, symbols = run_values(graph, given_inputs)
    for v, regions in known.regions.items():
        for r in regions:
            here = values[v][elements(r, v, values, symbols)]
            assert np.array_equal(here, np.full(here.shape, r.constant.value), equal_nan=v.dtype.is_float), (
                v,
                r,
            )
    for v, sign in known.sign.items():
        if v in values:
            bad = [
                x for x in values[v].ravel().tolist() if not sign.contains(float(x)) and not _tiny(sign, x)
            ]
            assert not bad, (v, str(sign), bad[:3])


def _tiny(sign: object, x: float) -> bool:
    """Whether x may stand for a number that rounding moved: claims are about real numbers."""
    contains = sign.contains  # type: ignore[attr-defined]
    return math.isfinite(x) and any(contains(x * (1 + d) + d) for d in (-1e-6, 1e-6))
