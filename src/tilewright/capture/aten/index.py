"""Indexing by data."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewright.ir.dtype import bool_, u8
from tilewright.ir.graph import Value
from tilewright.ir.ops import index as ops
from tilewright.ir.ops import pointwise, sample
from tilewright.ir.sizes import dims

from .registry import Call, NoDeclaration, Number, known, lower

aten = torch.ops.aten


@lower(aten.embedding.default)
def _embedding(c: Call, weight: Value, indices: Value, *_: object, **__: object) -> Value:
    return ops.embedding(c.b, weight, indices)


@lower(aten.index_select.default)
def _index_select(c: Call, x: Value, dim: int, index: Value) -> Value:
    return ops.index_select(c.b, x, dim, index)


@lower(aten.gather.default)
def _gather(c: Call, x: Value, dim: int, index: Value, sparse_grad: bool = False) -> Value:
    if dims.ZERO in index.shape and len(index.shape) != len(x.shape):
        return pointwise.full(c.b, index.shape, c.number(0, x.dtype))
    return ops.gather(c.b, x, dim, index)


def _one_per_line(x: Value, dim: int, index: Value) -> None:
    """Refuse a scatter that may write an element twice or leave lines out."""
    rank = len(x.shape)
    if not rank or len(index.shape) != rank or index.shape[dim] is not dims.ONE:
        raise NoDeclaration("scatter")
    if any(
        k != dim % rank and not dims.equal(a, b)
        for k, (a, b) in enumerate(zip(x.shape, index.shape, strict=True))
    ):
        raise NoDeclaration("scatter")


@lower(aten.scatter.value)
def _scatter_value(c: Call, x: Value, dim: int, index: Value, value: Number) -> Value:
    _one_per_line(x, dim, index)
    return ops.scatter_one(c.b, x, dim, index, c.number(value, x.dtype))


@lower(aten.scatter.src)
def _scatter(c: Call, x: Value, dim: int, index: Value, source: Value) -> Value:
    _one_per_line(x, dim, index)
    return ops.scatter_one(c.b, x, dim, index, source)


@lower(aten.scatter_add.default)
def _scatter_add(c: Call, x: Value, dim: int, index: Value, source: Value) -> Value:
    _one_per_line(x, dim, index)
    if x.dtype.is_half or x.dtype is bool_:
        raise NoDeclaration("scatter")
    return ops.scatter_one(c.b, x, dim, index, source, add=True)


@lower(aten.take.default)
def _take(c: Call, x: Value, index: Value) -> Value:
    return ops.take(c.b, x, index)


def _integers(indices: Sequence[Value | None]) -> Sequence[Value | None]:
    if any(v is not None and v.dtype in (bool_, u8) for v in indices):
        raise NoDeclaration("data-dependent shape")
    return indices


@lower(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(c: Call, x: Value, indices: Sequence[Value | None]) -> Value:
    return ops.index(c.b, x, _integers(indices))


@lower(aten._unsafe_masked_index.default)
def _masked_index(c: Call, x: Value, mask: Value, indices: Sequence[Value | None], fill: Number) -> Value:
    return ops.index(c.b, x, _integers(indices), mask, c.number(fill, x.dtype))


@lower(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def _grid_sampler(c: Call, x: Value, grid: Value, mode: int, padding: int, align_corners: bool) -> Value:
    if mode == 2 or padding == 2:
        raise NoDeclaration("cubic or reflected sampling")
    return sample.grid_sample(c.b, x, grid, mode == 1, padding == 1, align_corners)


@lower(aten.bucketize.Tensor, aten.bucketize.Scalar)
def _bucketize(
    c: Call, x: Value | Number, edges: Value, *, out_int32: bool = False, right: bool = False
) -> Value:
    """Every edge is looked at, so only a few are worth it."""
    if known(edges.shape[0]) > 64:
        raise NoDeclaration("binary search")
    first, last = c.promote(x, edges)
    assert isinstance(last, Value)
    return ops.bucketize(c.b, first, last, right, c.dtype)
