"""Ops that take plain numbers alone at some places, written so that tensors without dims stand there: `TWINS`.

Each computes what the op itself does, in the same type: singles for half types, where the op rounds once at its end,
and the type of the result where the op turns the number into that first. `kind` is the type of the result.
"""

# What torch calls for `F.pad` is private to it.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Number = float | Tensor
"""A number, or a tensor without dims in its place."""


@dataclass(frozen=True, slots=True)
class Twin:
    """A function with the parameters of an op, of which these may be tensors in the place of numbers."""

    function: Callable[..., Tensor]
    numbers: tuple[str, ...]
    above: float = -math.inf
    """What each number is larger than; none is infinite where this is not."""
    accepts: Callable[[float], bool] = lambda _: True
    """Whether the op takes a number at all (what it refuses is left to the op itself to refuse), and the twin does as
    it does."""

    def knows(self, number: float) -> bool:
        """Whether it computes what the op does with this number."""
        within = self.above == -math.inf or self.above < number < math.inf
        return within and self.accepts(number)


def wide(x: Number, kind: torch.dtype) -> Number:
    """An operand as ops compute with it that make `kind`."""
    if kind == torch.bool:
        raise ValueError("numbers that change among truth values")
    return x.to(kind).to(computing(kind)) if isinstance(x, Tensor) and x.dim() else number(x, kind)


def number(x: Number, kind: torch.dtype) -> Number:
    """A number as ops compute with it that make `kind`: not rounded to half types."""
    return x.to(computing(kind)) if isinstance(x, Tensor) else x


def computing(kind: torch.dtype) -> torch.dtype:
    """What ops compute in that make `kind`."""
    return torch.float32 if kind in (torch.float16, torch.bfloat16) else kind


def rounded(x: Number, kind: torch.dtype, like: Tensor) -> Tensor:
    """A number or a tensor as an element of a tensor of `kind`."""
    return x.to(kind) if isinstance(x, Tensor) else torch.full((), x, dtype=kind, device=like.device)


def fused(x: Number, y: Number, z: Number, kind: torch.dtype) -> Tensor:
    """`x * y + z` of operands as ops compute with them that make `kind`; of floats rounded once, as eager does."""
    if kind.is_floating_point and isinstance(some := next(filter(_is_tensor, (z, y, x)), None), Tensor):
        a, b, c = (rounded(t, computing(kind), some) for t in (x, y, z))
        return torch.addcmul(c, a, b).to(kind)
    return torch.as_tensor(z + x * y).to(kind)


def _is_tensor(x: Number) -> bool:
    return isinstance(x, Tensor)


def _add(input: Number, other: Number, alpha: Number = 1, *, kind: torch.dtype) -> Tensor:
    return fused(number(alpha, kind), wide(other, kind), wide(input, kind), kind)


def _sub(input: Number, other: Number, alpha: Number = 1, *, kind: torch.dtype) -> Tensor:
    return fused(-number(alpha, kind), wide(other, kind), wide(input, kind), kind)


def _rsub(input: Number, other: Number, alpha: Number = 1, *, kind: torch.dtype) -> Tensor:
    return _sub(other, input, alpha, kind=kind)


def _lerp(input: Tensor, end: Tensor, weight: Number, *, kind: torch.dtype) -> Tensor:
    first, last = (x.to(computing(kind)) for x in (input, end))
    return torch.lerp(first, last, rounded(weight, computing(kind), first)).to(kind)


def _addcmul(
    input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Number = 1, kind: torch.dtype
) -> Tensor:
    scaled = number(value, kind) * wide(tensor1, kind)
    return fused(scaled, wide(tensor2, kind), wide(input, kind), kind)


def _addcdiv(
    input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Number = 1, kind: torch.dtype
) -> Tensor:
    return fused(number(value, kind), wide(tensor1, kind) / wide(tensor2, kind), wide(input, kind), kind)


def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Number = 1, alpha: Number = 1, kind: torch.dtype
) -> Tensor:
    return _added(input, _product(mat1, mat2, kind), beta, alpha, kind)


