"""Traces for any size that stand for empty operands too. Torch takes an attention apart by the sizes at hand, into a
kernel that divides by how many queries there are; the composite looks at sizes when it runs."""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import Tensor, fx

aten = torch.ops.aten


def take_empty_operands(gm: fx.GraphModule) -> None:
    """Let the attentions of a graph be such whose operands may be empty."""
    changed = False
    for node in list(gm.graph.nodes):
        if node.target is aten._scaled_dot_product_flash_attention_for_cpu.default:
            changed |= _made_whole(node)
    if changed:
        gm.recompile()


def _made_whole(node: fx.Node) -> bool:
    """Replace an attention by the composite, if nobody reads its statistics."""
    results = [user for user in node.users if user.users]
    q, k, v, *others = node.args
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in results) or len(others) > 2:
        return False
    dropout, causal = (*others, *(node.kwargs.get(n, d) for n, d in _DEFAULTS[len(others) :]))
    mask, scale = node.kwargs.get("attn_mask"), node.kwargs.get("scale")
    heads = [cast(Tensor, cast(fx.Node, a).meta["val"]).shape[1] for a in (q, k)]
    with node.graph.inserting_before(node):
        made = node.graph.call_function(
            aten.scaled_dot_product_attention.default, (q, k, v, mask, dropout, causal),
            {"scale": scale, "enable_gqa": heads[0] is not heads[1] and bool(heads[0] != heads[1])},
        )  # fmt: skip
    made.meta = {**node.meta, "val": node.meta["val"][0]}
    for user in list(node.users):
        user.replace_all_uses_with(made)
        node.graph.erase_node(user)
    node.graph.erase_node(node)
    return True


_DEFAULTS = (("dropout_p", 0.0), ("is_causal", False))
