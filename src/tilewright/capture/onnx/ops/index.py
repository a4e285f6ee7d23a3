"""Gathering, scattering, selecting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.capture.onnx.registry import op
from tilewright.capture.onnx.values.run import Host, check_size
from tilewright.errors import UnsupportedError

_REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def wrap(index: Tensor, size: int) -> Tensor:
    """Negative indices counted from the end; as int64."""
    index = index.to(torch.int64)
    return torch.where(index < 0, index + size, index)


@op("Gather", small=(1,), view=True)
def gather(x: Tensor, index: Tensor | Host, *, axis: int = 0) -> Tensor:
    """Pick slices along an axis; the index dims replace it. One known index is a plain selection."""
    axis = axis + x.dim() if axis < 0 else axis
    if isinstance(index, Host):
        place = index.int()
        picked = x.select(axis, place)
        for _ in range(index.rank):
            picked = picked.unsqueeze(axis)
        return picked
    at = wrap(index, x.shape[axis])
    if index.dim() == 0:
        return x.index_select(axis, at.reshape(1)).squeeze(axis)
    if index.dim() == 1:
        return x.index_select(axis, at)
    picked = x.index_select(axis, at.reshape(-1))
    return picked.unflatten(axis, tuple(index.shape))


@op("GatherElements", since=11)
def gather_elements(x: Tensor, index: Tensor, *, axis: int = 0) -> Tensor:
    """Pick one element for each index."""
    return torch.gather(x, axis, wrap(index, x.shape[axis]))


def _flat_nd(x: Tensor, index: Tensor, lead: int) -> Tensor:
    """The last dim of `index` addresses dims lead, lead + 1, ... of x: one flat index for them."""
    depth = index.shape[-1]
    flat = torch.zeros(index.shape[:-1], dtype=torch.int64, device=x.device)
    for d in range(depth):
        size = x.shape[lead + d]
        flat = flat * size + wrap(index[..., d], size)
    return flat


@op("GatherND", since=11)
def gather_nd(x: Tensor, index: Tensor, *, batch_dims: int = 0) -> Tensor:
    """Pick slices by index tuples, batch by batch."""
    depth = index.shape[-1]
    flat = _flat_nd(x, index, batch_dims)
    rest = x.shape[batch_dims + depth :]
    batch = x.shape[:batch_dims]
    body = x.reshape(*batch, -1, *rest) if depth else x.unsqueeze(batch_dims)
    if batch_dims == 0:
        return body[flat]
    count = 1
    for b in batch:
        count = count * b
    rows = body.reshape(count, body.shape[batch_dims], *rest)
    offsets = torch.arange(count, device=x.device).reshape(-1, *[1] * (flat.dim() - batch_dims))
    where = flat.reshape(count, *flat.shape[batch_dims:])
    return rows[offsets, where].reshape(*flat.shape, *rest)


def _scatter(x: Tensor, axis: int, index: Tensor, updates: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return x.scatter(axis, index, updates)
    if reduction not in _REDUCE:
        raise UnsupportedError(
            f"reduction {reduction!r}", phase="capture", op="Scatter", hint="add, mul, max, min"
        )
    if x.dtype == torch.bool:
        wide = x.to(torch.uint8).scatter_reduce(axis, index, updates.to(torch.uint8), _REDUCE[reduction])
        return wide.to(torch.bool)
    return x.scatter_reduce(axis, index, updates, _REDUCE[reduction])


@op("Scatter", since=9)
@op("ScatterElements", since=11)
def scatter_elements(
    x: Tensor, index: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none"
) -> Tensor:
    """Write (or combine) one element for each index."""
    return _scatter(x, axis, wrap(index, x.shape[axis]), updates, reduction)


@op("ScatterND", since=11)
def scatter_nd(x: Tensor, index: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    """Write (or combine) slices at index tuples."""
    depth = index.shape[-1]
    rest = x.shape[depth:]
    flat = _flat_nd(x, index, 0).reshape(-1)
    body = x.reshape(-1, *rest)
    parts = updates.reshape(-1, *rest)
    if reduction == "none":
        return body.index_put((flat,), parts).reshape(x.shape)
    at = flat.reshape(-1, *[1] * len(rest)).expand(parts.shape)
    return _scatter(body, 0, at, parts, reduction).reshape(x.shape)


@op("OneHot", since=9, host=(1,))
def one_hot(index: Tensor, depth: Host, values: Tensor, *, axis: int = -1) -> Tensor:
    """`values[1]` at the index along a new axis, `values[0]` elsewhere; out-of-range gives none."""
    size = depth.int()
    check_size([*index.shape, size], "OneHot")
    axis = axis + index.dim() + 1 if axis < 0 else axis
    at = index.to(torch.int64).unsqueeze(axis)
    shape = [1] * (index.dim() + 1)
    shape[axis] = -1
    steps = torch.arange(size, device=index.device).reshape(shape)
    return torch.where((at == steps) | (at + size == steps), values[1], values[0])


@op("NonZero", since=9)
def non_zero(x: Tensor) -> Tensor:
    """Indices of non-zero elements, [rank, count]."""
    if x.dim() == 0:
        return torch.nonzero(x.reshape(1)).transpose(0, 1)[:0].reshape(0, int(x != 0))
    return torch.nonzero(x).transpose(0, 1)


@op("Compress", since=9)
def compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    """Slices (or elements) at which the condition holds."""
    at = torch.nonzero(condition).reshape(-1)
    return x.reshape(-1).index_select(0, at) if axis is None else x.index_select(axis, at)


@op("Unique", since=11)
def unique(
    x: Tensor, *, axis: int | None = None, sorted: int = 1, outputs: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Distinct elements (or slices), first places, inverse, counts; sorted, or by first place."""
    del outputs
    rows = x.reshape(-1) if axis is None else x
    dim = 0 if axis is None else axis
    values, inverse, counts = torch.unique(
        rows, sorted=True, return_inverse=True, return_counts=True, dim=dim
    )
    places = torch.arange(inverse.shape[0], device=x.device)
    first = torch.full_like(counts, inverse.shape[0]).scatter_reduce(0, inverse, places, "amin")
    if not sorted:
        order = torch.argsort(first)
        rank = torch.argsort(order)
        values, first, counts = values.index_select(dim, order), first[order], counts[order]
        inverse = rank[inverse]
    return values, first, inverse, counts


