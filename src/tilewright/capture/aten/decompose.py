"""Which composites torch takes apart before capture: those of the core ATen set, without the ones kept whole for us."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._decomp import core_aten_decompositions
from torch._decomp.decompositions import upsample_compute_output_size

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


Kernels = dict[torch._C.DispatchKey, Callable[..., object]]
_KEYS = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)


@contextmanager
def kept_whole() -> Iterator[None]:
    """While active, AOTAutograd's tracing leaves resampling ops whole. Torch takes them apart by Python kernels of the
    dispatcher, before any decomposition table is asked; export does not need this."""
    taken: list[tuple[torch._ops.OpOverload, Kernels]] = []
    for overload in TABLE:
        if (
            not isinstance(overload, torch._ops.OpOverload)
            or "upsample" not in overload.overloadpacket.__name__
        ):
            continue
        taken.append((overload, {k: overload.py_kernels.pop(k) for k in _KEYS if k in overload.py_kernels}))
        if overload._overloadname == "vec":
            overload.py_kernels.update(dict.fromkeys(_KEYS, _by_size(overload)))
        overload._dispatch_cache.clear()
    try:
        yield
    finally:
        for overload, kernels in taken:
            for key in _KEYS:
                overload.py_kernels.pop(key, None)
            overload.py_kernels.update(kernels)
            overload._dispatch_cache.clear()


def _by_size(overload: torch._ops.OpOverload) -> Callable[..., object]:
    """A resampling op given a list of scale factors, as the form that takes sizes and one scale per dim."""
    plain = overload.overloadpacket.default

    def redirect(x: torch.Tensor, size: list[int] | None, *rest: object) -> object:
        *how, factors = rest
        assert factors is None or isinstance(factors, (list, tuple))
        target = upsample_compute_output_size(x.size(), size, factors)
        return plain(x, target, *how, *(factors or [None] * len(target)))

    return redirect
