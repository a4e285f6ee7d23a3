"""Ops over lists of tensors, as ops over each: a step of an optimizer is kernels then, and no pass over memory for each
op. Torch has such a form of each, for devices without a faster one."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch._C import DispatchKey, _dispatch_get_all_op_names
from torch._ops import OpOverload

_PREFIX = "aten::_foreach_"


def foreach_decompositions() -> dict[OpOverload, Callable[..., object]]:
    """For each op over lists that makes new tensors, what takes it apart."""
    found: dict[OpOverload, Callable[..., object]] = {}
    for name in filter(lambda name: name.startswith(_PREFIX), _dispatch_get_all_op_names()):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
        if not isinstance(op, OpOverload) or op._schema.is_mutable:
            continue
        if op.has_kernel_for_dispatch_key(DispatchKey.CompositeExplicitAutograd):
            found[op] = partial(op._op_dk, DispatchKey.CompositeExplicitAutograd)
    return found
