"""Numbers that change with the step of a loop: a tensor without dims in the place of each, of the type that makes what
the number made."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from tilewright.capture.loops.nodes import val_of
from tilewright.capture.loops.unrolled import Numbers, Unlike

_WIDE = (torch.float64, torch.complex128)


def type_of(numbers: Numbers) -> torch.dtype:
    """What holds all of them exactly."""
    return torch.int64 if all(type(v) is int for v in numbers.values) else torch.float64


def number_for(graph: fx.Graph, number: fx.Node, numbers: Numbers, node: fx.Node) -> fx.Node:
    """What stands for one of `numbers` among the operands of `node`, in a body's graph: `number`, without dims, in
    singles where a number counts as such. Raises Unlike where no tensor counts as a number does."""
    operands = [t for n in node.all_input_nodes if isinstance(t := val_of(n), Tensor)]
    integral = type_of(numbers) == torch.int64
    if all(t.dim() == 0 for t in operands):  # then the tensor's type counts as much as theirs
        alike = (torch.float32, torch.float64, torch.int64)[: 3 if integral else 2]
        if any(t.dtype not in alike for t in operands):
            raise Unlike(f"a number that changes meets {operands[0].dtype} without dims")
    if integral:
        return number
    inexact = any(t.is_floating_point() or t.is_complex() for t in operands)
    wide = any(t.dtype in _WIDE for t in operands) if inexact else torch.get_default_dtype() == torch.float64
    return number if wide else graph.call_method("to", (number, torch.float32))


def fill(graph: fx.Graph, made: fx.Node, number: fx.Node, node: fx.Node) -> fx.Node:
    """What `made`, a copy of `node`, makes with `number` in the place of its own. Raises Unlike for truth values."""
    like = val_of(node)
    if not isinstance(like, Tensor) or like.dtype == torch.bool:
        raise Unlike("a truth value changes with the step")
    typed = graph.call_method("to", (number, like.dtype))
    return graph.call_function(torch.mul, (graph.call_function(torch.ones_like, (made,)), typed))
