"""Ops that write their result over their first operand, and what only computes it."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

IN_PLACE: dict[object, Callable[..., object]] = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv, operator.ifloordiv: operator.floordiv, operator.imod: operator.mod,
    operator.ipow: operator.pow, operator.iand: operator.and_, operator.ior: operator.or_, operator.ixor: operator.xor,
    "add_": torch.add, "sub_": torch.sub, "mul_": torch.mul, "div_": torch.div, "pow_": torch.pow,
    "remainder_": torch.remainder, "fmod_": torch.fmod, "addmm_": torch.addmm, "baddbmm_": torch.baddbmm,
    "addcmul_": torch.addcmul, "addcdiv_": torch.addcdiv, "lerp_": torch.lerp, "clamp_": torch.clamp,
    "clamp_min_": torch.clamp_min, "clamp_max_": torch.clamp_max, "masked_fill_": torch.masked_fill,
    "fill_": torch.full_like,
}  # fmt: skip
"""What writes its result over its first operand, and what only computes it."""


def writes_apart(node: fx.Node) -> bool:
    """Whether a node writes over its first operand what can be computed apart: by an op of these, or a copy."""
    if node.target in ("copy_", "fill_"):
        return len(node.args) > 1 and (node.target == "copy_") == isinstance(node.args[1], fx.Node)
    return node.target in IN_PLACE
