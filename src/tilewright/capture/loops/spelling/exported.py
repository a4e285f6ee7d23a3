"""Python loops of exported programs: torch writes them out step by step, in ops of its registry."""

# What torch keeps of calls it names with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping

import torch
from torch import fx

from tilewright.capture.loops.rolled import roll_loops

aten = torch.ops.aten

_SPELLED: Mapping[object, Callable[..., object]] = {
    aten.stack.default: torch.stack, aten.cat.default: torch.cat, aten.unbind.int: torch.unbind,
    aten.split.Tensor: torch.split, aten.chunk.default: torch.chunk,
}  # fmt: skip
"""What collects steps and hands out their parts, as programs call it."""


def rolled_module(program: torch.export.ExportedProgram) -> fx.GraphModule | None:
    """The program as a module with a loop in the place of each of its long runs of equal steps; None if it has none."""
    module = program.module(check_guards=False)
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
        _respell(node)
    module.graph.eliminate_dead_code()
    made = roll_loops(module)
    if made is module:
        return None
    made.graph.set_codegen(module.graph._codegen)  # arguments and results nest as they did
    made.recompile()
    return made


def _respell(node: fx.Node) -> None:
    """Say parts of tensors as programs do, which is how loops are recognised."""
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
            pass


def _call(node: fx.Node, target: Callable[..., object], args: tuple[object, ...]) -> None:
    node.target, node.args = target, args  # pyright: ignore[reportAttributeAccessIssue]
