"""Numbers that change with the step of a loop: a tensor without dims in the place of each, of the type that makes what
the number made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import cast

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, Target

from tilewright.capture.loops.nodes import val_of
from tilewright.capture.loops.taken.kinds import Numbers
from tilewright.capture.loops.unrolled import Unlike

from .places import computed_by, in_its_place, twin_of, writes_over

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


Changing = Mapping[int, tuple[fx.Node, Numbers]]
"""What stands for numbers that change, by the place of the argument that they are (see `arguments_of`)."""


def copied(
    graph: fx.Graph, node: fx.Node, operand: Callable[[int, fx.Node], fx.Node], changing: Changing,
    drawn: fx.Node | None = None,
) -> fx.Node:  # fmt: skip
    """A node with other operands, by place, with tensors in the place of numbers that change, and with what it has
    `drawn`. Raises Unlike."""
    places = count()
    twin = twin_of(node, frozenset(changing))
    fills = twin is None and not in_its_place(node)

    def visit(a: object) -> object:
        if isinstance(a, (list, tuple)):
            items = [visit(x) for x in a]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            return tuple(items) if isinstance(a, tuple) else items
        if isinstance(a, dict):
            return {k: visit(x) for k, x in a.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if isinstance(a, slice):
            return slice(visit(a.start), visit(a.stop), visit(a.step))
        at = next(places)
        if isinstance(a, fx.Node):
            return operand(at, a)
        if at not in changing or fills:
            return a
        number, numbers = changing[at]
        return number if twin else number_for(graph, number, numbers, node)

    args = cast(tuple[Argument, ...], visit(node.args))
    kwargs = cast(dict[str, Argument], visit(node.kwargs))
    if not changing:
        return graph.create_node(node.op, node.target, args, kwargs)
    called = computed_by(node)
    apart = twin is not None and writes_over(node)
    apart = apart or (
        called is not node.target and isinstance(node.args[0], fx.Node)
    )  # no number is written over
    # The gradient may read what lies there, and it is written over.
    operands = (graph.call_method("clone", args[:1]), *args[1:]) if apart else args
    if twin is not None:
        kind = cast(Tensor, val_of(node)).dtype
        more = {} if drawn is None else {"drawn": drawn}
        made = graph.call_function(twin.function, operands, {**kwargs, "kind": kind, **more})
    else:
        op = node.op if called is node.target else "call_function"
        made = graph.create_node(op, cast(Target, called), operands, kwargs)
    made = fill(graph, made, next(iter(changing.values()))[0], node) if fills else made
    return graph.call_method("copy_", (args[0], made)) if apart else made
