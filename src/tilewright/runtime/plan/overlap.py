"""Whether an input that a plan writes shares elements with another one of a call.

Torch's guards tell inputs that overlap when a program is compiled; where they overlap in a later call only, what was
compiled would go on with old elements.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilewright.errors import InputError
from tilewright.plan import Plan

STATIC = "_dynamo_static_input_type"
"""Torch's mark of parameters and buffers, whose memory does not change from call to call."""


def given_anew(plan: Plan, args: Sequence[object]) -> tuple[int, ...]:
    """The inputs that the plan writes, as far as they are given anew in each call."""
    return tuple(
        k for k in plan.written if isinstance(args[k], Tensor) and getattr(args[k], STATIC, None) is None
    )


def check_written(written: Sequence[int], args: Sequence[object]) -> None:
    """Raise InputError if one of the inputs that are `written` surely shares elements with another input."""
    for k in written:
        t = args[k]
        if not isinstance(t, Tensor):
            continue
        storage = t.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
        for j, other in enumerate(args):
            if j == k or not isinstance(other, Tensor):
                continue
            same = other.untyped_storage()._cdata == storage  # pyright: ignore[reportPrivateUsage]
            if same and share_elements(t, other):
                raise InputError(
                    f"input {k}, which the program writes, shares memory with input {j}", phase="input",
                    place=f"input {k}", hint="it was compiled for inputs apart: give one of them as a `clone()`",
                )  # fmt: skip


def share_elements(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage surely have an element in common.

    Elements i of a and j of b are one if b's offset - a's = sum of (i_d - j_d) * stride_d. With equal strides, each as
    large as all that lies inside it, at most two differences of each dim come near. Of other tensors only those are
    known that begin at one place."""
    if not a.numel() or not b.numel():
        return False
    if a.storage_offset() == b.storage_offset():
        return True
    if a.stride() != b.stride() or a.element_size() != b.element_size():
        return False
    dims = sorted(
        (s, m, n) for s, m, n in zip(a.stride(), a.shape, b.shape, strict=True) if s > 0 and (m > 1 or n > 1)
    )
    return _reached(int(b.storage_offset()) - int(a.storage_offset()), dims)


def _reached(distance: int, dims: Sequence[tuple[int, int, int]]) -> bool:
    """Whether steps of these strides, from -(n - 1) to m - 1 of each, make up a distance."""
    if not dims:
        return distance == 0
    *inner, (stride, m, n) = dims
    near = {distance // stride, -(-distance // stride)}
    return any(-(n - 1) <= k <= m - 1 and _reached(distance - k * stride, inner) for k in near)
