"""Which composites torch takes apart before capture: those of the core ATen set, without the ones kept whole for us."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._decomp import core_aten_decompositions

from .registry import TABLE

Decompositions = dict[torch._ops.OperatorBase, Callable[..., object]]

_NOT_KEPT = (
    "aten.view.dtype", "aten.reshape.default", "aten.contiguous.default", "aten.to.dtype", "aten._reshape_alias.default",
)  # fmt: skip


def decompositions() -> Decompositions:
    """The table for AOTAutograd and for `ExportedProgram.run_decompositions`: core ATen, minus what has a declaration."""
    table = core_aten_decompositions()
    for overload in TABLE:
        if str(overload) not in _NOT_KEPT:
            table.pop(overload, None)
    return {k: v for k, v in table.items()}
