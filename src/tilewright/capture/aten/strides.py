"""Ops of which torch's fake kernel promises other strides than its CPU kernel gives: taken apart so that both agree.

A program that goes on outside the graph (`.view` of a result) sees the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

aten = torch.ops.aten


def stride_decompositions() -> dict[OpOverload, Callable[..., object]]:
    """For AOTAutograd's table. Each leaves the op alone where the promise holds, and so on other devices."""
    norms = {op: _row_major_norm(op) for op in _NORMS}
    return {aten.roll.default: _roll, **norms}


_NORMS = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update_functional.default,
    aten.native_batch_norm.default,
)


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """The fake kernel's result is row-major, the CPU's channels-last where its operand is: so roll the row-major
    tensor of which it is a view."""
    if not dims or not _is_plain_cpu(x) or suggest_memory_format(x) is torch.contiguous_format:
        return NotImplemented
    order = [0, *range(2, x.dim()), 1]
    back = [order.index(d) for d in range(x.dim())]
    return x.permute(order).roll(shifts, [order.index(d % x.dim()) for d in dims]).permute(back)


def _row_major_norm(norm: OpOverload) -> Callable[..., object]:
    """The fake kernel's result lies as its operand, the CPU's is row-major unless that is channels-last."""

    def decomposed(x: Tensor, *rest: object, **named: object) -> object:
        if not _is_plain_cpu(x) or suggest_memory_format(x) is not torch.contiguous_format:
            return NotImplemented
        return NotImplemented if x.is_contiguous() else norm(x.contiguous(), *rest, **named)

    return decomposed


def _is_plain_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.layout is torch.strided and not free_unbacked_symbols(x)
