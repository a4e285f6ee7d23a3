"""Declarations of torch's ops that are wrong in some of its versions, put right before anything is traced by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch._decomp import global_decomposition_table
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_impls import register_op_impl
from torch.torch_version import TorchVersion

COUNTS_FROM_THE_END = TorchVersion(torch.__version__) >= "2.13"
"""Whether the declaration of `vector_norm` is known to take dims counted from the end. In 2.11 it keeps such a dim
where its size is 1, although it is to go: programs were traced with other shapes than they have, under any backend.
(2.12 was not tried: dims counted from the start mean the same there too.)"""

_NORM: OpOverload = torch.ops.aten.linalg_vector_norm.default
Dims = int | Sequence[int] | None


def _from_the_start(x: Tensor, dim: Dims) -> Dims:
    if dim is None:
        return None
    return [d % max(1, x.dim()) if -x.dim() <= d < 0 else d for d in ([dim] if isinstance(dim, int) else dim)]


def vector_norm_counted(usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The declaration `usual` of `vector_norm`, which is only asked about dims counted from the start."""

    def declared(
        x: Tensor,
        ord: float = 2,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        return usual(x, ord, _from_the_start(x, dim), keepdim, dtype=dtype)

    return declared


def _fake_norm(mode: FakeTensorMode, func: OpOverload, x: Tensor, *rest: object, **named: object) -> object:
    """What torch asks before it takes its own declaration, for an order, dims and whether they are kept (`rest`)."""
    dim = cast(Dims, rest[1] if len(rest) > 1 else named.get("dim"))
    counted = _from_the_start(x, dim)
    if dim is None or counted == ([dim] if isinstance(dim, int) else list(dim)):
        return NotImplemented
    given = (rest[0], counted, *rest[2:]) if len(rest) > 1 else rest
    with mode:
        return func(x, *given, **(named | {"dim": counted} if "dim" in named else named))


def correct_declarations() -> None:
    """Put right what this version of torch declares wrongly."""
    if COUNTS_FROM_THE_END:
        return
    register_op_impl(_NORM)(_fake_norm)
    for table in global_decomposition_table.values():
        if _NORM in table:
            table[_NORM] = vector_norm_counted(table[_NORM])
    FakeTensorMode.cache_clear()  # another backend may have asked before
