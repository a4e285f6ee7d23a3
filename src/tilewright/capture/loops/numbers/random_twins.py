"""Ops that draw random numbers, with tensors without dims in the place of plain numbers, as `twins` has other ops.

What is drawn with a chance is `drawn` in front of the loop. Other draws are those of a step: torch draws the same of
any bounds or spread, and computes with these then."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .twins import Number, Twin, computing, number

_SELU = 1.7580993408473766
"""What dropped elements are, but for its sign, where `alpha_dropout` keeps mean and variance."""


def _dropout(
    input: Tensor, p: Number = 0.5, training: bool = True, inplace: bool = False, *, kind: torch.dtype,
    drawn: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert isinstance(p, Tensor)
    if drawn is None:
        return input  # it drops nothing
    scale = torch.where(p == 1, torch.zeros_like(p), 1 / (1 - p)).to(computing(kind))
    return (input.to(computing(kind)) * drawn * scale).to(kind)


def _dropout_of(
    input: Tensor, p: Number, train: bool, *, kind: torch.dtype, drawn: Tensor | None = None
) -> Tensor:
    return _dropout(input, p, train, kind=kind, drawn=drawn)


def _alpha_dropout(
    input: Tensor, p: Number = 0.5, training: bool = False, inplace: bool = False, *, kind: torch.dtype,
    drawn: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert isinstance(p, Tensor)
    if drawn is None:
        return input  # it drops nothing
    kept = drawn.to(_single(kind))
    a = 1 / ((_SELU * _SELU * p + 1) * (1 - p)).sqrt()
    return input * (kept * a.to(kind)) + ((kept - 1) * (_SELU * a).to(kind) + (_SELU * a * p).to(kind))


def _bernoulli(input: Tensor, p: Number, *, kind: torch.dtype, drawn: Tensor | None = None) -> Tensor:
    assert drawn is not None
    return drawn.to(kind)


def _uniform(input: Tensor, low: Number = 0.0, high: Number = 1.0, *, kind: torch.dtype) -> Tensor:
    a, b = (number(x, _single(kind)) for x in (low, high))
    return torch.rand_like(input) * (b - a) + a


def _spread(input: Tensor, mean: Number = 0.0, std: Number = 1.0, *, kind: torch.dtype) -> Tensor:
    return torch.randn_like(input) * number(std, _single(kind)) + number(mean, kind)


def _normal(mean: Number, std: Number, size: Sequence[int], *, kind: torch.dtype) -> Tensor:
    given = next(x for x in (mean, std) if isinstance(x, Tensor))
    return _spread(torch.empty(size, dtype=kind, device=given.device), mean, std, kind=kind)


def _gumbel_softmax(
    logits: Tensor,
    tau: Number = 1,
    hard: bool = False,
    eps: float = 1e-10,
    dim: int = -1,
    *,
    kind: torch.dtype,
) -> Tensor:
    return F.gumbel_softmax(logits, number(tau, _single(kind)), hard, eps, dim)  # pyright: ignore[reportArgumentType]


def _single(kind: torch.dtype) -> torch.dtype:
    """The type of what is drawn, if that is rounded once."""
    if kind not in (torch.float32, torch.float64):
        raise ValueError(f"bounds that change of what is drawn as {kind}")
    return kind


def uniform_like(input: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """What `uniform_` writes over its operand."""
    return torch.empty_like(input).uniform_(low, high)


def normal_like(input: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """What `normal_` writes over its operand."""
    return torch.empty_like(input).normal_(mean, std)


WITH_CHANCE: dict[object, Twin] = {
    F.dropout: Twin(_dropout, ("p",)),
    torch.dropout: Twin(_dropout_of, ("p",)),
    F.alpha_dropout: Twin(_alpha_dropout, ("p",)),
    torch.bernoulli: Twin(_bernoulli, ("p",)),
}
"""What is drawn in front of the loop, by what a node calls."""
WITHIN: dict[object, Twin] = {
    uniform_like: Twin(_uniform, ("low", "high")),
    normal_like: Twin(_spread, ("mean", "std")),
    torch.normal: Twin(_normal, ("mean", "std")),
    F.gumbel_softmax: Twin(_gumbel_softmax, ("tau",)),
}
"""What each step draws, by what a node calls."""
DRAWN_OVER: dict[object, object] = {
    "bernoulli_": torch.bernoulli, "uniform_": uniform_like, "normal_": normal_like,
}  # fmt: skip
"""What draws over its first operand, and what only draws. (`bernoulli_` without a chance is another one.)"""
