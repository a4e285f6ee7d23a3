"""Sequences (python lists of tensors) and optionals (None or a value)."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.capture.onnx.registry import op
from tilewright.capture.onnx.values.run import Host, scalar, torch_dtype
from tilewright.errors import ModelError


def _at(index: Host | None, size: int, default: int) -> int:
    place = default if index is None else int(index.int())
    place = place + size if place < 0 else place
    if not 0 <= place <= size:
        raise ModelError(f"position {place} in a sequence of {size}", phase="capture", op="Sequence")
    return place


@op("SequenceConstruct", since=11)
def sequence_construct(*xs: Tensor) -> list[Tensor]:
    """A sequence of the inputs."""
    return list(xs)


@op("SequenceEmpty", since=11, pure=False)
def sequence_empty(*, dtype: int = 1) -> list[Tensor]:
    """A sequence without elements."""
    torch_dtype(dtype)
    return []


@op("SequenceAt", since=11, host=(1,))
def sequence_at(xs: list[Tensor], index: Host) -> Tensor:
    """One element."""
    return xs[_at(index, len(xs), 0)]


@op("SequenceInsert", since=11, host=(2,))
def sequence_insert(xs: list[Tensor], x: Tensor, index: Host | None = None) -> list[Tensor]:
    """A copy with one more element, at the end by default."""
    place = _at(index, len(xs), len(xs))
    return [*xs[:place], x, *xs[place:]]


@op("SequenceErase", since=11, host=(1,))
def sequence_erase(xs: list[Tensor], index: Host | None = None) -> list[Tensor]:
    """A copy with one element less, the last by default."""
    place = _at(index, len(xs), len(xs) - 1)
    return [*xs[:place], *xs[place + 1 :]]


@op("SequenceLength", since=11, gives_host=True)
def sequence_length(xs: list[Tensor]) -> Host:
    """Number of elements, a host integer."""
    return scalar(len(xs))


@op("ConcatFromSequence", since=11)
def concat_from_sequence(xs: list[Tensor], *, axis: int, new_axis: int = 0) -> Tensor:
    """Join or stack the elements."""
    return torch.stack(xs, axis) if new_axis else torch.cat(xs, axis)


@op("SplitToSequence", since=11, host=(1,))
def split_to_sequence(
    x: Tensor, split: Host | None = None, *, axis: int = 0, keepdims: int = 1
) -> list[Tensor]:
    """Cut along an axis into a sequence."""
    if split is None:
        parts = torch.split(x, 1, axis)
        return list(parts) if keepdims else [p.squeeze(axis) for p in parts]
    if split.rank == 0:
        return list(torch.split(x, split.int(), axis))
    return list(torch.split(x, split.ints(), axis))


@op("Optional", since=15, pure=False)
def optional(x: object = None, *, type: object = None) -> object:
    """A value that may be absent."""
    return x


@op("OptionalHasElement", since=15, gives_host=True, pure=False)
def optional_has_element(x: object = None) -> Host:
    """Whether the value is present."""
    return scalar(x is not None, torch.bool)


@op("OptionalGetElement", since=15, pure=False)
def optional_get_element(x: object) -> object:
    """The value; an error if it is absent."""
    if x is None:
        raise ModelError("the optional is empty", phase="capture", op="OptionalGetElement")
    return x