@op("ReverseSequence", since=10)
def reverse_sequence(x: Tensor, lengths: Tensor, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    """Reverse the first `lengths[b]` steps of each sample."""
    steps = torch.arange(x.shape[time_axis], device=x.device)
    size = lengths.to(torch.int64).unsqueeze(1)
    at = torch.where(steps < size, size - 1 - steps, steps)
    at = at if batch_axis < time_axis else at.transpose(0, 1)
    shape = [n if d in (batch_axis, time_axis) else 1 for d, n in enumerate(x.shape)]
    return torch.gather(x, time_axis, at.reshape(shape).expand(x.shape))


@op("TensorScatter", since=24)
def tensor_scatter(
    cache: Tensor, update: Tensor, start: Tensor | None = None, *, axis: int = -2, mode: str = "linear"
) -> Tensor:
    """Write a run of steps into a cache at each sample's own position."""
    axis = axis + cache.dim() if axis < 0 else axis
    steps = torch.arange(update.shape[axis], device=cache.device)
    first = torch.zeros(cache.shape[0], dtype=torch.int64, device=cache.device) if start is None else start
    at = first.to(torch.int64).unsqueeze(1) + steps
    if mode == "circular":
        at = torch.remainder(at, cache.shape[axis])
    shape = [1] * cache.dim()
    shape[0], shape[axis] = at.shape[0], at.shape[1]
    return cache.scatter(axis, at.reshape(shape).expand(update.shape), update)


@op("Det", since=11)
def det(x: Tensor) -> Tensor:
    """Determinants of the last two dims."""
    return torch.linalg.det(x)


@op("Col2Im", since=18, host=(1, 2))
def col2im(
    x: Tensor,
    image: Host,
    block: Host,
    *,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Sum columns of blocks back into an image of any rank."""
    sizes, kernel = image.ints(), block.ints()
    rank = len(sizes)
    steps = list(strides) if strides else [1] * rank
    gaps = list(dilations) if dilations else [1] * rank
    border = list(pads) if pads else [0] * (2 * rank)
    full = [sizes[i] + border[i] + border[rank + i] for i in range(rank)]
    flat: Tensor | None = None
    for i in range(rank):
        count = (full[i] - (kernel[i] - 1) * gaps[i] - 1) // steps[i] + 1
        taps = torch.arange(kernel[i], device=x.device) * gaps[i]
        at = taps.unsqueeze(1) + torch.arange(count, device=x.device) * steps[i]
        if flat is None:
            flat = at
        else:
            flat = (flat.unsqueeze(1).unsqueeze(3) * full[i] + at.unsqueeze(0).unsqueeze(2)).reshape(
                flat.shape[0] * at.shape[0], flat.shape[1] * at.shape[1]
            )
    assert flat is not None
    n, channels = x.shape[0], x.shape[1] // flat.shape[0]
    total = 1
    for d in full:
        total = total * d
    parts = x.reshape(n, channels, -1)
    at = flat.reshape(1, 1, -1).expand(n, channels, -1)
    y = torch.zeros(n, channels, total, dtype=x.dtype, device=x.device).scatter_add(2, at, parts)
    y = y.reshape(n, channels, *full)
    for i in range(rank):
        y = y.narrow(2 + i, border[i], sizes[i])
    return y


@op("ArrayFeatureExtractor", domain="ai.onnx.ml")
def array_feature_extractor(x: Tensor, index: Tensor) -> Tensor:
    """Pick along the last axis."""
    return x.index_select(-1, index.reshape(-1))


@op("Binarizer", domain="ai.onnx.ml")
def binarizer(x: Tensor, *, threshold: float = 0.0) -> Tensor:
    """One where x exceeds the threshold, else zero."""
    return (x > threshold).to(x.dtype)
