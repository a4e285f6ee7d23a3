"""Faster forms of matrix products and convolutions: torch's oneDNN ops, on weights packed once.

On processors where MKL falls back to a slow path, oneDNN is more than twice as fast even on plain weights. Below about
two million operations its call costs more than it saves (10 us against 2 us).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ...ir import dims
from ...ir.dtype import f32
from ...ir.expr import Expr, slot, transform
from ...ir.graph import Builder, Epilogue, LibraryCall, Operand, Value
from ...ir.ops import pointwise

aten = torch.ops.aten
onednn = torch.ops.mkldnn

SMALLEST = 2_200_000
"""Operations (2 x multiply-adds) from which a packed product is faster than the plain one."""
SMALLEST_PLAIN = 4_500_000
"""The same for weights that are not packed."""
FEWEST_ROWS = 4
"""Rows from which a product with a weight that is not packed is faster."""
TYPICAL = 112
"""Height and width that weights are packed for where they are dynamic; the packed form hardly depends on them."""
CHAIN = 384
"""Products that oneDNN may sum one after the other. More would be twice as inexact as eager, which sums in blocks."""

Specialise = Callable[[LibraryCall, Mapping[int, object]], LibraryCall | None]
Attribute = tuple[str, list[float], str]
"""What the ops take to name what they do on their result: name, numbers, algorithm."""
PLAIN: Attribute = ("none", [], "")


def specialiser(target: object, inputs: Sequence[Value], shape: Sequence[Expr]) -> Specialise | None:
    """How to make a call of ATen op `target` on `inputs` with a result of `shape` faster; None if it is not one of
    those that can be."""
    if not torch.backends.mkldnn.is_available() or not all(v.dtype is f32 for v in inputs):
        return None
    if target in _PRODUCTS:
        slots = _PRODUCTS[target]
        return lambda call, frozen: _product(call, frozen, slots, inputs, shape)
    if target in (aten.convolution.default, aten._convolution.default):
        return lambda call, frozen: _convolution(call, frozen, inputs, shape)
    return None


# --- matrix products -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Slots:
    """Where the arguments of a product stand; the weight of a `transposed` one is [K, N]."""

    x: int
    weight: int
    bias: int | None
    transposed: bool


_PRODUCTS: dict[object, _Slots] = {
    aten.mm.default: _Slots(0, 1, None, True),
    aten.addmm.default: _Slots(1, 2, 0, True),
    aten.linear.default: _Slots(0, 1, 2, False),
}


def _product(
    call: LibraryCall, frozen: Mapping[int, object], slots: _Slots, inputs: Sequence[Value], shape: Sequence[Expr]
) -> LibraryCall | None:  # fmt: skip
    if any(value != 1 for _, value in call.kwargs):  # beta and alpha
        return None
    x, weight = call.args[slots.x], call.args[slots.weight]
    bias = call.args[slots.bias] if slots.bias is not None and slots.bias < len(call.args) else None
    if not isinstance(x, Operand) or not isinstance(weight, Operand) or x.index in frozen:
        return None
    if bias is not None and (not isinstance(bias, Operand) or len(inputs[bias.index].shape) != 1):
        return None
    work = dims.mul(dims.integer(2), dims.prod(shape), inputs[x.index].shape[-1])
    held = frozen.get(weight.index)
    if held is None:
        return _unpacked(call, x, weight, bias, slots.transposed, work, inputs, frozen)
    assert isinstance(held, Tensor)
    vector = frozen.get(bias.index) if bias is not None else None
    if _size(work) < SMALLEST or (bias is not None and vector is None) or len(frozen) + 1 < len(inputs):
        return None
    matrix = held.detach().t() if slots.transposed else held.detach()
    assert vector is None or isinstance(vector, Tensor)
    return _Linear(_packed(matrix), vector, shape).call()


def _size(e: Expr) -> int:
    """The value of a size; a dynamic one counts as if each of its symbols were 64."""
    return dims.evaluate(e, {s.value.name: 64 for s in dims.symbols_of(e)})  # type: ignore[union-attr]


def _packed(weight: Tensor) -> tuple[Tensor, ...]:
    """A weight [N, K] in the library's own form, cut along K into parts of at most CHAIN."""
    count = -(-weight.shape[1] // CHAIN)
    step = -(-weight.shape[1] // count)
    step += -step % 16
    return tuple(onednn._reorder_linear_weight(w.contiguous()) for w in weight.split(step, 1))


@dataclass(frozen=True, slots=True, eq=False)
class _Linear:
    """x [.., K] times a packed weight, plus a vector, and an activation."""

    weights: tuple[Tensor, ...]
    bias: Tensor | None
    shape: Sequence[Expr]
    attribute: Attribute = PLAIN

    def call(self) -> LibraryCall:
        epilogues = [*_activations(self.activated)] if self.attribute == PLAIN else []
        if self.bias is None and self.attribute == PLAIN:
            epilogues.append(Epilogue(_SUM, lambda _, vector: self.shifted(vector), "channel"))
        return LibraryCall(
            "onednn.linear", self.function(), (Operand(0),), strides=(dims.dense_strides(tuple(self.shape)),),
            reason="contraction", epilogues=tuple(epilogues), rows=0, reuses=-1,
        )  # fmt: skip

    def activated(self, attribute: Attribute) -> LibraryCall:
        return replace(self, attribute=attribute).call()

    def shifted(self, vector: object) -> LibraryCall:
        assert isinstance(vector, Tensor)
        return replace(self, bias=vector.detach().reshape(-1).contiguous()).call()

    def function(self) -> Callable[[Tensor], Tensor]:
        run, bias, (name, numbers, algorithm) = (
            onednn._linear_pointwise.default._op,
            self.bias,
            self.attribute,
        )
        if len(self.weights) == 1:
            (weight,) = self.weights
            return lambda x: run(x, weight, bias, name, numbers, algorithm)
        raise NotImplementedError
