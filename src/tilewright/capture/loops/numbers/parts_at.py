"""Parts of tensors, taken and written at places that are arguments: numbers, or tensors without dims where the places
change with the step of a loop.

`index` says per dim what is taken: all (a full slice or another plain one), a new dim (None), or a part at the next of
the places: 0 takes the dim away, more is the length of a part that is left."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .twins import Number, Twin

Index = tuple[object, ...]
_Cut = tuple[int, Number, int]
"""A dim, where the part of it begins, and its length; 0: one, without the dim."""


def take_at(base: Tensor, index: Index, at: Sequence[Number], *, kind: torch.dtype | None = None) -> Tensor:
    """A part of `base`: a view, or a copy if a place is a tensor."""
    part, cuts = _cut(base, index, at)
    for dim, place, length in reversed(cuts):
        part = _one(part.index_select(dim, _places(place, length)), dim, length)
    return part


def put_at(
    base: Tensor, index: Index, at: Sequence[Number], value: Tensor, *, kind: torch.dtype | None = None
) -> Tensor:
    """`base`, with `value` written into a part of it."""
    part, cuts = _cut(base, index, at)
    _put(part, cuts, value)
    return base


def _put(whole: Tensor, cuts: Sequence[_Cut], value: Tensor) -> None:
    """Write `value` where all these cuts meet; they are in the order of their dims."""
    if not cuts:
        whole.copy_(value)
        return
    *others, (dim, place, length) = cuts
    places = _places(place, length)
    part = whole.index_select(dim, places)
    _put(_one(part, dim, length), others, value)
    whole.index_copy_(dim, places, part)


def _cut(base: Tensor, index: Index, at: Sequence[Number]) -> tuple[Tensor, list[_Cut]]:
    """The part with all of the dims whose places are tensors, and how these are cut: dims in ascending order."""
    plain: list[object] = []
    cuts: list[_Cut] = []
    places = iter(at)
    for how in index:
        if type(how) is not int:
            plain.append(how)
            continue
        place = next(places)
        if isinstance(place, Tensor):
            cuts.append((sum(type(x) is not int for x in plain), place, how))
            plain.append(slice(None))
        else:
            assert isinstance(place, int)
            plain.append(slice(place, place + how) if how else place)
    return base[tuple(plain)], cuts  # pyright: ignore[reportArgumentType]


def _places(place: Number, length: int) -> Tensor:
    assert isinstance(place, Tensor)
    return place.reshape(1) if length < 2 else place + torch.arange(length, device=place.device)


def _one(part: Tensor, dim: int, length: int) -> Tensor:
    return part if length else part.squeeze(dim)


def _select_scatter(input: Tensor, src: Tensor, dim: int, index: Number, *, kind: torch.dtype) -> Tensor:
    return input.index_copy(dim, _within(index, input.shape[dim]).reshape(1), src.to(kind).unsqueeze(dim))


def _slice_scatter(
    input: Tensor, src: Tensor, dim: int = 0, start: Number | None = None, end: Number | None = None, step: int = 1,
    *, kind: torch.dtype,
) -> Tensor:  # fmt: skip
    if not isinstance(start, Tensor):
        raise ValueError("a part that ends at a place that changes, and begins at one that does not")
    places = _within(start, input.shape[dim]) + torch.arange(src.shape[dim], device=input.device) * step
    return input.index_copy(dim, places, src.to(kind))


def _within(place: Number, size: int) -> Tensor:
    """A place in a dim, counted from its beginning."""
    assert isinstance(place, Tensor)
    return torch.where(place < 0, place + size, place).clamp(min=0)


PARTS: dict[object, Twin] = {
    take_at: Twin(take_at, ("at",)),
    put_at: Twin(put_at, ("at",)),
    torch.select_scatter: Twin(_select_scatter, ("index",)),
    "select_scatter": Twin(_select_scatter, ("index",)),
    torch.slice_scatter: Twin(_slice_scatter, ("start", "end")),
    "slice_scatter": Twin(_slice_scatter, ("start", "end")),
}
"""By what a node calls."""
