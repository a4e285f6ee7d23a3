"""Attention over free lengths on a GPU runs in one pass over the keys, however the mask is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.triton.absent_gpu import compiled
from tests.support.triton.harness import print_triton
from torch import Tensor

from tilewright import accuracy
from tilewright.lower.variants import variants
from tilewright.target import preset

INF = float("inf")


def far(s: Tensor) -> Tensor:
    """How far each key lies behind its query."""
    queries, keys = s.shape[-2:]
    return torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)


HIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "masked_fill": lambda s: s.masked_fill(far(s) < 0, -INF),
    "where": lambda s: torch.where(far(s) >= 0, s, -INF),
    "add": lambda s: s + torch.where(far(s) >= 0, 0.0, -INF),
}


@pytest.mark.parametrize("name", HIDE)
def test_one_pass(name: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).float()
        return torch.softmax(HIDE[name](s), -1).to(v.dtype) @ v

    def draw(queries: int, keys: int) -> list[Tensor]:
        return [torch.randn(1, 32, n, 16, dtype=torch.float16) for n in (queries, keys, keys)]

    made = compiled(attention, draw(40, 56), [(2,)] * 3)
    (kernel,) = made.kernels
    text = print_triton(kernel.program, made.symbols, preset("sm_90"), variants(kernel.program)[0], "k0").text
    assert text.count("tl.range(") == 2 and text.count("tl.dot(") == 4, (
        "whole tiles, then those of the diagonal"
    )
    for sizes in ((3, 130), (1, 1)):
        given = draw(*sizes)
        (ours,), _ = made.run(given)
        verdict = accuracy.compare(ours, attention(*given), accuracy.in_float64(attention)(*given))
        assert verdict.passed, str(verdict)
