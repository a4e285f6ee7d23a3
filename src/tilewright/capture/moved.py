"""What a graph of a GPU makes on the CPU of nothing that lies there: made on the GPU instead.

Models make index tables, masks and constants without naming a device, and copy them over or index with them. No element
depends on where it is made, so that such values need no place of their own, and the graph has one device. What stays:
what comes in on the CPU or goes out there, numbers that leave tensors, random draws (each device has its own
generator), and whatever these are made with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from .device import HOST, tensors

aten = torch.ops.aten


def moved(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph with its values on one device, as far as they may move there; itself if none may."""
    device = _other_device(gm)
    if device is None or not _movable(gm.graph):
        return gm
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
    made = fx.GraphModule(gm, graph)
    made.meta |= {k: v for k, v in gm.meta.items() if k not in made.meta}
    move(made)
    return made


def move(gm: fx.GraphModule) -> None:
    """The same in place."""
    device = _other_device(gm)
    if device is None:
        return
    moving = _movable(gm.graph)
    for node in moving:
        _place(node, device)
    for node in gm.graph.find_nodes(op="get_attr"):
        users = [n for n in node.users if n in moving]
        if users and any(t.device == HOST for t in tensors(node)):
            with gm.graph.inserting_after(node):
                there = gm.graph.call_function(aten._to_copy.default, (node,), {"device": device})
            there.meta = {k: _elsewhere(v, device) for k, v in node.meta.items() if k == "val"}
            for user in users:
                user.replace_input_with(node, there)
    gm.recompile()


def _other_device(gm: fx.GraphModule) -> torch.device | None:
    """The only device beside the CPU, if there is one."""
    found = {t.device for n in gm.graph.nodes for t in tensors(n)} - {HOST}
    return found.pop() if len(found) == 1 else None


def _movable(graph: fx.Graph) -> list[fx.Node]:
    """The nodes whose results lie on the CPU and may be made elsewhere."""
    held = [n for n in graph.nodes if any(t.device == HOST for t in tensors(n))]
    found = {n for n in held if _may_move(n)}
    doubtful = list(found)
    while doubtful:
        node = doubtful.pop()
        if node in found and not _free(node, found):
            found.discard(node)
            doubtful += [*node.all_input_nodes, *node.users]
    return [n for n in held if n in found]


def _may_move(node: fx.Node) -> bool:
    """Whether a node by itself makes the same on another device."""
    schema, tags = getattr(node.target, "_schema", None), getattr(node.target, "tags", ())
    if node.op != "call_function" or schema is None or schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in tags or not schema.name.startswith(("aten::", "prims::")):
        return False
    return all(t.device == HOST for t in tensors(node))


def _free(node: fx.Node, moving: set[fx.Node]) -> bool:
    """Whether what a node reads on the CPU moves with it, and whoever reads it can read it elsewhere."""
    sources = [n for n in node.all_input_nodes if any(t.device == HOST for t in tensors(n))]
    return all(n in moving or n.op == "get_attr" for n in sources) and all(
        n in moving or _reads_anywhere(n) for n in node.users
    )


def _reads_anywhere(node: fx.Node) -> bool:
    """Whether a node's results are tensors of the other device alone."""
    found = list(tensors(node))
    leaves = tree_leaves(node.meta.get("val"))
    return (
        node.op == "call_function" and len(found) == len(leaves) > 0 and all(t.device != HOST for t in found)
    )


def _place(node: fx.Node, device: torch.device) -> None:
    node.args, node.kwargs = _renamed(node.args, device), _renamed(dict(node.kwargs), device)
    schema = getattr(node.target, "_schema", None)
    takes = schema is not None and any(a.name == "device" for a in schema.arguments)
    if takes and not any(isinstance(a, torch.device) for a in tree_leaves(node.args)):
        node.kwargs = {**node.kwargs, "device": device}
    if node.kwargs.get("pin_memory"):
        node.kwargs = {**node.kwargs, "pin_memory": False}
    node.meta = copy.copy(node.meta)
    for key in ("val", "tensor_meta"):
        if key in node.meta:
            node.meta[key] = tree_map(lambda t: _elsewhere(t, device), node.meta[key])


def _renamed(given: Any, device: torch.device) -> Any:
    return tree_map(lambda a: device if isinstance(a, torch.device) and a == HOST else a, given)


def _elsewhere(t: object, device: torch.device) -> object:
    if not isinstance(t, torch.Tensor) or t.device != HOST:
        return t
    mode = getattr(t, "fake_mode", None)
    assert mode is not None, "values of captured nodes are fake"
    with mode:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)


__all__ = ["move", "moved"]
