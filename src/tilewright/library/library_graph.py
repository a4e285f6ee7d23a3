"""What a library would do in place of a region, as a graph that can run."""

from __future__ import annotations

from collections.abc import Collection

from tilewright.ir.graph import Graph, Op, Value
from tilewright.rewrite.normal.normalise import normalise

from .select import live_ops


def library_graph(region: Graph, origins: Collection[int], graph: Graph, selected: Graph) -> Graph:
    """What makes the results of a `region` of `graph` where its captured nodes `origins` are calls: the ops of
    `selected`, the same graph with calls, back to what others make."""
    own = set(region.ops)
    views = set(graph.ops) - live_ops(graph)  # that only calls would read
    producer = selected.producer()

    def is_part(op: Op) -> bool:
        return op in own or op in views or (op.call is not None and op.origin in origins)

    ops: dict[Op, None] = {}
    inputs: dict[Value, None] = {}
    results = tuple(v for v in region.outputs if isinstance(v, Value))
    todo: list[tuple[Value, bool]] = [(v, False) for v in results]
    while todo:
        v, ready = todo.pop()
        op = producer.get(v)
        if op is None or v in region.inputs or not is_part(op):
            inputs[v] = None
        elif ready:
            ops[op] = None
        elif op not in ops:
            todo += [(v, True), *((x, False) for x in op.inputs)]
    laid = {v: graph.layouts[v] for v in (*inputs, *results) if v in graph.layouts}
    return normalise(Graph(tuple(inputs), tuple(ops), results, graph.origins, laid))
