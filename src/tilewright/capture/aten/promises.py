"""Ops of which torch's fake kernel promises another form than its CPU kernel gives: taken apart so that both agree.

A program that goes on outside the graph (`.view` of a result) sees other strides; what is captured behind a result of
other sizes is another program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import cast

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher
from torch._ops import OperatorBase, OpOverload
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm, suggest_memory_format
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)

aten = torch.ops.aten


def promise_decompositions(
    table: Mapping[OperatorBase, Callable[..., object]],
) -> dict[OpOverload, Callable[..., object]]:
    """For AOTAutograd's table, of which `table` is the rest. Each leaves the op alone, or to the table, where the
    promise holds: of rolls, norms and bags on other devices than the CPU."""
    norms = {op: _row_major_norm(op) for op in _NORMS}
    iterated = {op: _as_iterated(table.get(op, op), op in table) for op in _ITERATED}
    ours = {aten.roll.default: _roll, aten._embedding_bag.default: _embedding_bag, aten.pow.Scalar: _power}
    shuffles = {op: _shuffle(table.get(op, op)) for op in _SHUFFLES}
    medians = {op: _median(op) for op in _MEDIANS}
    unpool = {op: _unpool(cast("Callable[..., Tensor]", table[op])) for op in _UNPOOLED}
    return {**ours, **norms, **iterated, **shuffles, **medians, **unpool}


_NORMS = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update_functional.default,
    aten.native_batch_norm.default,
)


_SHUFFLES = (aten.channel_shuffle.default, aten.native_channel_shuffle.default)


_MEDIANS = (aten.median.dim, aten.nanmedian.dim)


_UNPOOLED = (aten.max_unpool2d.default,)


_inside = ContextVar("inside", default=False)
"""Whether what runs is part of a decomposition here: the op of another form is left as it is."""


_ITERATED = (
    *(aten.copysign.Tensor, aten.heaviside.default, aten.xlogy.Tensor, aten.special_xlog1py.default),
    *(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default),
    *(aten.logaddexp.default, aten.logaddexp2.default),
    *(aten.floor_divide.default, aten.div.Tensor_mode),
)


def _as_iterated(op: Callable[..., object], apart: bool) -> Callable[..., object]:
    """The fake kernel's result is row-major, the real one's lies as operands do, as of any pointwise op: so take the
    op of the row-major tensors of which these are views. `op` is what torch takes it `apart` into, if it does."""

    def decomposed(a: Tensor | float, b: Tensor | float, **how: object) -> object:
        if (
            _inside.get()
            or not isinstance(a, Tensor)
            or not isinstance(b, Tensor)
            or not all(x.layout is torch.strided and not free_unbacked_symbols(x) for x in (a, b))
        ):
            return op(a, b, **how) if apart else NotImplemented
        wide = torch.broadcast_tensors(a, b)
        order, _ = compute_elementwise_output_logical_to_physical_perm(*wide)
        # A number stays one: it has no say in the type of the result.
        turned = [x.permute(order) if given.dim() else given for x, given in zip(wide, (a, b), strict=True)]
        odd = [not x.is_contiguous() and 0 not in x.stride() for x in turned]
        if order == sorted(order) and not any(odd):
            return op(a, b, **how) if apart else NotImplemented
        back = [order.index(d) for d in range(len(order))]
        token = _inside.set(True)
        try:
            made = op(*(x.contiguous() if k else x for x, k in zip(turned, odd, strict=True)), **how)
        finally:
            _inside.reset(token)
        return cast("Tensor", made).permute(back)

    return decomposed


def _power(base: complex, x: Tensor) -> object:
    """The fake kernel's result lies as its operand, the real one's is row-major."""
    if x.layout is not torch.strided or free_unbacked_symbols(x) or x.is_contiguous():
        return NotImplemented
    return aten.pow.Scalar(base, x.contiguous())


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """The fake kernel's result is row-major, the CPU's channels-last where its operand is: so roll the row-major
    tensor of which it is a view. Where a dim is rolled all the way round, the CPU copies it row-major."""
    if not dims or not _is_plain_cpu(x) or suggest_memory_format(x) is torch.contiguous_format:
        return NotImplemented
    if any(statically_known_true(n % x.shape[d] == 0) for n, d in zip(shifts, dims, strict=True)):
        return NotImplemented
    order, back = _channels_last(x)
    return x.permute(order).roll(shifts, [order.index(d % x.dim()) for d in dims]).permute(back)


def _channels_last(x: Tensor) -> tuple[list[int], list[int]]:
    """The order of dims in which channels lie innermost, and the one that undoes it."""
    order = [0, *range(2, x.dim()), 1]
    return order, [order.index(d) for d in range(x.dim())]


def _shuffle(parts: Callable[..., object]) -> Callable[..., object]:
    """Torch's own parts, which are row-major as the fake kernel's result is; the CPU's lies as its operand does."""

    def decomposed(x: Tensor, groups: int) -> object:
        if not _is_plain_cpu(x) or suggest_memory_format(x) is torch.contiguous_format:
            return parts(x, groups)
        order, back = _channels_last(x)
        grouped = x.permute(order).unflatten(-1, (groups, x.shape[1] // groups))
        return grouped.transpose(-1, -2).flatten(-2).permute(back)

    return decomposed


def _unpool(parts: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Torch's own parts, which are row-major as the fake kernel's result is; the CPU's lies as its operand does."""

    def decomposed(x: Tensor, indices: Tensor, output_size: Sequence[int]) -> Tensor:
        made = parts(x, indices, output_size)
        if not _is_plain_cpu(x) or suggest_memory_format(x) is torch.contiguous_format:
            return made
        return made.clone(memory_format=torch.channels_last)

    return decomposed


def _median(median: OpOverload) -> Callable[..., object]:
    """The CPU's kernel returns what memory held before for a dim along which the operand repeats one element."""

    def decomposed(x: Tensor, dim: int, keepdim: bool = False) -> object:
        if not _is_plain_cpu(x) or not x.dim() or not statically_known_true(x.stride(dim) == 0):
            return NotImplemented
        return NotImplemented if x.is_contiguous() else median(x.contiguous(), dim, keepdim)

    return decomposed


def _row_major_norm(norm: OpOverload) -> Callable[..., object]:
    """The fake kernel's result lies as its operand, the CPU's is row-major unless that is channels-last."""

    def decomposed(x: Tensor, *rest: object, **named: object) -> object:
        if not _is_plain_cpu(x) or suggest_memory_format(x) is not torch.contiguous_format:
            return NotImplemented
        return NotImplemented if x.is_contiguous() else norm(x.contiguous(), *rest, **named)

    return decomposed


def _embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
    padding_idx: int = -1,
) -> object:  # fmt: skip
    """The second result, the bag of each index, is empty where the CPU's kernel takes a fast way, and the gradient then
    computes it. For which types it does, the fake kernel does not always know."""
    if _inside.get() or not (_is_plain_cpu(weight) and _is_plain_cpu(offsets)):
        return NotImplemented
    if not _leaves_bags_empty(weight, offsets, mode, per_sample_weights, padding_idx):
        return NotImplemented
    token = _inside.set(True)
    try:
        y, bags, sizes, extrema = aten._embedding_bag.default(
            weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset,
            padding_idx,
        )  # fmt: skip
    finally:
        _inside.reset(token)
    return y, bags.new_empty(0), sizes, extrema


def _leaves_bags_empty(
    weight: Tensor, offsets: Tensor, mode: int, per_sample_weights: Tensor | None, padding_idx: int
) -> bool:
    """Whether the kernel itself does, of two indices in operands of the same types that lie the same way."""
    with _disable_current_modes(), no_python_dispatcher():
        index = torch.zeros(2, dtype=offsets.dtype)
        table = torch.zeros(2, 4, dtype=weight.dtype)[:, :: 1 if weight.stride(1) == 1 else 2]
        scale = None
        if per_sample_weights is not None:
            scale = torch.zeros(4, dtype=per_sample_weights.dtype)[
                :: 1 if per_sample_weights.stride(0) == 1 else 2
            ]
            scale = scale[:2]
        bags = aten._embedding_bag.default(
            table, index, index[:1], False, mode, False, scale, False, -1 if padding_idx < 0 else 0
        )[1]
    return bags.numel() == 0


def _is_plain_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.layout is torch.strided and not free_unbacked_symbols(x)
