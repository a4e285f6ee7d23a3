"""Writes into tensors that overlap with themselves: eager mode runs the program, since no value of such a tensor stands
for its memory.

Torch makes a program functional by giving each write a new value, and scatters that value back over the memory. Where
two elements lie in one place it is not said which of them stays: windows of a row, `as_strided` with small strides,
inputs that are expanded."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from tilewright.capture.loops.leaving import memories_of, overlaps, seen_to_write
from tilewright.errors import UnsupportedError


class OverlappingWrite(UnsupportedError):
    """A write into such a tensor."""


def refuse_overlapping_writes(gm: fx.GraphModule) -> None:
    """Raise OverlappingWrite if something writes into such a tensor or a view of it. Nodes carry
    `meta["example_value"]`."""
    shown: dict[fx.Node, int] = {}
    """What shows such a tensor's memory."""
    for node in gm.graph.nodes:
        given = {shown[n] for n in node.all_input_nodes if n in shown}
        if given and node.op != "output" and seen_to_write(node, given):
            raise OverlappingWrite(
                "a write into a tensor of which several elements lie in one place", phase="capture",
                op=str(node.target), place=str(node.meta.get("stack_trace", "")).strip().split("\n")[0],
                hint="write into a copy (`clone()`) of the tensor",
            )  # fmt: skip
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and value.layout is torch.strided:
            memory = next(memories_of(value), None)
            if memory is not None and (memory in given or _is_unclear(node, value)):
                shown[node] = memory


def _is_unclear(node: fx.Node, value: Tensor) -> bool:
    """Whether a tensor overlaps with itself in a way in which torch cannot make writes into it functional. (Expanded
    tensors that the program makes itself it can.)"""
    expanded = any(type(s) is int and s == 0 for s in value.stride())
    return overlaps(value) and (node.op == "placeholder" or not expanded)
