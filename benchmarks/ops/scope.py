"""Which of torch's operator infos are taken, what kind each is, and what is left out and why."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

OpInfo = Any
"""An entry of torch's `op_db`; its class is not public."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)

FUNCTIONAL: Mapping[str, str] = {
    "nn.functional.pad": "reflection_pad2d",
    "nn.functional.interpolate": "upsample_bilinear2d",
    "nn.functional.upsample_nearest": "upsample_nearest2d",
    "nn.functional.upsample_bilinear": "upsample_bilinear2d",
    "nn.functional.conv1d": "convolution",
    "nn.functional.conv2d": "convolution",
    "nn.functional.conv3d": "convolution",
    "nn.functional.conv_transpose1d": "convolution",
    "nn.functional.conv_transpose2d": "convolution",
    "nn.functional.conv_transpose3d": "convolution",
    "nn.functional.max_pool1d": "max_pool2d_with_indices",
    "nn.functional.max_pool2d": "max_pool2d_with_indices",
    "nn.functional.max_pool3d": "max_pool3d_with_indices",
    "nn.functional.fold": "col2im",
    "nn.functional.group_norm": "native_group_norm",
    "nn.functional.layer_norm": "native_layer_norm",
    "nn.functional.batch_norm": "_native_batch_norm_legit",
    "nn.functional.linear": "addmm",
    "nn.functional.pdist": "_pdist_forward",
    "__getitem__": "index",
    "cdist": "_cdist_forward",
    "matmul": "mm",
    "einsum": "bmm",
    "var_mean": "var",
    "std": "var",
    "nn.functional.embedding_bag": "_embedding_bag",
}
"""Functions that are a core op under a name that shows no sign of it."""

UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Ops whose result has no defined elements."""

KINDS: Mapping[str, Sequence[str]] = {
    "product": (
        "addbmm addmm addmm.decomposed addmv addr baddbmm bmm dot einsum matmul mm mv nn.functional.bilinear "
        "nn.functional.linear vdot inner outer __rmatmul__ tensordot ger linalg.multi_dot kron chain_matmul"
    ).split(),
    "reduction": (
        "sum mean amax amin aminmax all any argmax argmin cumsum cumprod cummax cummin logcumsumexp logsumexp "
        "max.reduction_no_dim max.reduction_with_dim min.reduction_no_dim min.reduction_with_dim norm "
        "norm.fro norm.inf prod softmax softmax.with_dtype log_softmax log_softmax.with_dtype std std_mean "
        "std.unbiased var var_mean var.unbiased count_nonzero nn.functional.softmin native_layer_norm "
        "nn.functional.layer_norm nn.functional.group_norm nn.functional.rms_norm nn.functional.avg_pool1d "
        "nn.functional.avg_pool2d nn.functional.avg_pool3d nn.functional.adaptive_avg_pool1d "
        "nn.functional.adaptive_avg_pool2d nn.functional.adaptive_avg_pool3d nn.functional.batch_norm "
        "native_batch_norm _native_batch_norm_legit linalg.vector_norm"
    ).split(),
    "view": (
        "alias_copy as_strided as_strided_copy as_strided.partial_views broadcast_to broadcast_tensors cat "
        "chunk clone contiguous constant_pad_nd diagonal diagonal_copy expand expand_as expand_copy flatten "
        "flip movedim narrow permute permute_copy repeat reshape reshape_as roll rot90 select slice split "
        "split_list_args split_with_sizes squeeze squeeze.multiple squeeze_copy stack t t_copy tile transpose "
        "transpose_copy unbind unfold unfold_copy unsqueeze unsqueeze_copy view view_as view_copy swapaxes T "
        "mT nn.functional.pad.constant select_scatter slice_scatter diagonal_scatter"
    ).split(),
    "pointwise": (
        "where clamp clamp_max clamp_min lerp addcmul addcdiv full_like ones_like zeros_like masked_fill tril "
        "triu fill nn.functional.gelu nn.functional.glu nn.functional.hardtanh nn.functional.leaky_relu "
        "nn.functional.relu nn.functional.elu nn.functional.silu sigmoid type_as to full arange eye zeros "
        "ones new_full new_ones new_zeros isclose"
    ).split(),
}
"""What an entry of a class that says nothing computes."""


@functools.cache
def operators() -> tuple[OpInfo, ...]:
    """Torch's `op_db`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return tuple(op_db)


@functools.cache
def core_names() -> frozenset[str]:
    """Names of the ATen ops that torch tags as core."""
    found: set[str] = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
        if any(torch.Tag.core in getattr(packet, o).tags for o in overloads):
            found.add(name)
    return frozenset(found)


def is_core(op: OpInfo) -> bool:
    """Whether an entry is about a core op, by its name, or one that has its private name or a form of it."""
    names = {op.name, op.name.split(".")[-1], op.aten_name, FUNCTIONAL.get(op.name, op.name)}
    return bool(names & core_names() or {f"_{n}" for n in names} & core_names())


def excluded(op: OpInfo) -> str:
    """Why no sample of an entry can be judged; empty if they can."""
    if op.name in UNDEFINED:
        return "its elements are not defined"
    return "" if any(op.supports_dtype(d, "cpu") for d in DTYPES) else "none of the judged types"


def kind(op: OpInfo) -> str:
    """pointwise, reduction, view, product or other."""
    for word, names in KINDS.items():
        if op.full_name in names or op.name in names:
            return word
    declared = {"UnaryUfuncInfo": "pointwise", "BinaryUfuncInfo": "pointwise", "ReductionOpInfo": "reduction"}
    return declared.get(type(op).__name__, "other")


def chosen(scope: str, words: str) -> list[OpInfo]:
    """The entries named in `words` (by comma), else those of the scope `core` or `all`; sorted by name."""
    wanted = {w for w in words.split(",") if w}
    taken = [
        op
        for op in operators()
        if (op.full_name in wanted or op.name in wanted if wanted else scope == "all" or is_core(op))
    ]
    return sorted(taken, key=lambda op: op.full_name)
