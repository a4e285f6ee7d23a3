"""Frozen tensors of a graph, also those that are seen through views."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.ir.expr import Expr, axes_of, axis, substitute
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr


class Frozen:
    """The frozen tensors of a graph, also those seen through views."""

    def __init__(self, graph: Graph) -> None:
        self.constants = graph.constants
        self.producer = graph.producer()

    def tensor(self, v: Value) -> Tensor | None:
        """The frozen tensor that `v` is, sharing memory with the constant; None if it is not one."""
        held = self.constants.get(v)
        if isinstance(held, Tensor):
            return held
        op = self.producer.get(v)
        if op is None or op.expr is None or not op.expr.is_view() or len(op.inputs) != 1:
            return None
        source = self.tensor(op.inputs[0])
        return None if source is None or source.dtype != _dtype_of(op, source) else view_of(source, op.expr)


def _dtype_of(op: Op, source: Tensor) -> torch.dtype | None:
    return source.dtype if op.inputs[0].dtype == op.output.dtype else None


def view_of(source: Tensor, expr: TensorExpr) -> Tensor | None:
    """What a view with constant sizes shows of `source`: the same memory if strides can say it, else a copy."""
    shape = [dims.static(a.extent) for a in expr.axes]
    if any(n is None for n in shape) or axes_of(expr.body[0]) - {axis(a) for a in expr.axes}:
        return None
    sizes = [n or 0 for n in shape]
    index = expr.body[0].args
    offset = dims.add(*(dims.mul(i, dims.integer(s)) for i, s in zip(index, source.stride(), strict=True)))
    steps = [dims.coefficient(offset, axis(a)) for a in expr.axes]
    start = dims.static(substitute(offset, {axis(a): dims.ZERO for a in expr.axes}))
    numbers = [None if s is None else dims.static(s) for s in steps]
    if start is not None and all(n is not None and n >= 0 for n in numbers):
        fixed = [n or 0 for n in numbers]
        terms = [dims.mul(axis(a), dims.integer(n)) for a, n in zip(expr.axes, fixed, strict=True)]
        if dims.equal(dims.add(dims.integer(start), *terms), offset):
            return source.as_strided(sizes, fixed, source.storage_offset() + start)
    return _gathered(source, index, expr, sizes)


def _gathered(source: Tensor, index: Sequence[Expr], expr: TensorExpr, sizes: Sequence[int]) -> Tensor | None:
    """A view that strides cannot say, as a copy: only where it merges or splits dims of dense memory."""
    flat = dims.add(*(dims.mul(i, s) for i, s in zip(index, dims.dense_strides(_sizes(source)), strict=True)))
    dense = dims.add(
        dims.ZERO,
        *(dims.mul(axis(a), s) for a, s in zip(expr.axes, dims.dense_strides(expr.shape), strict=True)),
    )
    return source.reshape(tuple(sizes)) if dims.equal(flat, dense) else None


def _sizes(t: Tensor) -> tuple[Expr, ...]:
    return tuple(dims.integer(n) for n in t.shape)
