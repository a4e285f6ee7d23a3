"""Writes into parts of tensors: `whole[t].copy_(x)`, `whole[t].add_(x)`, `whole[t] += x` and `whole[t] = 3.0` become
`whole[t] = value`, with a value that is computed; equal steps that write part after part so are a loop (`in_place`)."""

from __future__ import annotations

import logging
import operator
from typing import cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from tilewright.capture.loops.nodes import val_of
from tilewright.capture.loops.taken.parts import is_basic_index
from tilewright.capture.loops.unrolled import Unlike

from .in_place_ops import IN_PLACE, writes_apart

LOG = logging.getLogger("tilewright")


def write_parts_by_index(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph in which writes into parts are one spelling; itself if they are already, or cannot be. Nodes carry
    `meta["example_value"]`."""
    if not any(_part_written(n) is not None or _is_filled(n) for n in gm.graph.nodes):
        return gm
    try:
        graph = _spelled_alike(gm)
    except Unlike as why:
        LOG.info("writes into parts stay as they are: %s", why)
        return gm
    made = fx.GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    return made


def _spelled_alike(gm: fx.GraphModule) -> fx.Graph:
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        part = _part_written(node)
        if part is not None:
            _write(graph, values, node, part)
            values[node] = values[part]
        elif _is_filled(node):
            _fill(graph, values, node)
        elif not _writes_itself(node):
            values[node] = graph.node_copy(node, values.__getitem__)
    return graph


def _part_written(node: fx.Node) -> fx.Node | None:
    """The part of a tensor that a node writes in another spelling."""
    part = node.args[0] if node.args else None
    if not isinstance(part, fx.Node) or not _is_part(part) or len(node.args) < 2:
        return None
    return part if writes_apart(node) and node.op in ("call_function", "call_method") else None


def _is_part(node: fx.Node) -> bool:
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    return isinstance(val_of(node.args[0]), FakeTensor) and is_basic_index(node.args[1])


def _is_filled(node: fx.Node) -> bool:
    """Whether a node writes a plain number into a part."""
    if node.target is not operator.setitem or not isinstance(node.args[0], fx.Node):
        return False
    number = type(node.args[2]) in (bool, int, float)
    return number and isinstance(val_of(node.args[0]), FakeTensor) and is_basic_index(node.args[1])


def _writes_itself(node: fx.Node) -> bool:
    """Whether a node writes over a part what lies there: the second half of `whole[t] += x`."""
    if node.target is not operator.setitem or not isinstance(made := node.args[2], fx.Node):
        return False
    part = _part_written(made)
    return part is not None and part.args == node.args[:2] and not node.users


def _write(graph: fx.Graph, values: dict[fx.Node, fx.Node], node: fx.Node, part: fx.Node) -> None:
    if node.target == "copy_":
        value = values[cast(fx.Node, node.args[1])]
    else:
        was, made = _computed(node, part)
        # The gradient may read what lies there, and it is written over.
        before = graph.call_function(torch.clone, (values[part],))
        before.meta = {**node.meta, "example_value": was}
        now = {**values, part: before}
        args, kwargs = fx.map_arg((node.args, node.kwargs), now.__getitem__)  # pyright: ignore[reportArgumentType]
        value = graph.call_function(IN_PLACE[node.target], args, kwargs)  # pyright: ignore[reportArgumentType]
        value.meta = {**node.meta, "example_value": made}
    _set(graph, node, values[cast(fx.Node, part.args[0])], part.args[1], value)


def _computed(node: fx.Node, part: fx.Node) -> tuple[Tensor, Tensor]:
    """What stands for a copy of the part that a node writes, and for what it writes there. Raises Unlike where that
    cannot be computed apart."""
    sample = cast(FakeTensor, val_of(part))
    args, kwargs = fx.map_arg((node.args, node.kwargs), val_of)  # pyright: ignore[reportArgumentType]
    try:
        with sample.fake_mode, torch.no_grad():
            was, made = sample.clone(), IN_PLACE[node.target](*args, **kwargs)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except Exception as error:
        raise Unlike(f"{node.target} fails apart: {error}") from error
    if not isinstance(made, Tensor):
        raise Unlike(f"{node.target} makes no tensor")
    given = [t for n in node.all_input_nodes if isinstance(t := val_of(n), Tensor)]
    inexact = made.is_floating_point() or made.is_complex()
    was.requires_grad_(sample.requires_grad)
    return was, made.requires_grad_(inexact and any(t.requires_grad for t in given))


def _fill(graph: fx.Graph, values: dict[fx.Node, fx.Node], node: fx.Node) -> None:
    base, index, number = node.args
    sample = cast(FakeTensor, val_of(cast(fx.Node, base)))
    with sample.fake_mode, torch.no_grad():
        part = sample[index]  # pyright: ignore[reportArgumentType]
        made = torch.empty_like(part)
    shown = graph.call_function(operator.getitem, (values[cast(fx.Node, base)], index))
    shown.meta = {**node.meta, "example_value": part}
    full = graph.call_function(torch.full_like, (shown, cast(float, number)))
    full.meta = {**node.meta, "example_value": made}
    values[node] = _set(graph, node, values[cast(fx.Node, base)], index, full)


def _set(graph: fx.Graph, node: fx.Node, base: fx.Node, index: object, value: object) -> fx.Node:
    made = graph.call_function(operator.setitem, (base, index, value))  # pyright: ignore[reportArgumentType]
    made.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
    return made
