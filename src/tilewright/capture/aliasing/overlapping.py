"""Writes into tensors that overlap with themselves, or into windows with gaps: eager mode runs the program, since no
value of such a tensor stands for its memory.

Torch makes a program functional by giving each write a new value, and scatters that value back over the memory. Where
two elements lie in one place it is not said which of them stays: windows of a row, `as_strided` with small strides,
inputs that are expanded. And of windows of a row (`unfold`) it takes all elements that none of them holds for zeros."""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from tilewright.capture.loops.leaving import memories_of, overlaps, seen_to_write
from tilewright.capture.loops.nodes import val_of
from tilewright.errors import UnsupportedError


class OverlappingWrite(UnsupportedError):
    """A write into such a tensor."""


_SEVERAL = "a tensor of which several elements lie in one place"
_GAPS = "windows that leave elements out"


def refuse_overlapping_writes(gm: fx.GraphModule) -> None:
    """Raise OverlappingWrite if something writes into such a tensor or a view of it. Nodes carry examples of their
    values."""
    shown: dict[fx.Node, tuple[int, str]] = {}
    """What shows such a tensor's memory, and what is unclear about it."""
    for node in gm.graph.nodes:
        given = dict(shown[n] for n in node.all_input_nodes if n in shown)
        if given and node.op != "output" and seen_to_write(node, given):
            raise OverlappingWrite(
                f"a write into {next(iter(given.values()))}", phase="capture",
                op=str(node.target), place=str(node.meta.get("stack_trace", "")).strip().split("\n")[0],
                hint="write into a copy (`clone()`) of the tensor",
            )  # fmt: skip
        value = val_of(node)
        if isinstance(value, Tensor) and value.layout is torch.strided:
            memory = next(memories_of(value), None)
            why = given.get(memory) if memory is not None else None
            why = why or (
                _SEVERAL if _is_unclear(node, value) else _GAPS if _leaves_gaps(node, value) else None
            )
            if memory is not None and why is not None:
                shown[node] = memory, why


def _is_unclear(node: fx.Node, value: Tensor) -> bool:
    """Whether a tensor overlaps with itself in a way in which torch cannot make writes into it functional. (Expanded
    tensors that the program makes itself it can.)"""
    expanded = any(type(s) is int and s == 0 for s in value.stride())
    return overlaps(value) and (node.op == "placeholder" or not expanded)


_WINDOWS = ("unfold", torch.Tensor.unfold, torch.ops.aten.unfold.default)


def _leaves_gaps(node: fx.Node, value: Tensor) -> bool:
    """Whether these are windows that do not hold all elements, at the sizes that are known or were seen."""
    if node.op not in ("call_method", "call_function") or node.target not in _WINDOWS:
        return False
    whole = val_of(node.all_input_nodes[0])
    return not isinstance(whole, Tensor) or _count(whole) != _count(value)


def _count(t: Tensor) -> int | None:
    sizes = [n.node.hint if isinstance(n, torch.SymInt) else n for n in t.shape]
    return None if None in sizes else math.prod(sizes)
