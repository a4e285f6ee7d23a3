"""Ops that write their result over their first operand, and what only computes it."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

IN_PLACE: dict[object, Callable[..., object]] = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv, operator.ifloordiv: operator.floordiv, operator.imod: operator.mod,
    operator.ipow: operator.pow, operator.iand: operator.and_, operator.ior: operator.or_, operator.ixor: operator.xor,
    "add_": torch.add, "sub_": torch.sub, "mul_": torch.mul, "div_": torch.div,
    "addcmul_": torch.addcmul, "addcdiv_": torch.addcdiv, "lerp_": torch.lerp, "clamp_": torch.clamp,
}  # fmt: skip
"""What writes its result over its first operand, and what only computes it."""
