"""Fused routines of the library: as calls for what a region computes, and so that a traced program gets them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.ir.expr import Expr
from tilewright.ir.graph import Attention, LibraryCall, Operand
from tilewright.ir.sizes import dims

FASTEST = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
"""Torch's ways to do attention, the first that can serve is taken. The file
benchmarks/results/h200/attention_4096.json has the first two side by side."""


def fused_call(task: Attention, shape: Sequence[Expr], order: Sequence[int]) -> LibraryCall:
    """Torch's fused attention as a dense result of `shape`: `order` says which of its dims are batch, heads, queries
    and depth (-1: it has no such dim)."""
    ranked = sorted(range(len(order)), key=lambda k: order[k])
    sizes = [n for s in shape if (n := dims.static(s)) is not None]
    assert len(sizes) == len(shape), "sizes are numbers"

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(FASTEST, set_priority=True):
            made = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=task.causal, scale=task.scale
            )
        return made.permute(ranked).reshape(sizes).contiguous()

    operands, strides = tuple(Operand(k) for k in range(3)), dims.dense_strides(tuple(shape))
    return LibraryCall(
        "scaled_dot_product_attention", attention, operands, strides=(strides,), reason="attention", reuses=-1
    )


def lay_masks(gm: fx.GraphModule) -> None:
    """Lay masks of attention whose keys do not lie side by side (a broadcast leaves them so) densely, on a GPU. The
    fused routines there take no others: what torch takes instead saves all scores for the backward pass."""
    laid = False
    for node in gm.graph.find_nodes(
        op="call_function", target=torch.nn.functional.scaled_dot_product_attention
    ):
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node) or not _lies_apart(mask.meta.get("example_value")):
            continue
        with gm.graph.inserting_before(node):
            dense = gm.graph.call_method("contiguous", (mask,))
        node.replace_input_with(mask, dense)
        laid = True
    if laid:
        gm.recompile()


def _lies_apart(mask: object) -> bool:
    """Whether keys of a mask on a GPU are known not to lie side by side. Of a free size nothing is asked: that would be
    a guard."""
    if not isinstance(mask, Tensor) or mask.device.type == "cpu" or not mask.dim():
        return False
    step = mask.stride(-1)
    return not isinstance(step, torch.SymInt) and step != 1
