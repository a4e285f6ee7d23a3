"""Reductions that wait for each other, of few rows over much, together in parts that run side by side.

A softmax over a long row is a maximum and a sum that waits for it. Split each on its own, they read the row twice and
keep what lies between; in parts that have a maximum of their own, both run in one pass (`rewrite.split.cascade_parts`
has the law). What is read of a row at few places, as the loss at a label is, is computed there from what the row was
made of: then nothing along the row has to be kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from tilewright.analysis.online.find_cascades import cascades
from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.expr import Expr, axis, read, substitute, transform
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.kernel import Kernel, Price
from tilewright.ir.ops.common import position
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes
from tilewright.rewrite.normal.normalise import drop_dead, substitute_values
from tilewright.tuning.search_limits import CASCADE_PARTS
from tilewright.tuning.thresholds import SIZES, SPLIT_CASCADES

from .cascade_parts import split_cascade
from .policy import fastest_split, part_counts


def split_cascades(graph: Graph, price: Price, cores: int, hints: SizeHints) -> tuple[Graph, frozenset[Op]]:
    """The graph with reductions that wait for each other in parts where that is modelled as faster, and the ops that
    are new. Rows that keep many of the `cores` busy are left alone."""
    if not waiting_reductions(graph):
        return graph, frozenset()
    found = _read_where_made(graph, hints)
    fresh = found.fresh_id()
    few = cores // SPLIT_CASCADES.min_cores_per_row
    made: set[Op] = set()
    for op in reversed(found.ops):
        region = None if op in made else _region(found, op)
        parts = None if region is None else _fastest(region, price, few, hints)
        if region is None or parts is None:
            continue
        ops = _numbered(parts, region, fresh)
        fresh += len(ops)
        made |= set(ops)
        inside = _behind(op, found.producer())
        found = found.with_ops(_in_order([*(o for o in found.ops if o not in inside), *ops]))
    return (found, frozenset(made)) if made else (graph, frozenset())


def waiting_reductions(graph: Graph) -> frozenset[Op]:
    """The reductions that wait for one over as many elements with as many results, through pointwise ops, and those
    that are waited for."""
    before: dict[Value, frozenset[Op]] = {}
    found: set[Op] = set()
    for op in graph.ops:
        if op.expr is None:
            continue
        behind = frozenset[Op]().union(*(before.get(v, frozenset()) for v in op.inputs))
        if op.expr.reduction is not None:
            same = {o for o in behind if _are_alike(o, op)}
            found |= same | ({op} if same else set())
            behind = frozenset({op})
        before |= dict.fromkeys(op.outputs, behind)
    return frozenset(found)


def _is_reduction(op: Op) -> bool:
    return op.expr is not None and op.expr.reduction is not None and op.expr.scan is None


def _are_alike(a: Op, b: Op) -> bool:
    """Whether two reductions are over as many elements with as many results."""

    def extents(op: Op) -> tuple[list[Expr], list[Expr]]:
        assert op.expr is not None
        return [r.extent for r in op.expr.reduce], [n for n in op.expr.shape if n is not dims.ONE]

    return extents(a) == extents(b)


def _behind(op: Op, producer: Mapping[Value, Op]) -> set[Op]:
    """A reduction, those like it that it waits for, and the pointwise ops that lead to them."""
    seen = {op}
    todo = [op]
    while todo:
        for v in todo.pop().inputs:
            o = producer.get(v)
            if o is None or o in seen or o.expr is None or o.kernel >= 0:
                continue
            if o.expr.is_pointwise or (_is_reduction(o) and _are_alike(o, op)):
                seen.add(o)
                todo.append(o)
    return seen


def _region(graph: Graph, op: Op) -> Graph | None:
    """The reductions that `op` waits for and itself, with what leads to them, as a graph; None if it waits for none."""
    if not _is_reduction(op):
        return None
    inside = _behind(op, graph.producer())
    if not any(_is_reduction(o) for o in inside if o is not op):
        return None
    ops = [o for o in graph.ops if o in inside]
    made = {v for o in ops for v in o.outputs}
    outside = {v for o in graph.ops if o not in inside for v in o.inputs} | graph.kept()
    inputs = tuple(dict.fromkeys(v for o in ops for v in o.inputs if v not in made))
    outputs = tuple(v for o in ops for v in o.outputs if v in outside)
    layouts = {v: graph.layouts[v] for v in (*inputs, *outputs) if v in graph.layouts}
    return _with_rows_made(Graph(inputs, tuple(ops), outputs, graph.origins, layouts))


def _with_rows_made(region: Graph) -> Graph:
    """The region in which reductions of its inputs read copies of them, which other kernels never see: a cascade is
    found by the values that its reductions share."""
    reductions = [op for op in region.ops if _is_reduction(op)]
    reduced = dict.fromkeys(v for op in reductions for v in op.inputs if v in region.inputs)
    same = {v: Value(region.fresh_id() + k, v.shape, v.dtype) for k, v in enumerate(reduced)}
    copies = [
        Op("copy", (v,), (made,), expr=TensorExpr(axes, (read(0, tuple(map(position, axes)), v.dtype),)))
        for v, made in same.items()
        if (axes := output_axes(v.shape))
    ]
    return region.with_ops([*copies, *substitute_values(region, same).ops])


def _fastest(region: Graph, price: Price, few: int, hints: SizeHints) -> Graph | None:
    """The region in the number of parts that is fastest by the model, if that is much faster than one kernel."""
    found = cascades(region)
    if len(found) != 1 or len(found[0].reductions) < 2 or hints.estimate(found[0].rows) > few:
        return None
    if region.kept() & set(found[0].along):
        return None  # all elements would be made again, of what is brought again
    extent = hints.estimate(found[0].extent)
    counts = part_counts(CASCADE_PARTS.of_long_rows, extent, SPLIT_CASCADES.min_part_elements)
    made = (split_cascade(region, found[0], n, SPLIT_CASCADES.part_multiple) for n in counts)
    ways = ((m[0], _kernels(*m)) for m in made if m is not None)
    unsplit = Kernel(region.ops, _required_results(region))
    return fastest_split(unsplit, ways, region.layouts, price, SPLIT_CASCADES.min_gain_ratio)


def _required_results(region: Graph) -> tuple[Value, ...]:
    return tuple(v for v in region.outputs if isinstance(v, Value))


def _kernels(region: Graph, states: frozenset[Value]) -> tuple[Kernel, Kernel]:
    """The kernel that makes the states of the parts, and the one that merges them."""
    producer = region.producer()
    first: set[Op] = set()
    todo = [producer[v] for v in states]
    while todo:
        op = todo.pop()
        if op not in first:
            first.add(op)
            todo += [producer[v] for v in op.inputs if v in producer]
    ops = tuple(op for op in region.ops if op in first)
    rest = tuple(op for op in region.ops if op not in first)
    partial = Kernel(ops, tuple(v for op in ops for v in op.outputs if v in states))
    return partial, Kernel(rest, _required_results(region))


def _numbered(parts: Graph, region: Graph, fresh: int) -> list[Op]:
    """The ops of `parts`, values that do not cross the border of `region` numbered from `fresh`."""
    known = {*region.inputs, *region.outputs}
    values = [v for op in parts.ops for v in op.outputs if v not in known]
    new = {v: Value(fresh + k, v.shape, v.dtype) for k, v in enumerate(values)}
    each = lambda vs: tuple(new.get(v, v) for v in vs)  # noqa: E731
    return [replace(op, inputs=each(op.inputs), outputs=each(op.outputs)) for op in parts.ops]


def _in_order(ops: Sequence[Op]) -> list[Op]:
    """The ops such that each stands behind those that it reads."""
    producer = {v: op for op in ops for v in op.outputs}
    done: dict[Op, None] = {}

    def put(op: Op) -> None:
        if op not in done:
            for v in op.inputs:
                if v in producer:
                    put(producer[v])
            done[op] = None

    for op in ops:
        put(op)
    return list(done)


def _read_where_made(graph: Graph, hints: SizeHints) -> Graph:
    """The graph in which pointwise ops that need few elements of a pointwise value make these themselves."""
    producer = graph.producer()
    return drop_dead(graph.with_ops([_made_here(op, producer, hints) for op in graph.ops]))


def _made_here(op: Op, producer: Mapping[Value, Op], hints: SizeHints) -> Op:
    if op.expr is None or not op.expr.is_pointwise or len(op.outputs) > 1 or op.kernel >= 0:
        return op
    enough = SIZES.min_negligible_ratio * hints.estimate(op.output.numel)
    inputs: list[Value] = []

    def visit(owner: Op, x: Expr) -> Expr | None:
        if x.op != "read":
            return None
        assert isinstance(x.value, int)
        v = owner.inputs[x.value]
        args = tuple(transform(i, partial(visit, owner)) for i in x.args)
        maker = producer.get(v)
        if maker is not None and _is_plain(maker) and hints.estimate(v.numel) >= enough:
            assert maker.expr is not None
            body = transform(maker.expr.body[0], partial(visit, maker))
            return substitute(body, {axis(a): i for a, i in zip(maker.expr.axes, args, strict=True)})
        if v not in inputs:
            inputs.append(v)
        return read(inputs.index(v), args, v.dtype)

    body = transform(op.expr.body[0], partial(visit, op))
    if body is op.expr.body[0]:
        return op
    return replace(op, inputs=tuple(inputs), expr=TensorExpr(op.expr.axes, (body,)))


def _is_plain(op: Op) -> bool:
    return op.expr is not None and op.expr.is_pointwise and len(op.outputs) == 1 and op.kernel < 0
