"""A function that steps call, with the numbers in it that change as operands behind its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from tilewright.capture.loops.taken.kinds import Numbers

from .stepping import copied
from .within import InBody, Values


def taking_numbers(body: fx.GraphModule, changing: Sequence[tuple[InBody, Values]]) -> fx.GraphModule:
    """The function that takes these numbers, without dims, as its last operands. Raises Unlike where no tensor counts
    as a number does."""
    if not changing:
        return body
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    given: defaultdict[int, dict[int, tuple[fx.Node, Numbers]]] = defaultdict(dict)
    nodes = list(body.graph.nodes)
    begin = next(k for k, n in enumerate(nodes) if n.op != "placeholder")
    for node in nodes[:begin]:
        made[node] = graph.node_copy(node)
    for k, ((m, p), values) in enumerate(changing):
        given[m][p] = graph.placeholder(f"number_{k}"), Numbers(values)
    for m, node in enumerate(nodes[begin:], begin):
        if m in given:
            made[node] = copied(graph, node, lambda _, a: made[a], given[m])
            made[node].meta = dict(node.meta)
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
    return fx.GraphModule(body, graph)
