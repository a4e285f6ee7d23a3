"""Masks laid so that a traced program gets the fused routines of the library."""

from __future__ import annotations

import torch
from torch import Tensor, fx


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
