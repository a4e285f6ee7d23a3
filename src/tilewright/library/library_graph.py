"""What a library would do in place of a region, as a graph that can run."""

from __future__ import annotations

from collections.abc import Collection

from tilewright.ir.graph import Graph, Op, Value
from tilewright.rewrite.normal.normalise import normalise

from .select import is_contraction, live_ops


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


def without_operand_makers(region: Graph) -> tuple[tuple[Op, ...], Graph] | None:
    """The ops that make operands of a region's contractions (unpacked or turned keys), which a routine takes as they
    come, and the rest of the region; None if there are none."""
    producer = region.producer()
    later: set[Value] = set()
    for op in region.ops:
        if is_contraction(op) or later & set(op.inputs):
            later |= set(op.outputs)
    todo = [v for op in region.ops if is_contraction(op) for v in op.inputs if v not in later]
    before: set[Op] = set()
    while todo:
        maker = producer.get(todo.pop())
        if maker is not None and maker not in before:
            before.add(maker)
            todo += maker.inputs
    if not before:
        return None
    core = [op for op in region.ops if op not in before]
    made = {v for op in core for v in op.outputs}
    inputs = tuple(dict.fromkeys(v for op in core for v in op.inputs if v not in made))
    laid = {v: layout for v, layout in region.layouts.items() if v in made or v in inputs}
    makers = tuple(op for op in region.ops if op in before)
    return makers, Graph(inputs, tuple(core), region.outputs, region.origins, laid)
