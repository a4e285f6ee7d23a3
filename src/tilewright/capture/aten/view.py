"""Views, joins and pads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from tilewright.ir.expr import Expr
from tilewright.ir.graph import Value
from tilewright.ir.ops import strided
from tilewright.ir.ops import view as ops
from tilewright.ir.sizes import dims

from .library import BY_PLACE
from .registry import TABLE, Call, NoDeclaration, Number, Size, known, lower, size, sizes

aten = torch.ops.aten
_END = (1 << 63) - 1


@lower(
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default, view=True
)
def _view(c: Call, x: Value, shape: Sequence[Size], *_: object) -> Value:
    return ops.reshape(c.b, x, sizes(shape))


@lower(aten.permute.default, view=True)
def _permute(c: Call, x: Value, order: Sequence[int]) -> Value:
    return ops.permute(c.b, x, order)


@lower(aten.transpose.int, view=True)
def _transpose(c: Call, x: Value, first: int, second: int) -> Value:
    return ops.transpose(c.b, x, first, second)


@lower(aten.t.default, view=True)
def _t(c: Call, x: Value) -> Value:
    return ops.transpose(c.b, x, 0, -1) if len(x.shape) == 2 else x


@lower(aten.expand.default, view=True)
def _expand(c: Call, x: Value, shape: Sequence[Size], implicit: bool = False) -> Value:
    return ops.expand(c.b, x, sizes(shape))


@lower(aten.unsqueeze.default, view=True)
def _unsqueeze(c: Call, x: Value, dim: int) -> Value:
    return ops.unsqueeze(c.b, x, dim)


@lower(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, view=True)
def _squeeze(c: Call, x: Value, over: int | Sequence[int] | None = None) -> Value:
    if over is None:
        over = range(len(x.shape))
    return ops.squeeze(c.b, x, [over] if isinstance(over, int) else over)


def _place(value: Size | None) -> Expr | None:
    return None if value is None or (isinstance(value, int) and value >= _END) else size(value)


@lower(aten.slice.Tensor, view=True)
def _slice(
    c: Call, x: Value, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Size = 1
) -> Value:
    return ops.slice_(c.b, x, dim, _place(start), _place(end), known(step))


@lower(aten.select.int, view=True)
def _select(c: Call, x: Value, dim: int, index: Size) -> Value:
    return ops.select(c.b, x, dim, size(index))


@lower(aten.split_with_sizes.default, view=True)
def _split(c: Call, x: Value, split_sizes: Sequence[Size], dim: int = 0) -> tuple[Value, ...]:
    return ops.split(c.b, x, sizes(split_sizes), dim)


@lower(aten.split.Tensor, aten.chunk.default, view=True)
def _pieces(c: Call, x: Value, split_size: Size = 0, dim: int = 0) -> tuple[Value, ...]:
    return ops.split(c.b, x, [shape[dim] for shape in c.sizes_of_results], dim)


@lower(aten.unbind.int, view=True)
def _unbind(c: Call, x: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(ops.select(c.b, x, dim, dims.integer(k)) for k in range(len(c.results)))


@lower(aten.diagonal.default, view=True)
def _diagonal(c: Call, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    return ops.diagonal(c.b, x, offset, dim1, dim2)


@lower(aten.unfold.default, view=True)
def _unfold(c: Call, x: Value, dimension: int, size: int, step: int) -> Value:
    return ops.unfold(c.b, x, dimension, size, step)


@lower(aten.flip.default)
def _flip(c: Call, x: Value, over: Sequence[int]) -> Value:
    return ops.flip(c.b, x, over)


@lower(aten.roll.default)
def _roll(c: Call, x: Value, shifts: Sequence[Size], over: Sequence[int] = ()) -> Value:
    return ops.roll(c.b, x, sizes(shifts), over)


@lower(aten.repeat.default)
def _repeat(c: Call, x: Value, repeats: Sequence[Size]) -> Value:
    return ops.repeat(c.b, x, sizes(repeats))


@lower(aten.pixel_shuffle.default)
def _pixel_shuffle(c: Call, x: Value, factor: int) -> Value:
    return ops.pixel_shuffle(c.b, x, factor)


@lower(aten.pixel_unshuffle.default)
def _pixel_unshuffle(c: Call, x: Value, factor: int) -> Value:
    return ops.pixel_unshuffle(c.b, x, factor)


@lower(aten.cat.default)
def _cat(c: Call, tensors: Sequence[Value], dim: int = 0) -> Value:
    rank = max(len(t.shape) for t in tensors)
    pieces = [
        t for t in tensors if len(t.shape) == rank and not (len(t.shape) == 1 and t.shape[0] is dims.ZERO)
    ]
    same = [c.to(t, c.dtype) for t in pieces or tensors[:1]]
    return ops.concat(c.b, same, dim)


@lower(aten.stack.default)
def _stack(c: Call, tensors: Sequence[Value], dim: int = 0) -> Value:
    return ops.stack(c.b, [c.to(t, c.dtype) for t in tensors], dim)


def _around(x: Value, amounts: Sequence[Size]) -> tuple[list[Expr], list[Expr]]:
    """Torch's pad list (last dim first, before and after) as two lists over all dims."""
    before, after = [dims.ZERO] * len(x.shape), [dims.ZERO] * len(x.shape)
    for k in range(len(amounts) // 2):
        before[-1 - k], after[-1 - k] = size(amounts[2 * k]), size(amounts[2 * k + 1])
    return before, after


@lower(aten.constant_pad_nd.default)
def _constant_pad(c: Call, x: Value, pad: Sequence[Size], value: Number = 0) -> Value:
    return ops.pad(c.b, x, *_around(x, pad), c.number(value, x.dtype))


@lower(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def _reflection_pad(c: Call, x: Value, padding: Sequence[Size]) -> Value:
    return ops.border_pad(c.b, "reflect", x, *_around(x, padding))


@lower(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def _replication_pad(c: Call, x: Value, padding: Sequence[Size]) -> Value:
    return ops.border_pad(c.b, "replicate", x, *_around(x, padding))


@lower(aten._pad_circular.default)
def _circular_pad(c: Call, x: Value, padding: Sequence[Size]) -> Value:
    return ops.border_pad(c.b, "circular", x, *_around(x, padding))


def _check_fills(c: Call, source: Value, part: Sequence[Expr]) -> None:
    """Let a tensor be as large as the part that it replaces: torch's op asks for that, and its fake kernel, by which
    graphs are traced, does not. Raises NoDeclaration if it is not."""
    if len(source.shape) != len(part):
        raise NoDeclaration("a part of another size")
    for a, b in zip(source.shape, part, strict=True):
        if any(dims.at_least(difference, 1) for difference in (dims.sub(a, b), dims.sub(b, a))):
            raise NoDeclaration("a part of another size")
        c.b.require_equal(a, b)


@lower(aten.slice_scatter.default)
def _slice_scatter(c: Call, x: Value, source: Value, dim: int = 0, start: Size | None = None, end: Size | None = None,
                   step: Size = 1) -> Value:  # fmt: skip
    at = dim % len(x.shape)
    _, length = ops.slice_borders(x.shape[at], _place(start), _place(end), known(step))
    _check_fills(c, source, (*x.shape[:at], length, *x.shape[at + 1 :]))
    return ops.slice_scatter(c.b, x, c.to(source, x.dtype), dim, _place(start), _place(end), known(step))


@lower(aten.select_scatter.default)
def _select_scatter(c: Call, x: Value, source: Value, dim: int, index: Size) -> Value:
    at = dim % len(x.shape)
    _check_fills(c, source, (*x.shape[:at], *x.shape[at + 1 :]))
    return ops.select_scatter(c.b, x, c.to(source, x.dtype), dim, size(index))


@lower(aten.diagonal_scatter.default)
def _diagonal_scatter(
    c: Call, x: Value, source: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    _check_fills(c, source, ops.diagonal_shape(x.shape, offset, dim1, dim2))
    return ops.diagonal_scatter(c.b, x, c.to(source, x.dtype), offset, dim1, dim2)


@lower(aten.view.dtype, view=True)
def _bitcast(c: Call, x: Value, dtype: torch.dtype) -> Value:
    if c.dtype == x.dtype:
        return x
    raise NoDeclaration("reinterpreted bits")


@lower(aten.as_strided.default, view=True)
def _as_strided(
    c: Call, x: Value, shape: Sequence[Size], strides: Sequence[Size], offset: Size | None = None
) -> Value:
    """A reading of storage by place: an access map of the tensor that fills it, or of one whose elements are all that
    is read."""
    start = c.held.operand().offset if offset is None else size(offset)
    for base, lying in c.held.bases():
        found = strided.strided(c.b, base, lying, sizes(shape), sizes(strides), start)
        if found is not None:
            return found
    raise NoDeclaration(BY_PLACE)


@lower(aten.as_strided_scatter.default)
def _as_strided_scatter(
    c: Call,
    x: Value,
    source: Value,
    shape: Sequence[Size],
    strides: Sequence[Size],
    offset: Size | None = None,
) -> Value:
    start = c.held.operand().offset if offset is None else size(offset)
    found = strided.strided_scatter(c.b, x, c.held.result(), c.to(source, x.dtype), sizes(strides), start)
    if found is None:
        raise NoDeclaration(BY_PLACE)
    return found


def _copies() -> None:
    """Views that torch's functionalisation writes as copies."""
    for overload, entry in list(TABLE.items()):
        if not entry.view or not isinstance(overload, OpOverload):
            continue
        name, which = overload.name().removeprefix("aten::").partition(".")[::2]
        which = which or "default"
        packet = getattr(aten, f"{name}_copy", None)
        if packet is not None and which in packet.overloads() and getattr(packet, which) not in TABLE:
            lower(getattr(packet, which))(entry.rule)


_copies()
