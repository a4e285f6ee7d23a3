"""Rules that open an op into simpler ones: torch's own, and ours where torch has none."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._ops import OpOverload

from tilewright.capture.aten.decompose import logit_backward

aten = torch.ops.aten


def rule_of(op: object) -> Callable[..., object] | None:
    """What opens an op; None if nothing does."""
    if not isinstance(op, OpOverload) or "upsample" in op.name():
        return None  # torch's rules for resampling are wrong where a size stays
    return OURS.get(op) or decomposition_table.get(op)


def _variance(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    dims = list(dim) if dim else list(range(x.dim()))
    count = 1
    for d in dims:
        count *= x.shape[d]
    wide = _as_summed(x)
    apart = wide - wide.mean(dims, keepdim=True)
    divisor = max(0.0, count - (1 if correction is None else correction))
    return apart.square().sum(dims, keepdim) / divisor


def _as_summed(x: Tensor) -> Tensor:
    """`x` in the type in which torch sums spreads: doubles on CPUs. What is rounded in every step alike adds up over a
    loop, so that one more rounding is seen in its gradient."""
    return x.double() if x.device.type == "cpu" and x.is_floating_point() else x


def _rounded_variance(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _variance(x, dim, correction=correction, keepdim=keepdim).to(x.dtype)


def _deviation(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _variance(x, dim, correction=correction, keepdim=keepdim).sqrt().to(x.dtype)


def _with_mean(
    spread: Callable[..., Tensor],
) -> Callable[..., tuple[Tensor, Tensor]]:
    def both(
        x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
    ) -> tuple[Tensor, Tensor]:
        dims = list(dim) if dim else list(range(x.dim()))
        return spread(x, dim, correction=correction, keepdim=keepdim), x.mean(dims, keepdim)

    return both


def _distances(a: Tensor, b: Tensor, p: float, mode: int | None) -> Tensor:
    apart = (a.unsqueeze(-2) - b.unsqueeze(-3)).abs()
    if p == 0:
        return (apart != 0).to(a.dtype).sum(-1)
    if p == float("inf"):
        return apart.amax(-1)
    return (apart**p).sum(-1) ** (1 / p)


def _distances_backward(gradient: Tensor, a: Tensor, b: Tensor, p: float, distance: Tensor) -> Tensor:
    """As torch has it: none where two points lie together, and for p below 1 none along dims where they do."""
    if p in (0, float("inf")):
        return NotImplemented
    apart = a.unsqueeze(-2) - b.unsqueeze(-3)
    far = distance.unsqueeze(-1)
    none = (far == 0) | (apart == 0) if p < 1 else far == 0
    one = torch.ones_like(apart)
    size = torch.where(none, one, apart.abs()) ** (p - 1)
    part = size * apart.sign() * gradient.unsqueeze(-1) / torch.where(none, one, far) ** (p - 1)
    return torch.where(none, torch.zeros_like(part), part).sum(-2)


def _hard_or_soft(gradient: Tensor, x: Tensor, most: float) -> Tensor:
    return torch.where((x >= -most) & (x <= most), torch.zeros_like(gradient), gradient)


def _summed_products(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = (a @ b).sum(0)
    return added * beta + product * alpha if beta else (product * alpha).expand(added.shape)


def _margins_backward(
    gradient: Tensor, x: Tensor, target: Tensor, p: float, margin: float, *how: Any
) -> Tensor:  # fmt: skip
    weight: Tensor | None = how[0] if how else None
    reduction: int = how[1] if len(how) > 1 else 1
    rows, right = torch.atleast_2d(x), torch.atleast_1d(target).unsqueeze(1)
    distance = margin - rows.gather(1, right) + rows
    slope = gradient.reshape(-1, 1) if gradient.dim() else gradient
    slope = slope / rows.shape[1] / (rows.shape[0] if reduction == 1 else 1)
    slope = slope if weight is None else slope * weight[right]
    slope = slope * (1 if p == 1 else 2 * distance)
    others = torch.where(distance > 0, slope, torch.zeros_like(rows))
    chosen = torch.zeros_like(rows, dtype=torch.bool).scatter(1, right, True)
    others = torch.where(chosen, torch.zeros_like(rows), others)
    return torch.where(chosen, -others.sum(1, keepdim=True), others).reshape(x.shape)


def _leaky(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    generator: object = None,
) -> Tensor:  # fmt: skip
    return NotImplemented if training else torch.where(x > 0, x, x * ((lower + upper) / 2))


def _leaky_beside(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    generator: object = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return NotImplemented if training else (_leaky(x, noise, lower, upper), noise)


OURS: dict[OpOverload, Callable[..., object]] = {
    aten.var.correction: _rounded_variance,
    aten.std.correction: _deviation,
    aten.var_mean.correction: _with_mean(_rounded_variance),
    aten.std_mean.correction: _with_mean(_deviation),
    aten._cdist_forward.default: _distances,
    aten._cdist_backward.default: _distances_backward,
    aten.logit_backward.default: logit_backward,
    aten.hardshrink_backward.default: _hard_or_soft,
    aten.softshrink_backward.default: _hard_or_soft,
    aten.addbmm.default: _summed_products,
    aten.multi_margin_loss_backward.default: _margins_backward,
    aten.rrelu_with_noise.default: _leaky,
    aten.rrelu_with_noise_functional.default: _leaky_beside,
}
"""Our rules."""
