"""Operators that move, cut, join and describe tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from tilewright.capture.onnx.registry import op
from tilewright.capture.onnx.values.run import (
    Dim,
    Host,
    broadcast_dims,
    check_size,
    dense,
    host,
    is_static,
    is_symbolic,
    known_equal,
    place_of,
    scalar,
    to_int,
    torch_dtype,
)
from tilewright.errors import ModelError, UnsupportedError


@op("Shape", gives_host=True, view=True)
def shape(x: Tensor, *, start: int = 0, end: int | None = None) -> Host:
    """Sizes of the dims from `start` to `end`, as host integers."""
    return host(tuple(x.shape)[slice(start, end)])


@op("Size", gives_host=True, view=True)
def size(x: Tensor) -> Host:
    """Number of elements, as a host integer."""
    return scalar(x.numel())


@op("Identity", view=True)
def identity(x: Tensor) -> Tensor:
    """x itself."""
    return x


def resolve_shape(x: Tensor, wanted: Sequence[Dim], allow_zero: bool) -> list[Dim]:
    """A Reshape target with its zeros replaced by the input's sizes and a -1 by what is left."""
    dims: list[Dim] = []
    for i, d in enumerate(wanted):
        keep = is_static(d) and d == 0 and not allow_zero
        if (keep and i >= x.dim()) or (is_static(d) and d < -1):
            raise ModelError(
                f"{list(wanted)} is no target for {list(x.shape)}", phase="capture", op="Reshape"
            )
        dims.append(x.shape[i] if keep else d)
    return dims


@op("Reshape", since=5, host=(1,), view=True)
def reshape(x: Tensor, target: Host, *, allowzero: int = 0) -> Tensor:
    """Same elements in another shape; 0 keeps a size (unless `allowzero`), one -1 is inferred."""
    if target.dtype.is_floating_point:
        raise ModelError("a target of floats", phase="capture", op="Reshape")
    dims = resolve_shape(x, target.ints(), bool(allowzero))
    unknown = [i for i, d in enumerate(dims) if is_static(d) and d == -1]
    if len(unknown) > 1:
        raise ModelError("more than one -1", phase="capture", op="Reshape")
    if all(is_static(d) for d in (*x.shape, *dims)):
        if unknown and x.numel() == 0:
            dims[unknown[0]] = 0 if 0 in dims else x.numel() // math.prod(d for d in dims if d != -1)
        return x.reshape(dims)  # type: ignore[arg-type]
    if unknown:
        dims[unknown[0]] = _remaining(x.shape, [d for i, d in enumerate(dims) if i != unknown[0]])
    return _symbolic_reshape(x, dims)


def _remaining(have: Sequence[Dim], wanted: Sequence[Dim]) -> Dim:
    """The size of a -1: what the input's sizes leave after equal factors are cancelled."""
    rest: list[Dim] = list(have)
    divisor: Dim = 1
    for w in wanted:
        match = next((i for i, d in enumerate(rest) if known_equal(d, w)), None)
        if match is None:
            divisor = divisor * w
        else:
            del rest[match]
    product: Dim = 1
    for d in rest:
        product = product * d
    return product if is_static(divisor) and divisor == 1 else product // divisor


def _symbolic_reshape(x: Tensor, dims: Sequence[Dim]) -> Tensor:
    """Reshape with symbolic sizes: dims of size 1 are dropped before and put back after.

    torch's own rule asks whether a symbolic size divides such a 1, which would become a guard.
    """
    if len(dims) == x.dim() and all(known_equal(a, b) for a, b in zip(x.shape, dims, strict=True)):
        return x
    ones = [i for i, d in enumerate(x.shape) if is_static(d) and d == 1]
    body = x.squeeze(tuple(ones)) if ones else x
    core = [d for d in dims if not (is_static(d) and d == 1)]
    if len(core) != body.dim() or not all(known_equal(a, b) for a, b in zip(body.shape, core, strict=True)):
        body = (dense(body) if len(core) <= body.dim() else body).reshape(core)  # type: ignore[arg-type]
    for i, d in enumerate(dims):
        if is_static(d) and d == 1:
            body = body.unsqueeze(i)
    return body


@op("Flatten", view=True)
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    """A matrix, split before `axis`."""
    axis = place_of(axis, x.dim() + 1) if axis >= 0 else place_of(axis, x.dim())
    rows, columns = 1, 1
    for d in x.shape[:axis]:
        rows = rows * d
    for d in x.shape[axis:]:
        columns = columns * d
    return x.reshape(rows, columns)


