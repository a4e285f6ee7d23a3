"""What checks of the seven cores share on any device: free dims, how loud scores may be, a guarded softmax."""

from __future__ import annotations

import math

import torch
from benchmarks.attention.workloads import Corm, Tensors, causal_mask
from tests.support.fp64_rule import Dims, Function

HALVES = (torch.float16, torch.bfloat16)
LOUD = {torch.float32: 3000.0, torch.float16: 100.0, torch.bfloat16: 100.0}
"""Standard deviations of scores that reach about 1e4, and 300 in halves."""


def deciding(module: torch.nn.Module) -> Function | None:
    """The floats behind the bools of a core."""
    return module.deciding if isinstance(module, Corm) else None


def free(name: str) -> Dims:
    """Queries and keys of layout bshd as symbols."""
    found: Dims = {"q": {1: "queries"}, "k": {1: "keys"}, "v": {1: "keys"}}
    return found | ({"noise": {2: "queries", 3: "keys"}} if name == "keyformer" else {})


class Guarded(torch.nn.Module):
    """H2O with a softmax that gives zeros where a query sees nothing."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        z = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + causal_mask(q, k)).float()
        top = z.amax(-1, keepdim=True)
        e = torch.exp(z - torch.where(torch.isfinite(top), top, 0.0))
        total = e.sum(-1, keepdim=True)
        p = e / torch.where(total == 0, 1.0, total)
        return (p.to(v.dtype) @ v).transpose(1, 2), p.sum(2)
