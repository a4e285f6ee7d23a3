"""Readings and writings of storage by place: what torch calls as_strided, as access maps.

A place counts elements from the start of a storage. Which element of a tensor lies there follows by dividing by its
strides, the largest first, if these are nested: then no two elements share a place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cmp_to_key

from tilewright.ir.builder import Builder
from tilewright.ir.expr import Expr, call, read, substitute, symbol, walk, where
from tilewright.ir.graph import Value
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.linear_form import linear
from tilewright.ir.tensor import TensorExpr, output_axes

from .common import access, inside, position, within

Sizes = Sequence[Expr]


@dataclass(frozen=True, slots=True)
class Lying:
    """How a tensor lies in its storage: strides and offset in elements, and how many elements the storage has."""

    strides: tuple[Expr, ...]
    offset: Expr
    storage: Expr

    def fills(self, shape: Sizes) -> bool:
        """Whether a tensor of `shape` is proved to show every element of the storage; dims that repeat elements do
        not count."""
        order = nested(shape, self.strides)
        if order is None or self.offset is not dims.ZERO:
            return False
        step = dims.ONE
        for d in reversed(order):
            if not dims.equal(self.strides[d], step):
                return False
            step = dims.mul(step, shape[d])
        return dims.equal(step, self.storage)


def nested(shape: Sizes, strides: Sizes) -> list[int] | None:
    """The dims that move (no size 1, no stride 0), the largest stride first, if each stride is proved to exceed the
    reach of those after it; else None."""
    moving = [d for d, (n, s) in enumerate(zip(shape, strides, strict=True)) if not _still(n, s)]

    def order(a: int, b: int) -> int:
        difference = dims.sub(strides[b], strides[a])
        if difference is dims.ZERO:
            return 0
        return 1 if dims.at_least(difference, 0) else -1

    moving.sort(key=cmp_to_key(order))
    reach = dims.ZERO
    for d in reversed(moving):
        if not dims.at_least(dims.sub(strides[d], reach), 1):
            return None
        reach = dims.add(reach, dims.mul(dims.sub(shape[d], dims.ONE), strides[d]))
    return moving


def with_elements(shape: Sizes, strides: Sizes) -> tuple[list[Expr], list[Expr]]:
    """Shape and strides of a tensor that has elements: what its sizes are products of is called anew, from 1 on, and so
    is a size that is a sum, where strides know it as a whole. Of one without elements all strides are as good."""
    atoms = dict.fromkeys(a for n in shape for m in linear(n) if len(linear(n)) == 1 for a in m)
    anew = {a: symbol(f"size{k}", 1) for k, a in enumerate(atoms) if dims.at_least(a, 0)}
    for n in dict.fromkeys(n for n in shape if len(linear(n)) > 1):
        size = symbol(f"size{len(anew)}", 1)
        sizes = {n: size, dims.maximum(dims.ONE, n): size}
        parts = {atom for m in linear(n) for atom in m}
        if not any(parts & set(walk(substitute(s, sizes))) for s in strides):
            anew |= sizes
    # A size that holds others is replaced before them.
    inward = sorted(anew, key=lambda a: len(walk(a)), reverse=True)

    def renamed(e: Expr) -> Expr:
        for a in inward:
            e = substitute(e, {a: anew[a]})
        return e

    first, second = ([renamed(e) for e in part] for part in (shape, strides))
    return first, second


def _still(size: Expr, stride: Expr) -> bool:
    return size is dims.ONE or stride is dims.ZERO


def _index(place: Expr, order: Sequence[int], strides: Sizes) -> tuple[list[Expr], Expr]:
    """The index at `place` (counted from the first element), and what remains after the last division: not 0 between
    elements. Dims that do not move are read at 0, and the first that does is not bounded."""
    out = [dims.ZERO] * len(strides)
    for d in order:
        out[d] = dims.floordiv(place, strides[d])
        place = dims.mod(place, strides[d])
    return out, place


def _place(index: Sizes, strides: Sizes, offset: Expr) -> Expr:
    return dims.add(offset, *[dims.mul(i, s) for i, s in zip(index, strides, strict=True)])


def strided(b: Builder, x: Value, lying: Lying, shape: Sizes, strides: Sizes, offset: Expr) -> Value | None:
    """The elements of the storage of `x` at `offset` and `strides`; None unless all of them are proved to be elements
    of `x`."""
    order = nested(x.shape, lying.strides)
    if order is None:
        return None
    axes = [position(a) for a in output_axes(tuple(shape))]
    found, rest = _index(dims.sub(_place(axes, strides, offset), lying.offset), order, lying.strides)
    if rest is not dims.ZERO or any(inside(i, n) for i, n in zip(found, x.shape, strict=True)):
        return None
    return access(
        b,
        "strided",
        x,
        shape,
        lambda i: _index(dims.sub(_place(i, strides, offset), lying.offset), order, lying.strides)[0],
    )


def strided_scatter(
    b: Builder, x: Value, lying: Lying, source: Value, strides: Sizes, offset: Expr
) -> Value | None:
    """`x`, which lies so, with the elements of `source` at `offset` and `strides` of its storage; None unless they are
    proved to have a place each."""
    order = nested(source.shape, strides)
    if order is None or any(
        s is dims.ZERO and n is not dims.ONE for n, s in zip(source.shape, strides, strict=True)
    ):
        return None
    axes = output_axes(x.shape)
    index = [position(a) for a in axes]
    place = dims.sub(_place(index, lying.strides, lying.offset), offset)
    found, rest = _index(place, order, strides)
    hits = [inside(found[d], source.shape[d]) for d in order]
    hits.append(None if rest is dims.ZERO else call("eq", rest, dims.ZERO))
    condition = within(hits)
    body = read(1, found, source.dtype)
    if condition is not None:
        body = where(condition, body, read(0, index, x.dtype))
    (out,) = b.emit("strided_scatter", (x, source), TensorExpr(axes, (body,)))
    return out
