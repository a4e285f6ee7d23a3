"""Models that take sequences and optionals: their inputs as flat tensors, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .split import ModelSegment, Split


@dataclass(frozen=True)
class Nesting:
    """How flat tensors nest in inputs: `spec` is the nesting, `present` says which of its leaves are tensors (the
    others are absent optionals), `owners` to which input each tensor belongs."""

    spec: pytree.TreeSpec
    present: tuple[bool, ...]
    owners: tuple[int, ...]

    def rebuild(self, tensors: Sequence[Tensor]) -> tuple[object, ...]:
        """The inputs again."""
        left = iter(tensors)
        return pytree.tree_unflatten([next(left) if there else None for there in self.present], self.spec)


def flatten_inputs(inputs: Sequence[object]) -> tuple[list[Tensor], Nesting]:
    """The tensors in `inputs` (tensors, lists of them, None), and how they nest there."""
    tensors: list[Tensor] = []
    owners: list[int] = []
    present: list[bool] = []
    for k, given in enumerate(inputs):
        for leaf in pytree.tree_leaves(given):
            present.append(isinstance(leaf, Tensor))
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
                owners.append(k)
    spec = pytree.tree_structure(tuple(inputs))
    return tensors, Nesting(spec, tuple(present), tuple(owners))


class Flat(torch.nn.Module):
    """`module` as a module of flat tensors."""

    def __init__(self, module: torch.nn.Module, nesting: Nesting) -> None:
        super().__init__()
        self.module = module
        self.nesting = nesting

    def forward(self, *tensors: Tensor) -> object:
        """What `module` returns."""
        return self.module(*self.nesting.rebuild(tensors))


class FlatSplit:
    """`cut` as a model of flat tensors."""

    def __init__(self, cut: Split, nesting: Nesting) -> None:
        self.cut = cut
        self.nesting = nesting

    @property
    def segments(self) -> Sequence[ModelSegment]:
        """Those of `cut`."""
        return self.cut.segments

    def run(self, inputs: Sequence[Tensor], calls: Sequence[Callable[..., object]]) -> tuple[Tensor, ...]:
        """The outputs of the model."""
        return self.cut.run(self.nesting.rebuild(inputs), calls)
