"""A tensor with some of its elements replaced, where no kernel stores them in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.ir.expr import Expr
from tilewright.ir.graph import LibraryCall, Operand, Routine


def part_call(starts: Sequence[Expr], strides: Sequence[Expr]) -> LibraryCall:
    """Operand 0, which has these strides, with operand 1 in place of its elements from `starts` on."""
    at = tuple(starts)
    return LibraryCall(
        "part", Replaced(), (Operand(0), Operand(1), at), strides=(tuple(strides),), reason="part", reuses=-1,
        own=True, part=at,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Replaced(Routine):
    """A copy that lies as the tensor does, with other elements from some places on."""

    def bind(self) -> Callable[[Tensor, Tensor, Sequence[int]], Tensor]:
        """What runs."""
        return _replaced


def _replaced(whole: Tensor, lines: Tensor, starts: Sequence[int]) -> Tensor:
    made = torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype, device=whole.device)
    made.copy_(whole)
    shown = made
    for d, (start, size) in enumerate(zip(starts, lines.shape, strict=True)):
        shown = shown.narrow(d, start, size)
    shown.copy_(lines)
    return made