@op("Transpose", view=True)
def transpose(x: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    """Permute the dims; reverse them if no order is given."""
    return x.permute(tuple(perm) if perm is not None else tuple(range(x.dim() - 1, -1, -1)))


@op("Squeeze", view=True)
def squeeze_old(x: Tensor, *, axes: Sequence[int] | None = None) -> Tensor:
    """Drop dims of size 1 (opsets before 13: axes as attribute)."""
    return squeeze(x, None if axes is None else host(axes))


@op("Squeeze", since=13, host=(1,), view=True)
def squeeze(x: Tensor, axes: Host | None = None) -> Tensor:
    """Drop the dims `axes`, or all dims of size 1."""
    if axes is None:
        return x.squeeze()
    chosen = {place_of(to_int(a), x.dim()) for a in axes.values}
    for a in chosen:
        if x.shape[a] != 1:
            raise ModelError(f"dim {a} of {list(x.shape)} is not 1", phase="capture", op="Squeeze")
    for a in sorted(chosen, reverse=True):
        x = x.select(a, 0)  # not squeeze: of a symbolic size, that would not know that it is 1
    return x


@op("Unsqueeze", view=True)
def unsqueeze_old(x: Tensor, *, axes: Sequence[int]) -> Tensor:
    """Insert dims of size 1 (opsets before 13: axes as attribute)."""
    return unsqueeze(x, host(axes))


@op("Unsqueeze", since=13, host=(1,), view=True)
def unsqueeze(x: Tensor, axes: Host) -> Tensor:
    """Insert dims of size 1 at `axes` of the result."""
    rank = x.dim() + len(axes.values)
    places = sorted(place_of(to_int(a), rank) for a in axes.values)
    if len(set(places)) < len(places):
        raise ModelError(f"axes {places} repeat", phase="capture", op="Unsqueeze")
    for a in places:
        x = x.unsqueeze(a)
    return x


@op("Concat", since=4)
def concat(*xs: Tensor, axis: int) -> Tensor:
    """Join along an axis."""
    return xs[0] if len(xs) == 1 else torch.cat(xs, axis)


@op("Split", since=2, view=True)
def split_old(
    x: Tensor, *, axis: int = 0, split: Sequence[int] | None = None, outputs: int
) -> tuple[Tensor, ...]:
    """Cut along an axis (opsets before 13: sizes as attribute)."""
    return _split(x, axis, split, outputs)


@op("Split", since=13, host=(1,), view=True)
def split(
    x: Tensor, sizes: Host | None = None, *, axis: int = 0, num_outputs: int | None = None, outputs: int
) -> tuple[Tensor, ...]:
    """Cut along an axis into given sizes, or into equal parts (the last one may be smaller)."""
    if (num_outputs or outputs) != outputs or (sizes is not None and len(sizes.values) != outputs):
        raise ModelError(f"{outputs} outputs, but another number of parts", phase="capture", op="Split")
    return _split(x, axis, None if sizes is None else sizes.ints(), outputs)


def _split(x: Tensor, axis: int, sizes: Sequence[Dim] | None, count: int) -> tuple[Tensor, ...]:
    total = x.shape[axis]
    if sizes is None:
        part = (total + count - 1) // count
        sizes = [part] * (count - 1) + [total - part * (count - 1)]
    return torch.split(x, list(sizes), axis)  # type: ignore[arg-type]


@op("Slice", view=True)
def slice_old(
    x: Tensor, *, axes: Sequence[int] | None = None, ends: Sequence[int], starts: Sequence[int]
) -> Tensor:
    """Cut a box (opset 1: as attributes)."""
    return slice_box(x, host(starts), host(ends), None if axes is None else host(axes))


@op("Slice", since=10, host=(1, 2, 3, 4), view=True)
def slice_box(
    x: Tensor, starts: Host, ends: Host, axes: Host | None = None, steps: Host | None = None
) -> Tensor:
    """Cut a box with steps; negative steps walk backwards; out-of-range ends are clamped."""
    places = range(len(starts.values)) if axes is None else axes.ints()
    strides = [1] * len(starts.values) if steps is None else steps.ints()
    for start, end, axis, step in zip(starts.ints(), ends.ints(), places, strides, strict=True):
        axis = axis + x.dim() if axis < 0 else axis
        if step > 0:
            x = _forward(x, axis, start, end, step)
        elif step < 0:
            x = _backward(x, axis, start, end, -step)
        else:
            raise ModelError("a step of 0", phase="capture", op="Slice")
    return x


def _forward(x: Tensor, axis: int, start: Dim, end: Dim, step: int) -> Tensor:
    index: list[object] = [slice(None)] * axis
    index.append(slice(start, end, step))
    return x[tuple(index)]  # type: ignore[index]


def _backward(x: Tensor, axis: int, start: Dim, end: Dim, step: int) -> Tensor:
    """A slice with a negative step: flip, then slice with the mirrored bounds. A start below 0 counts as 0."""
    n = x.shape[axis]
    if free_unbacked_symbols(n) and is_static(start) and is_static(end):  # as below, with nothing asked of n
        beyond = sys.maxsize // 2  # no dim has so many elements: files write so that a slice walks to the end
        top = torch.sym_max(n - 1, 0)
        near = 0 if start >= beyond else torch.sym_max(n - 1 - start, 0)
        first = torch.sym_min(-1 - start, top) if start < 0 else near
        far = sys.maxsize if end <= -beyond else torch.sym_min(-1 - end, n)
        last = far if end < 0 else torch.sym_max(n - 1 - end, 0)
        return _forward(x.flip(axis), axis, first, last, step)  # type: ignore[arg-type]
    first = n - 1 - ((start + n if start >= -n else 0) if start < 0 else start)
    last = n if end < -n else n - 1 - (end + n if end < 0 else end)
    first = 0 if first < 0 else first
    last = 0 if last < 0 else last
    return _forward(x.flip(axis), axis, first, last, step)


@op("Expand", since=8, host=(1,), view=True)
def expand(x: Tensor, target: Host) -> Tensor:
    """Broadcast to the common shape of x and the target."""
    dims = broadcast_dims(x.shape, target.ints())
    check_size(dims, "Expand")
    return x.expand(dims)  # type: ignore[arg-type]


@op("Tile", since=6, host=(1,))
def tile(x: Tensor, repeats: Host) -> Tensor:
    """Repeat along each axis."""
    counts = repeats.ints()
    check_size([d * c for d, c in zip(x.shape, counts, strict=True)], "Tile")
    return x.repeat(counts)


def reflect_index(size_: Dim, before: Dim, after: Dim, device: torch.device) -> Tensor:
    """Source index of each element of a dim padded by reflection without its border."""
    at = torch.arange(-before, size_ + after, device=device)
    if size_ == 1:
        return torch.zeros_like(at)
    period = 2 * (size_ - 1)
    at = torch.remainder(at, period)
    return torch.where(at < size_, at, period - at)


def _pad_by_index(x: Tensor, axis: int, before: Dim, after: Dim, mode: str) -> Tensor:
    n = x.shape[axis]
    if mode == "reflect":
        at = reflect_index(n, before, after, x.device)
    elif mode == "edge":
        at = torch.arange(-before, n + after, device=x.device).clamp(0, n - 1)
    elif mode == "wrap":
        at = torch.remainder(torch.arange(-before, n + after, device=x.device), n)
    else:
        raise UnsupportedError(
            f"mode {mode!r}", phase="capture", op="Pad", hint="constant, reflect, edge, wrap"
        )
    return x.index_select(axis, at)


def pad_dims(x: Tensor, pads: Sequence[Dim], axes: Sequence[int], mode: str, value: float) -> Tensor:
    """Pad the dims `axes` (non-negative) by pads = befores then afters; negative ones crop."""
    count = len(axes)
    check_size([x.shape[a] + pads[i] + pads[i + count] for i, a in enumerate(axes)], "Pad")
    if mode == "constant":
        by_axis = {a: (pads[i], pads[i + count]) for i, a in enumerate(axes)}
        flat = [p for a in range(x.dim() - 1, -1, -1) for p in by_axis.get(a, (0, 0))]
        while len(flat) > 2 and all(is_static(p) and p == 0 for p in flat[-2:]):
            flat = flat[:-2]
        return F.pad(x, flat, value=value)  # type: ignore[arg-type]
    for i, a in enumerate(axes):
        if any(not is_static(p) or p != 0 for p in (pads[i], pads[i + count])):
            x = _pad_by_index(x, a, pads[i], pads[i + count], mode)
    return x


@op("Pad", since=2)
def pad_old(x: Tensor, *, mode: str = "constant", pads: Sequence[int], value: float = 0.0) -> Tensor:
    """Pad (opset 2: as attributes)."""
    return pad_dims(x, list(pads), range(x.dim()), mode, value)


@op("Pad", since=11, host=(1, 2, 3))
def pad(
    x: Tensor, pads: Host, value: Host | None = None, axes: Host | None = None, *, mode: str = "constant"
) -> Tensor:
    """Pad or crop each dim, with a constant, by reflection, by the edge, or cyclically."""
    places = range(x.dim()) if axes is None else [a % x.dim() for a in axes.ints()]
    fill = 0 if value is None or not value.values else value.item()
    if x.dtype == torch.bool:
        return pad_dims(x.to(torch.uint8), pads.ints(), list(places), mode, float(fill)).to(torch.bool)
    return pad_dims(x, pads.ints(), list(places), mode, fill)  # type: ignore[arg-type]


@op("ConstantOfShape", since=9, host=(0,))
def constant_of_shape(dims: Host, *, value: Host | None = None, device: torch.device) -> Tensor:
    """A tensor of one value."""
    sizes = dims.ints()
    check_size(sizes, "ConstantOfShape")
    if value is None:
        return torch.zeros(sizes, dtype=torch.float32, device=device)
    return torch.full(sizes, value.item(), dtype=value.dtype, device=device)


@op("Range", since=11, host=(0, 1, 2))
def arange(start: Host, limit: Host, delta: Host, *, device: torch.device) -> Tensor:
    """start, start + delta, ... before limit."""
    first, last, step = start.item(), limit.item(), delta.item()
    if not any(is_symbolic(v) for v in (first, last, step)):
        if step == 0:
            raise ModelError("a step of 0", phase="capture", op="Range")
        count = max(-int((first - last) // step), 0)
        check_size([count], "Range")
        if count == 0:
            return torch.zeros(0, dtype=start.dtype, device=device)
    return torch.arange(first, last, step, dtype=start.dtype, device=device)  # type: ignore[arg-type]


@op("Range", since=27, host=(0, 1, 2))
def arange_27(start: Host, limit: Host, delta: Host, *, stash_type: int = 1, device: torch.device) -> Tensor:
    """Half types count in the type `stash_type`."""
    if start.dtype not in (torch.float16, torch.bfloat16):
        return arange(start, limit, delta, device=device)
    wide = torch_dtype(stash_type)
    first, last, step = (Host(h.values, h.shape, wide) for h in (start, limit, delta))
    return arange(first, last, step, device=device).to(start.dtype)


@op("Constant")
def constant(
    *,
    value: Tensor | None = None,
    value_float: float | None = None,
    value_floats: Sequence[float] | None = None,
    value_int: int | None = None,
    value_ints: Sequence[int] | None = None,
) -> Tensor:
    """A tensor given by one of the attributes."""
    if value is not None:
        return value
    if value_float is not None or value_floats is not None:
        return torch.tensor(value_float if value_floats is None else list(value_floats), dtype=torch.float32)
    if value_int is not None or value_ints is not None:
        return torch.tensor(value_int if value_ints is None else list(value_ints), dtype=torch.int64)
    raise ModelError("no value", phase="capture", op="Constant")


@op("DepthToSpace")
def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Move blocks of channels to space."""
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    n, c, h, w = x.shape
    b = blocksize
    y = x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
    return y.reshape(n, c // (b * b), h * b, w * b)


@op("SpaceToDepth")
def space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Move blocks of space to channels."""
    if mode == "CRD":
        return F.pixel_unshuffle(x, blocksize)
    n, c, h, w = x.shape
    b = blocksize
    y = x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4)
    return y.reshape(n, c * b * b, h // b, w // b)


@op("Trilu", since=14, host=(1,))
def trilu(x: Tensor, k: Host | None = None, *, upper: int = 1) -> Tensor:
    """Upper or lower triangle; the rest is zero."""
    diagonal = 0 if k is None else k.int()
    bits = x.shape[-2] + x.shape[-1]
    diagonal = max(-bits, min(bits, diagonal)) if is_static(bits) else diagonal
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


@op("EyeLike", since=9)
def eye_like(x: Tensor, *, dtype: int | None = None, k: int = 0) -> Tensor:
    """Ones on one diagonal, in the shape of x."""
    wanted = x.dtype if dtype is None else torch_dtype(dtype)
    rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    columns = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
    return (columns - rows == k).to(wanted)


@op("CenterCropPad", since=18, host=(1,))
def center_crop_pad(x: Tensor, target: Host, *, axes: Sequence[int] | None = None) -> Tensor:
    """Crop or pad with zeros around the centre to the target sizes."""
    places = range(x.dim()) if axes is None else [a % x.dim() for a in axes]
    for axis, wanted in zip(places, target.ints(), strict=True):
        have = x.shape[axis]
        if have > wanted:
            x = x.narrow(axis, (have - wanted) // 2, wanted)
        elif have < wanted:
            low = (wanted - have) // 2
            x = pad_dims(x, [low, wanted - have - low], [axis], "constant", 0)
    return x
