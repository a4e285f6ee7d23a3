"""Functions that a captured graph calls by name, as checkpointing does: those that do the same are one."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import fx


def with_bodies_once(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with one name for all graphs among its attributes that compute the same, and with all of them read in
    front of everything; itself if it has one at most. Dynamo captures the function of each call anew."""
    first: dict[object, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        body = getattr(gm, node.target, None)
        if isinstance(body, fx.GraphModule):
            same[node] = first.setdefault(_text(body), node)
    if len(same) < 2:
        return gm
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    nodes = list(gm.graph.nodes)
    begin = next(k for k, n in enumerate(nodes) if n.op != "placeholder")
    for node in (*nodes[:begin], *first.values(), *(n for n in nodes[begin:] if n not in first.values())):
        values[node] = (
            values[same[node]]
            if node in same and same[node] is not node
            else graph.node_copy(node, values.__getitem__)
        )
    made = fx.GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    return made


def _text(body: fx.GraphModule) -> object:
    """What a graph computes: its nodes by number. What it holds itself is known by identity."""
    numbers: dict[fx.Node, int] = {}
    lines: list[object] = []
    for k, node in enumerate(body.graph.nodes):
        numbers[node] = k
        target = k if node.op == "placeholder" else node.target
        holds = node.op in ("get_attr", "call_module")
        held: Sequence[int] = [id(attrgetter(node.target)(body))] if holds else []
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")  # pyright: ignore[reportArgumentType]
        lines.append(
            (node.op, target if isinstance(target, (str, int)) else id(target), repr(arguments), *held)
        )
    return tuple(lines)
