"""Scores within bounds: where a quick tangent stands for an accurate one, and where nothing but an accurate one may."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.support.triton.absent_gpu import compiled
from torch import Tensor

from tilewright.ir.expr import walk
from tilewright.ir.program import Dot, Loop, expressions

HALVES = [torch.randn(1, 2, 256, 64).half()] * 3


def capped(q: Tensor, k: Tensor, v: Tensor, cap: float = 50.0) -> Tensor:
    s = cap * torch.tanh((q @ k.transpose(-1, -2)).float() / (8 * cap))
    return torch.softmax(s, -1).to(v.dtype) @ v


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = 50 * torch.tanh((q @ k.transpose(-1, -2)).float() / 400)
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(s.masked_fill(hidden, -math.inf), -1).to(v.dtype) @ v


def scores(q: Tensor, k: Tensor) -> Tensor:
    return 50 * torch.tanh((q @ k.transpose(-1, -2)).float() / 400)


def also(what: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Attention beside something of its scores, which nobody may have changed."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s = scores(q, k)
        return torch.softmax(s, -1).to(v.dtype) @ v, what(s)

    return run


def weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of fp32, which no product rounds."""
    return torch.softmax(scores(q, k), -1)


def divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By sums that no product of weights is divided by."""
    s = scores(q, k)
    return (q @ k.transpose(-1, -2)).float().sum(-1) / torch.exp(s - s.amax(-1, True)).sum(-1)


def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By many times a maximum, whose error counts as often."""
    s = scores(q, k)
    p = torch.exp(s - 20.0 * s.amax(-1, True))
    return (p / p.sum(-1, True)).to(v.dtype) @ v


def far(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An error of 2^-21 is one of 2^-9 in the exponent."""
    return capped(q, k, v, 4096.0)


@pytest.mark.parametrize(
    ("function", "inputs", "quick"),
    [
        (capped, HALVES, True),
        (capped, [t.bfloat16() for t in HALVES], True),
        (masked, HALVES, True),
        (far, HALVES, False),
        (also(lambda s: s.sum(-1)), HALVES, False),
        (also(lambda s: s.amax(-1)), HALVES, False),
        (also(lambda s: s.logsumexp(-1)), HALVES, False),
        (also(lambda s: torch.exp(s - s.amax(-1, True)).sum(-1)), HALVES, False),
        (weights, HALVES, False),
        (divided, HALVES, False),
        (shifted, HALVES, False),
        (capped, [t.float() for t in HALVES], False),
        (lambda q, k, v: torch.tanh((q @ k.mT).float()), HALVES, False),
    ],
    ids=[
        "fp16",
        "bf16",
        "masked",
        "large",
        "sums of scores",
        "maxima",
        "logarithm",
        "sums of powers",
        "weights",
        "divided",
        "shifted",
        "fp32",
        "no exponent",
    ],
)
def test_where_tangents_are_quick(function: Callable[..., Tensor], inputs: list[Tensor], quick: bool) -> None:
    programs = [k.program for k in compiled(function, inputs).kernels]
    ops = {y.op for p in programs for s in p.statements() for e in expressions(s) for y in walk(e)}
    assert ("quick_tanh" in ops, "tanh" in ops) == (quick, not quick)


def test_bounded_scores_are_folded_in_one_pass() -> None:
    """A maximum is one of the bounded scores: of others, exponentials of these would have to wait for its end."""
    (kernel,) = compiled(capped, HALVES).kernels
    loops = [s for s in kernel.program.loops() if any(isinstance(x, Dot) for x in s.body)]
    (loop,) = loops
    assert isinstance(loop, Loop) and sum(isinstance(x, Dot) for x in loop.body) == 2
    tangents = {y for x in loop.body for e in expressions(x) for y in walk(e) if y.op == "quick_tanh"}
    assert len(tangents) == 1
