"""Matmul and convolution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewright.ir.graph import Value
from tilewright.ir.ops import contract as ops

from .registry import Call, Number, Size, known, lower, sizes

aten = torch.ops.aten


@lower(aten.mm.default, aten.bmm.default, reason="contraction")
def _matmul(c: Call, x: Value, y: Value) -> Value:
    return ops.matmul(c.b, x, y)


@lower(aten.dot.default, reason="contraction")
def _dot(c: Call, x: Value, y: Value) -> Value:
    return ops.dot(c.b, x, y)


@lower(aten.mv.default, reason="contraction")
def _mv(c: Call, x: Value, y: Value) -> Value:
    return ops.matvec(c.b, x, y)


@lower(aten.linear.default, reason="contraction")
def _linear(c: Call, x: Value, weight: Value, bias: Value | None = None) -> Value:
    return ops.linear(c.b, x, weight, bias)


@lower(aten.addmm.default, aten.baddbmm.default, reason="contraction")
def _addmm(c: Call, bias: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    return ops.added_matmul(c.b, bias, x, y, c.wide(beta), c.wide(alpha))


@lower(aten.addmv.default, reason="contraction")
def _addmv(c: Call, bias: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    return ops.added_matvec(c.b, bias, x, y, c.wide(beta), c.wide(alpha))


@lower(aten.convolution.default, aten._convolution.default, reason="convolution", bias=2)
def _convolution(c: Call, x: Value, weight: Value, bias: Value | None, stride: Sequence[Size], padding: Sequence[Size],
                 dilation: Sequence[Size], transposed: bool, output_padding: Sequence[Size], groups: Size,
                 *_: object) -> Value:  # fmt: skip
    rank = len(weight.shape) - 2
    steps, spread = _each(stride, rank), _each(dilation, rank)
    borders = sizes(padding) * (rank if len(padding) == 1 else 1)
    if transposed:
        extra = sizes(output_padding) * (rank if len(output_padding) == 1 else 1)
        return ops.transposed_convolution(c.b, x, weight, bias, steps, borders, spread, extra, known(groups))
    return ops.convolution(c.b, x, weight, bias, steps, borders, spread, known(groups))


def _each(values: Sequence[Size], rank: int) -> list[int]:
    """One constant per spatial dim; a single one counts for all."""
    fixed = [known(v) for v in values]
    return fixed * rank if len(fixed) == 1 else fixed
