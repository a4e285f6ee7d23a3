"""Ops over lists of tensors, as ops over each: a step of an optimizer is kernels then, and no pass over memory for each
op. Torch has such a form of each, for devices without a faster one. And ops with a number that a program may change
from call to call, such as a learning rate."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
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
    # Torch's form of this one copies the tensors and writes into the copies, which is not functional.
    found[torch.ops.aten._foreach_zero.default] = _zeros
    return found


def _zeros(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) for x in tensors]


def free_number_decompositions() -> dict[OpOverload, Callable[..., object]]:
    """Ops with a float that is free (a learning rate that has changed), as ops of which torch knows how to make a
    tensor of it; of others it makes a constant, and another value compiles anew. Others stay as they are."""
    aten = torch.ops.aten
    pairs = {op: getattr(aten, op) for op in ("add", "sub", "mul", "div")}
    found: dict[OpOverload, Callable[..., object]] = {
        packet.Scalar: partial(_by_tensor, packet.Tensor) for packet in pairs.values()
    }
    found |= {pairs[op].Tensor: partial(_by_product, pairs[op].Tensor) for op in ("add", "sub")}
    return found | {aten.addcmul.default: _added_product, aten.addcdiv.default: _added_quotient}


def _by_tensor(op: OpOverload, x: Tensor, y: object, *alpha: object) -> object:
    if not _is_free(y, *alpha):
        return NotImplemented
    return op(x, y, alpha=alpha[0]) if alpha else op(x, y)


def _by_product(op: OpOverload, x: object, y: object, *, alpha: object = 1) -> object:
    return op(x, torch.ops.aten.mul.Tensor(y, alpha)) if _is_free(alpha) else NotImplemented


def _added_product(x: Tensor, y: Tensor, z: Tensor, *, value: object = 1) -> object:
    mul = torch.ops.aten.mul.Tensor
    return torch.ops.aten.add.Tensor(x, mul(mul(y, value), z)) if _is_free(value) else NotImplemented


def _added_quotient(x: Tensor, y: Tensor, z: Tensor, *, value: object = 1) -> object:
    quotient = torch.ops.aten.div.Tensor(y, z) if _is_free(value) else y
    return _by_product(torch.ops.aten.add.Tensor, x, quotient, alpha=value)


def _is_free(*numbers: object) -> bool:
    return any(isinstance(n, torch.SymFloat) for n in numbers)