def _added(added: Tensor, product: Tensor, beta: Number, alpha: Number, kind: torch.dtype) -> Tensor:
    """`beta * added + alpha * product`; what is added is not read where beta is zero."""
    scaled = added.to(product.dtype) * (factor := rounded(beta, product.dtype, product))
    return (
        torch.where(factor == 0, torch.zeros_like(scaled), scaled) + product * number(alpha, product.dtype)
    ).to(kind)


def _product(a: Tensor, b: Tensor, kind: torch.dtype) -> Tensor:
    """A product that is not rounded to half types."""
    return a.to(computing(kind)) @ b.to(computing(kind))


def _index_add(
    input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Number = 1, kind: torch.dtype
) -> Tensor:
    if kind in (torch.float16, torch.bfloat16):
        raise ValueError("factors that change of sums that are rounded again and again")
    return torch.index_add(input, dim, index, source * number(alpha, kind))


def _masked_fill(input: Tensor, mask: Tensor, value: Number, *, kind: torch.dtype) -> Tensor:
    return torch.masked_fill(input, mask, rounded(value, kind, input))


def _index_fill(input: Tensor, dim: int, index: Tensor, value: Number, *, kind: torch.dtype) -> Tensor:
    return torch.index_fill(input, dim, index, rounded(value, kind, input))


def _scatter(input: Tensor, dim: int, index: Tensor, value: Number, *, kind: torch.dtype) -> Tensor:
    return torch.scatter(input, dim, index, rounded(value, kind, input).expand(index.shape))


def _where(condition: Tensor, input: Number, other: Number, *, kind: torch.dtype) -> Tensor:
    return torch.where(condition, rounded(input, kind, condition), rounded(other, kind, condition))


def _where_of(input: Number, condition: Tensor, other: Number, *, kind: torch.dtype) -> Tensor:
    return _where(condition, input, other, kind=kind)


def _clamp(
    input: Tensor, min: Number | None = None, max: Number | None = None, *, kind: torch.dtype
) -> Tensor:
    low, high = (None if x is None else rounded(x, kind, input) for x in (min, max))
    return torch.clamp(input.to(kind), low, high)


def _clamp_min(input: Tensor, min: Number, *, kind: torch.dtype) -> Tensor:
    return _clamp(input, min, kind=kind)


def _clamp_max(input: Tensor, max: Number, *, kind: torch.dtype) -> Tensor:
    return _clamp(input, None, max, kind=kind)


def _pad(
    input: Tensor, pad: Sequence[int], mode: str = "constant", value: Number = 0, *, kind: torch.dtype
) -> Tensor:
    inside = F.pad(torch.ones_like(input, dtype=torch.bool), pad, mode)
    return torch.where(inside, F.pad(input, pad, mode), rounded(value, kind, input))


_BY_NAME: dict[object, Twin] = {
    target: twin
    for names, twin in {
        ("add",): Twin(_add, ("alpha",)),
        ("sub", "subtract"): Twin(_sub, ("alpha",)),
        ("rsub",): Twin(_rsub, ("other", "alpha")),
        ("lerp",): Twin(_lerp, ("weight",)),
        ("addcmul",): Twin(_addcmul, ("value",)),
        ("addcdiv",): Twin(_addcdiv, ("value",)),
        ("addmm", "baddbmm", "addmv"): Twin(_addmm, ("beta", "alpha")),
        ("masked_fill",): Twin(_masked_fill, ("value",)),
        ("index_fill",): Twin(_index_fill, ("value",)),
        ("index_add",): Twin(_index_add, ("alpha",)),
        ("scatter",): Twin(_scatter, ("value",)),
        ("clamp", "clip"): Twin(_clamp, ("min", "max")),
        ("clamp_min",): Twin(_clamp_min, ("min",)),
        ("clamp_max",): Twin(_clamp_max, ("max",)),
    }.items()
    for name in names
    for target in (name, getattr(torch, name))
}
TWINS: dict[object, Twin] = {
    **_BY_NAME,
    torch.where: Twin(_where, ("input", "other")),
    "where": Twin(_where_of, ("other",)),
    F.pad: Twin(_pad, ("value",)),
    torch._C._nn.pad: Twin(_pad, ("value",)),
}
"""By what a node calls."""
