"""What captured products, convolutions and attention compute, as tasks for which a library may have faster forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewright.ir.expr import Expr
from tilewright.ir.graph import LibraryCall, Operand, Value
from tilewright.ir.sizes import dims
from tilewright.ir.task import Attention, Convolution, Product, Task

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Slots:
    """Where the arguments of a product stand; the weight is [K, N] if `transposed`, else [N, K]."""

    x: int
    weight: int
    bias: int | None
    transposed: bool


_PRODUCTS: Mapping[object, _Slots] = {
    aten.mm.default: _Slots(0, 1, None, True),
    aten.addmm.default: _Slots(1, 2, 0, True),
    aten.linear.default: _Slots(0, 1, 2, False),
}

_CONVOLUTIONS = (aten.convolution.default, aten._convolution.default)

_ATTENTIONS: Mapping[object, tuple[int, int | str]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (3, "attn_mask"),
    aten.scaled_dot_product_attention.default: (4, 3),
}
"""Where dropout (causal behind it) and the mask stand among the arguments."""


def task_of(
    target: object,
    call: LibraryCall,
    inputs: Sequence[Value],
    shape: Sequence[Expr],
    *,
    repeated: bool = False,
) -> Task | None:
    """What a call of op `target` computes, with a result of `shape`; None if it is no task. `repeated` says that it is
    computed step by step."""
    if not inputs or any(v.dtype is not inputs[0].dtype for v in inputs):
        return None
    if target in _PRODUCTS:
        return _product(_PRODUCTS[target], call, inputs, shape, repeated)
    if target in _CONVOLUTIONS and len(shape) in (3, 4, 5):
        return _convolution(call, inputs, shape)
    return _attention(*_ATTENTIONS[target], call, inputs) if target in _ATTENTIONS else None


def _product(
    slots: _Slots, call: LibraryCall, inputs: Sequence[Value], shape: Sequence[Expr], repeated: bool
) -> Product | None:
    args = call.args
    x, weight = args[slots.x], args[slots.weight]
    bias = args[slots.bias] if slots.bias is not None and slots.bias < len(args) else None
    if not (
        isinstance(x, Operand) and isinstance(weight, Operand) and isinstance(bias, (Operand, type(None)))
    ):
        return None
    scaled = any(value != 1 for _, value in call.kwargs)  # beta and alpha
    rank = 0 if bias is None else len(inputs[bias.index].shape)
    return Product(
        inputs[0].dtype, slots.x, slots.weight, slots.bias if bias is not None else None, slots.transposed,
        inputs[x.index].shape, rank, tuple(shape), scaled=scaled, repeated=repeated,
    )  # fmt: skip


def _convolution(call: LibraryCall, inputs: Sequence[Value], shape: Sequence[Expr]) -> Convolution | None:
    x, weight, bias, stride, padding, dilation, transposed, extra, groups = call.args[:9]
    if not (
        isinstance(x, Operand) and isinstance(weight, Operand) and isinstance(bias, (Operand, type(None)))
    ):
        return None
    numbers = [_each(v, len(shape) - 2) for v in (stride, padding, dilation, extra)]
    steps, borders, spread, more = (n or () for n in numbers)
    if not isinstance(groups, int) or any(n is None for n in numbers):
        return None
    return Convolution(
        inputs[0].dtype, 0, 1, 2, inputs[x.index].shape, tuple(shape), steps, borders, spread, more, groups,
        bool(transposed),
    )  # fmt: skip


def _each(values: object, rank: int) -> tuple[int, ...] | None:
    """One constant per dim of space; None if there is none."""
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, int) for v in values):
        return None
    fixed = tuple(int(v) for v in values)
    return fixed * rank if len(fixed) == 1 else fixed


def _attention(dropout: int, mask: int | str, call: LibraryCall, inputs: Sequence[Value]) -> Attention | None:
    """Attention without dropout, of as many heads of one depth."""
    given = dict(call.kwargs)
    args = [*call.args, *[None] * 6]
    held, scale = given.get(mask) if isinstance(mask, str) else args[mask], given.get("scale")
    if args[:3] != [Operand(0), Operand(1), Operand(2)] or args[dropout]:
        return None
    if not isinstance(held, (Operand, type(None))) or not isinstance(scale, (int, float, type(None))):
        return None
    q, k, v = (inputs[n].shape for n in range(3))
    if not len(q) == len(k) == len(v) == 4 or not dims.equal(q[-1], v[-1]) or not dims.equal(q[0], k[0]):
        return None
    return Attention(inputs[0].dtype, q, k, bool(args[dropout + 1]), scale, None if held is None else mask)
