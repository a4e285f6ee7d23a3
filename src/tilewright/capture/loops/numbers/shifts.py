"""Ops that move or cut a tensor by a plain number that changes with the step of a loop, as `twins` has other ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .twins import Number, Twin


def _roll(
    input: Tensor, shifts: Number | Sequence[Number], dims: int | Sequence[int] = (), *, kind: torch.dtype
) -> Tensor:
    by = shifts if isinstance(shifts, Sequence) else [shifts]
    along = dims if isinstance(dims, Sequence) else [dims]
    if not along:
        return _roll(input.flatten(), by, 0, kind=kind).reshape(input.shape)
    for shift, dim in zip(by, along, strict=True):
        size = input.shape[dim]
        places = (torch.arange(size, device=input.device) - shift) % size
        input = input.index_select(dim, places)
    return input


def _tril(input: Tensor, diagonal: Number = 0, *, kind: torch.dtype) -> Tensor:
    return torch.where(_diagonals(input) <= diagonal, input, torch.zeros_like(input))


def _triu(input: Tensor, diagonal: Number = 0, *, kind: torch.dtype) -> Tensor:
    return torch.where(_diagonals(input) >= diagonal, input, torch.zeros_like(input))


def _diagonals(input: Tensor) -> Tensor:
    """The number of the diagonal of each element."""
    rows, columns = (torch.arange(n, device=input.device) for n in input.shape[-2:])
    return columns - rows.unsqueeze(1)


def diagonal_of(
    input: Tensor,
    length: int,
    offset: Number = 0,
    dim1: int = 0,
    dim2: int = 1,
    *,
    kind: torch.dtype | None = None,
) -> Tensor:
    """So much of a diagonal: a view, or a copy if `offset` is a tensor."""
    if not isinstance(offset, Tensor):
        assert isinstance(offset, int)
        return torch.diagonal(input, offset, dim1, dim2)
    along = torch.arange(length, device=input.device)
    row, column = along + (-offset).clamp(min=0), along + offset.clamp(min=0)
    return input.movedim((dim1, dim2), (-2, -1))[..., row, column]


SHIFTS: dict[object, Twin] = {
    torch.roll: Twin(_roll, ("shifts",)),
    "roll": Twin(_roll, ("shifts",)),
    torch.tril: Twin(_tril, ("diagonal",)),
    "tril": Twin(_tril, ("diagonal",)),
    torch.triu: Twin(_triu, ("diagonal",)),
    "triu": Twin(_triu, ("diagonal",)),
    diagonal_of: Twin(diagonal_of, ("offset",)),
}
"""By what a node calls."""
