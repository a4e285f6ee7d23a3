"""Heads that are mixed before and after a softmax: no scores in memory, whatever the mixture looks like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.end_to_end.attention.split_keys import right
from tests.support.triton.absent_gpu import compiled
from torch import Tensor

from tilewright.ir.sizes import dims

Function = Callable[..., Tensor]
HEADS, PLACES, DEPTH = 3, 40, 16


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5


def mixed(s: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("gh,bhij->bgij", w, s)


def before(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(mixed(scores(q, k), w).float(), -1).to(v.dtype) @ v


def behind(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return mixed(torch.softmax(scores(q, k).float(), -1).to(v.dtype), w) @ v


def both(q: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    s = mixed(scores(q, k), w)
    i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
    p = torch.softmax(torch.where(j <= i, s.float(), float("-inf")), -1)
    return mixed(p.to(v.dtype), u) @ v


def linear(q: Tensor, k: Tensor, v: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """As models have it: heads last, with a bias."""
    s = F.linear(scores(q, k).permute(0, 2, 3, 1), w, bias).permute(0, 3, 1, 2)
    return torch.softmax(s.float(), -1).to(v.dtype) @ v


def convolution(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(torch.softmax(scores(q, k).float(), -1).to(v.dtype), w[..., None, None]) @ v


def halves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(*shape).mul_(0.7).half() for shape in shapes]


def operands(values: int = HEADS) -> list[Tensor]:
    own = (2, HEADS, PLACES, DEPTH)
    return halves(own, own, (2, values, PLACES, DEPTH))


CASES: dict[str, tuple[Function, list[Tensor]]] = {
    "before": (before, [*operands(), *halves((HEADS, HEADS))]),
    "behind": (behind, [*operands(), *halves((HEADS, HEADS))]),
    "both": (both, [*operands(), *halves((HEADS, HEADS), (HEADS, HEADS))]),
    "to more heads": (before, [*operands(4), *halves((4, HEADS))]),
    "linear": (linear, [*operands(), *halves((HEADS, HEADS), (HEADS,))]),
    "convolution": (convolution, [*operands(), *halves((HEADS, HEADS))]),
}


@pytest.mark.parametrize("name", CASES)
def test_no_scores_are_stored(name: str, tmp_path: Path) -> None:
    function, given = CASES[name]
    made = compiled(function, given)
    stored = max(dims.static(v.numel) or 0 for k in made.kernels for v in k.kernel.outputs)
    assert stored < 2 * HEADS * PLACES * PLACES
    right(made, function, given, tmp_path)


def test_many_heads_are_not_written_out() -> None:
    own = (1, 24, 32, 16)
    made = compiled(before, halves(own, own, own, (24, 24)))
    assert all("write_out_mixtures" not in str(k.schedule) for k in made.kernels)
