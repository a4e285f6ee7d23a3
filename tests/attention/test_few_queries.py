"""Kernels for few queries: each key and value is read once, and what one query sums is summed closely."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from benchmarks.attention.workloads import causal_mask
from tests.attention.device import Device, compiled
from tests.attention.test_decode import parts, repeated, right, statements
from torch import Tensor

from tilewright.ir.program import Load


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mask of the last query, which hides nothing where it is the only one."""
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + causal_mask(q, k)
    return torch.softmax(s.float(), -1).to(v.dtype) @ v


def inputs(heads: int, kv: int, queries: int, keys: int, dtype: torch.dtype, depth: int = 16) -> list[Tensor]:
    shapes = ((heads, queries), (kv, keys), (kv, keys))
    return [torch.randn(1, h, n, depth).to(dtype) for h, n in shapes]


def loads(made: Device, kernel: int = 0) -> list[Load]:
    """Loads of operands of more than a row, in loops and outside."""
    return [
        s
        for s in statements(made.kernels[kernel].program.body)
        if isinstance(s, Load) and len(s.var.axes) > 1
    ]


@pytest.mark.parametrize("keys", [1024, 1000])
def test_a_mask_that_hides_nothing_costs_no_pass(keys: int, tmp_path: Path) -> None:
    given = inputs(8, 2, 1, keys, torch.float16)
    made = compiled(masked, given, launch=0.0)
    assert parts(made) > 1 and len(made.kernels) == 2
    read = [s.buffer.name for s in loads(made)]
    steps = 1 if keys == 1024 else 2  # of whole tiles, and of the last one
    assert all(read.count(p) <= steps for p in read)
    assert not any("runs after" in str(n) for k in made.kernels for n in k.notes)
    right(made, masked, given, tmp_path)
