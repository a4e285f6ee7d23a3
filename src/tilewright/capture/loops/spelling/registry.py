"""Graphs in ops of torch's registry, said as programs say it, which is how loops are recognised."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping

import torch
from torch import fx
from torch._ops import OpOverload

from tilewright.capture.loops.numbers.places import takes_numbers

aten = torch.ops.aten

_SPELLED: Mapping[object, Callable[..., object]] = {
    aten.stack.default: torch.stack, aten.cat.default: torch.cat, aten.unbind.int: torch.unbind,
    aten.split.Tensor: torch.split, aten.chunk.default: torch.chunk,
}  # fmt: skip
"""What collects steps and hands out their parts, as programs call it."""


def as_programs_do(gm: fx.GraphModule) -> None:
    """Say, in place, parts of tensors, what collects them and what takes numbers as programs do."""
    for node in gm.graph.nodes:
        _respell(node)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _respell(node: fx.Node) -> None:
    match node.target, node.args:
        case aten.select.int, (fx.Node() as of, int(dim), int(index)) if dim >= 0:
            _call(node, operator.getitem, (of, (*[slice(None)] * dim, index)))
        case aten.slice.Tensor, (fx.Node() as of, int(), 0 | None, int(end)) if end == sys.maxsize:
            node.replace_all_uses_with(of, lambda user: user.op != "output")  # all of it
        case aten.slice.Tensor, (fx.Node() as of, int(dim), *ends) if dim >= 0 and not node.kwargs:
            _call(node, operator.getitem, (of, (*[slice(None)] * dim, slice(*(*ends, None)[:3]))))
        case _ if node.target in _SPELLED:
            node.target = _SPELLED[node.target]
        case _:
            say_publicly(node)


def say_publicly(node: fx.Node) -> None:
    """Let a node call the function of torch's that it is an overload of, if tensors may stand for its numbers."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return
    before = node.target
    node.target = getattr(torch, before.overloadpacket.__name__, before)
    if not takes_numbers(node):
        node.target = before


def _call(node: fx.Node, target: Callable[..., object], args: tuple[object, ...]) -> None:
    node.target, node.args = target, args  # pyright: ignore[reportAttributeAccessIssue]
