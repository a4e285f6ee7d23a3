"""How inputs lie in memory, and in which types a program is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Precision:
    """Under autocast to `dtype` (None: without), with losses multiplied by `scale` for the backward pass. `k` is the
    rule's, None for the default of the type."""

    dtype: torch.dtype | None = None
    scale: float = 1.0
    k: float | None = None

    def around(self, device: str) -> AbstractContextManager[object]:
        """The context in which the forward pass runs."""
        return nullcontext() if self.dtype is None else torch.autocast(torch.device(device).type, self.dtype)


PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(),
    "bf16": Precision(torch.bfloat16, k=3.0),
    "fp16": Precision(torch.float16, scale=128.0, k=3.0),
}


def _channels_last(t: Tensor) -> Tensor:
    """The dim at 1 last in memory; matrices by columns."""
    if t.dim() < 2:
        return t
    return t.movedim(1, -1).contiguous().movedim(-1, 1) if t.dim() > 2 else t.t().contiguous().t()


def _strided(t: Tensor) -> Tensor:
    """Every second element of a larger tensor."""
    if not t.dim():
        return t
    room = t.new_zeros(*t.shape[:-1], 2 * t.shape[-1] + 1)
    view = room[..., 1::2]
    view.copy_(t)
    return view


def _expanded(t: Tensor) -> Tensor:
    """The first of dim 0 for all of it, in one place of memory."""
    return t[:1].expand_as(t) if t.dim() else t


def _offset(t: Tensor) -> Tensor:
    """In the middle of a storage, three elements from its start."""
    room = t.new_zeros(t.numel() + 5)
    view = room[3 : 3 + t.numel()].view(t.shape)
    view.copy_(t)
    return view


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "channels-last": _channels_last,
    "strided": _strided,
    "expanded": _expanded,
    "offset": _offset,
}
