"""Losses, norms and quantiles whose plain numbers change with the step of a loop, as `twins` has other ops. Their
gradients are those of the ops at the places too where two pieces meet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .twins import Number, Twin, computing, number, rounded

_Dims = int | Sequence[int] | None


def _huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: Number = 1.0, *, kind: torch.dtype
) -> Tensor:
    by, most = _apart(input, target, kind), number(delta, kind)
    far = by.abs()
    made = torch.where(far < most, by * by * 0.5, (far - most * 0.5) * most)
    return _reduced(made.to(kind), reduction)


def _smooth_l1_loss(
    input: Tensor, target: Tensor, size_average: None = None, reduce: None = None, reduction: str = "mean",
    beta: Number = 1.0, *, kind: torch.dtype,
) -> Tensor:  # fmt: skip
    _know((size_average, reduce))
    by, most = _apart(input, target, kind), rounded(beta, computing(kind), input)
    far, divisor = by.abs(), torch.where(most == 0, torch.ones_like(most), most)
    made = torch.where(far < most, by * by * 0.5 / divisor, far - most * 0.5)
    return _reduced(made.to(kind), reduction)


def _cross_entropy(
    input: Tensor, target: Tensor, weight: None = None, size_average: None = None, ignore_index: int = -100,
    reduce: None = None, reduction: str = "mean", label_smoothing: Number = 0.0, *, kind: torch.dtype,
) -> Tensor:  # fmt: skip
    _know((weight, size_average, reduce))
    _single(kind)
    dim = 0 if input.dim() == 1 else 1
    share, classes = rounded(label_smoothing, kind, input), input.shape[dim]
    if target.is_floating_point():
        return F.cross_entropy(input, target * (1 - share) + share / classes, reduction=reduction)
    chances = F.log_softmax(input, dim)
    right = F.nll_loss(chances, target, ignore_index=ignore_index, reduction=reduction)
    ignored = target == ignore_index
    all_of_them = torch.where(share == 0, torch.zeros_like(chances), chances)  # they may be infinite
    others = torch.where(ignored, torch.zeros_like(all_of_them.select(dim, 0)), -all_of_them.sum(dim))
    others = others.sum() / (~ignored).sum() if reduction == "mean" else _reduced(others, reduction)
    return right * (1 - share) + others * (share / classes)


def _quantile(
    input: Tensor, q: Number, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear",
    kind: torch.dtype,
) -> Tensor:  # fmt: skip
    if interpolation != "linear":
        raise ValueError("a quantile of another kind, of a share that changes")
    rows = input.flatten() if dim is None else input.movedim(dim, -1)
    values, last = rows.sort(-1).values, rows.shape[-1] - 1
    place = torch.where(rows.isnan().any(-1, keepdim=True), last, rounded(q, kind, input) * last)
    below = place.floor()
    low, high = (values.gather(-1, p.to(torch.int64)) for p in (below, place.ceil()))
    found = torch.lerp(low, high, place - below)
    if dim is None:
        return found.reshape([1] * input.dim() if keepdim else [])
    return found.movedim(-1, dim) if keepdim else found.squeeze(-1)


def _norm(
    input: Tensor, p: Number = 2, dim: _Dims = None, keepdim: bool = False, *, kind: torch.dtype
) -> Tensor:
    _single(kind)
    power = rounded(p, kind, input)
    dims = [dim] if isinstance(dim, int) else list(range(input.dim()) if dim is None else dim)
    none = input == 0
    powers = torch.where(none, torch.ones_like(input), input).abs() ** power
    total = torch.where(none, torch.zeros_like(powers), powers).sum(dims, keepdim)
    empty = total == 0
    made = torch.where(empty, torch.ones_like(total), total) ** (1 / power)
    return torch.where(empty, torch.zeros_like(made), made)


def _vector_norm(
    x: Tensor, ord: Number = 2, dim: _Dims = None, keepdim: bool = False, *, kind: torch.dtype
) -> Tensor:
    return _norm(x, ord, dim, keepdim, kind=kind)


def _batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: Number = 0.1, eps: float = 1e-5, *, kind: torch.dtype,
) -> Tensor:  # fmt: skip
    if training and running_mean is not None and running_var is not None:
        dims = [d for d in range(input.dim()) if d != 1]
        var, mean = torch.var_mean(input.detach().to(computing(kind)), dims)
        with torch.no_grad():
            for running, now in ((running_mean, mean), (running_var, var)):
                part = number(momentum, running.dtype)
                running.copy_(now * part + running * (1 - part))
        running_mean = running_var = None
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, 0.0, eps)


def _apart(input: Tensor, target: Tensor, kind: torch.dtype) -> Tensor:
    """How far, as ops compute that make `kind`: they round each element once."""
    return input.to(computing(kind)) - target.to(computing(kind))


def _single(kind: torch.dtype) -> None:
    if kind not in (torch.float32, torch.float64):
        raise ValueError(f"numbers that change of what is summed as {kind}")


def _know(others: Sequence[object]) -> None:
    if any(x is not None for x in others):
        raise ValueError("an operand that is not known beside a number that changes")


def _reduced(made: Tensor, reduction: str) -> Tensor:
    return {"mean": torch.mean, "sum": torch.sum, "none": torch.clone}[reduction](made)


_NORM = Twin(_norm, ("p",), above=0.0)
LOSSES: dict[object, Twin] = {
    F.huber_loss: Twin(_huber_loss, ("delta",)),
    F.smooth_l1_loss: Twin(_smooth_l1_loss, ("beta",), accepts=lambda beta: not beta < 0),
    F.cross_entropy: Twin(_cross_entropy, ("label_smoothing",)),
    torch.quantile: Twin(_quantile, ("q",)),
    "quantile": Twin(_quantile, ("q",)),
    torch.norm: _NORM,
    "norm": _NORM,
    torch.linalg.vector_norm: Twin(_vector_norm, ("ord",), above=0.0),
    F.batch_norm: Twin(_batch_norm, ("momentum",)),
}
"""By what a node calls."""
