"""Where tensors lie in memory: their strides, and those that torch's tracing promises for a program's results.

Some kernels of eager torch give other strides than torch's own fake kernels say. A traced program can only keep the
promise, so results are as they should be if their strides are eager's or the promised ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map


def strides(t: Tensor) -> list[int]:
    """Those of a tensor that say anything: of dims longer than 1, none of an empty tensor."""
    return [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] if t.numel() else []


def promised(call: Callable[..., object], *args: object) -> list[list[int]]:
    """The strides of the tensors in a result, by torch's fake kernels; none if those cannot tell."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, args)
    try:
        with mode:
            return [strides(t) for t in tree_leaves(call(*fakes)) if isinstance(t, Tensor)]
    except Exception:  # noqa: BLE001  what has no fake kernel promises nothing
        return []


class DeviceLost(RuntimeError):
    """A kernel broke the device's context: nothing runs in this process any more, nobody's programs."""


def blame(error: BaseException, whose: str = "") -> None:
    """Raise DeviceLost if the `error` of `whose` program (ours if nothing is said) left the device unusable: then what
    torch does after it says nothing."""
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as lost:
        text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        raise DeviceLost(f"{whose}: {text}" if whose else text) from lost


def settle() -> None:
    """Wait for the device, so that what went wrong on it is told now."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
