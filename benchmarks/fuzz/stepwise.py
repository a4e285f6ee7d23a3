"""A program as machines would run it that round each step correctly: of halves, torch's own kernels do not.

On CPUs eager rounds the 0.2 of `x + 0.2` to a half before it adds, and is lucky where the sum then lies midway between
two. A result is no worse than it has to be if it errs no more, by the same rule, than steps that round correctly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from benchmarks.fuzz.outcome import Outcome, ran

HALVES = (torch.float16, torch.bfloat16)


def has_halves(source: str, inputs: Sequence[Tensor]) -> bool:
    """Whether a program works on halves."""
    return any(x.dtype in HALVES for x in inputs) or "float16" in source


def ran_stepwise(
    forward: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], *, training: bool, draw: int
) -> Outcome:
    """One run in which each step on halves is computed in doubles and rounded once."""
    with _Stepwise():
        return ran(forward, inputs, training=training, draw=draw)


class _Stepwise(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:  # fmt: skip
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        views = any(r.alias_info is not None for r in func._schema.returns)
        if views or "dtype" in kwargs or not any(x.dtype in HALVES for x in given):
            return made
        wide = tree_map_only(Tensor, lambda x: x.double() if x.dtype in HALVES else x, (args, kwargs))
        try:
            exact = func(*wide[0], **wide[1])
        except RuntimeError:
            return made  # a kernel that takes no doubles
        return tree_map(lambda x, e: e.to(x.dtype) if _is_half(x) else x, made, exact)


def _is_half(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype in HALVES
