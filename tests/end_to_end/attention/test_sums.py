"""Sums inside kernels with products: no long chains of additions, which round more than eager's blocked sums."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from benchmarks.attention.workloads import WORKLOADS, Sizes
from tests.support.fp64_rule import Tensors, built, wrong
from tests.support.triton.absent_gpu import compiled
from tests.support.triton.harness import print_triton
from torch import Tensor

from tilewright.ir.program import Dot, Loop, Stmt, Update
from tilewright.ir.sizes import dims
from tilewright.lower.variants import variants
from tilewright.target import preset


def normalised(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Large scores that their sums divide."""
    p = torch.where(hidden, -1e9, q @ k.transpose(-1, -2) * 0.125).abs()
    return (p / (p.sum(-1, keepdim=True) + 1e-6)) @ v


def sums(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The same sums, of rows and of columns, for themselves."""
    p = torch.where(hidden, -1e9, q @ k.transpose(-1, -2) * 0.125).abs()
    return p.sum(-1), p.sum(-2)


def inputs(keys: int) -> Tensors:
    shapes = ((1, 4, 64, 64), (1, 4, keys, 64), (1, 4, keys, 64))
    q, k, v = (torch.randn(s) * scale for s, scale in zip(shapes, (30, 30, 1), strict=True))
    return q, k, v, torch.rand(1, 1, 64, keys) < 0.4


@pytest.mark.parametrize("keys", [40, 100, 257])
@pytest.mark.parametrize("program", [normalised, sums])
def test_sums_are_as_exact_as_eagers(program: object, keys: int) -> None:
    assert callable(program)
    function = built(program, inputs(keys), "inside")
    assert not wrong(program, function, [inputs(keys) for _ in range(4)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_of_singles_are_summed_by_blocks(dtype: torch.dtype) -> None:
    """One long chain of additions would round as no library's does; halves keep their matrix units' accumulators."""
    given = list(Sizes(512, 2, 32).inputs("vanilla", layout="bhsd", dtype=dtype))
    (kernel,) = compiled(WORKLOADS["vanilla"]("bhsd").eval(), given).kernels
    steps = pairwise(kernel.program.statements())
    apart = [b for a, b in steps if isinstance(a, Dot) and isinstance(b, Update) and a.acc not in b.vars]
    text = print_triton(kernel.program, (), preset("sm_90"), variants(kernel.program)[0], "k0").text
    single = dtype is torch.float32
    assert kernel.schedule.reductions.blockwise == bool(apart) == ("bf16x6" in text) == single


def depth(body: Sequence[Stmt]) -> int:
    """How many loops of several steps are nested."""
    inner = [
        (depth(s.body), dims.static(dims.sub(s.stop, s.start)) != s.tile) for s in body if isinstance(s, Loop)
    ]
    return max((below + several for below, several in inner), default=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_over_many_rows_have_two_levels_beside_products_of_singles(dtype: torch.dtype) -> None:
    given = list(Sizes(4097, 1, 32, keys=4097).inputs("h2o", layout="bhsd", dtype=dtype))
    columns = compiled(WORKLOADS["h2o"]("bhsd").eval(), given).kernels[1].program
    assert depth(columns.body) == (2 if dtype is torch.float32 else 1)
