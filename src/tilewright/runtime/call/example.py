"""The form of a call: how its arguments nest, and what each tensor is like, without the tensors themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class TensorLike:
    """What an example of a tensor must be."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self, shape: Sequence[int] | None = None) -> Tensor:
        """A tensor like this one; dense if it is of another shape."""
        if shape is None or tuple(shape) == self.shape:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device).zero_()
        return torch.zeros(tuple(shape), dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Example:
    """Flat arguments, tensors among them as what they are like, and how they nest."""

    leaves: tuple[object, ...]
    spec: pytree.TreeSpec

    def sizes(self) -> tuple[tuple[int, ...] | None, ...]:
        """The shape of each flat argument that is a tensor."""
        return tuple(x.shape if isinstance(x, TensorLike) else None for x in self.leaves)


def example_of(args: Sequence[object], kwargs: Mapping[str, object]) -> Example:
    """The form of a call."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return Example(tuple(_like(x) for x in leaves), spec)


def _like(x: object) -> object:
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
        return x
    return TensorLike(tuple(x.shape), x.stride(), x.dtype, x.device)
