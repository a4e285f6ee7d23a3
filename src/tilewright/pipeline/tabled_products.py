"""Products of matrices where nothing may be timed: what a table says that was measured on devices of this kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.runs import side_by_side
from tilewright.ir.expr import Axis, Expr, axes_of, axis, walk
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.sizes import dims
from tilewright.library.select import factor_axes
from tilewright.lower.variants import ALIGNMENT
from tilewright.partition.products import ChosenProduct, ProductWay
from tilewright.schedule.product_table import APART, ProductShape, ProductTable
from tilewright.schedule.solver import Solver
from tilewright.tuning.timing_limits import PRODUCTS

from .prices import way_seconds
from .product_ways import ProductTask, proposals_of_way


def tabled_product(task: ProductTask, solver: Solver, table: ProductTable) -> ChosenProduct | None:
    """The kernel that a table has for groups of like sizes, where it was faster than the library; None where it was
    not, where the table has no such sizes, and where these blocks are not proposed for this group.

    seconds = modelled seconds of the library * measured time of ours / measured time of the library. An entry of
    products of matrices alone serves those with more behind them, which a library computes in further passes. (It takes
    what stands behind a convolution into its call.)"""
    shape = product_shape(task.region, task.groups[0].products) if table.entries else None
    if shape is None:
        return None
    found, alone = table.find(shape), False
    if found is None and shape.fused and shape.kind == "contraction":
        found, alone = table.find(shape.alone()), True
    if found is None or not found.blocks.tiles:
        return None
    library = way_seconds(task.region, task.library, solver)
    seconds = found.ratio * (library.calls if alone else library.total)
    if seconds > PRODUCTS.max_preferred_ratio * library.total:
        return None
    way = ProductWay(found.blocks.parts, found.blocks.operands)
    best = next(proposals_of_way(task, way, solver, 1, found.blocks), None)
    if best is None:
        return None
    schedule, source = str(best.solution.schedule), f"a table, {found.source}"
    return ChosenProduct(task.region, schedule, seconds, library.total, way, source)


def product_shape(graph: Graph, products: Sequence[Op]) -> ProductShape | None:
    """What these `products` of a group multiply, whose region is the `graph`, if all are alike and all sizes are known:
    blocks that were measured at one size may be bad at others."""
    nodes = {op.origin for op in products}
    calls = [graph.origins[n].call for n in nodes]
    kinds = {call.reason if call is not None else "" for call in calls}
    found = {_shape(op, next(iter(kinds)), graph) for op in products}
    first = next(iter(found), None)
    if first is None or len(found) > 1 or len(kinds) > 1:
        return None
    fused = any(
        op.origin not in nodes and not (op.expr is not None and op.expr.is_view()) for op in graph.ops
    )
    return replace(first, count=len(products), fused=fused)


def _shape(op: Op, kind: str, graph: Graph) -> ProductShape | None:
    """Of one product of two factors; its rows are what the first one has alone."""
    e, sides = op.expr, factor_axes(op)
    if e is None or len(sides) != 2 or not all(dims.static(a.extent) for a in (*e.axes, *e.reduce)):
        return None
    first, second = sides

    def count(axes: Iterable[Axis]) -> int:
        return math.prod(dims.static(a.extent) or 0 for a in axes)

    batch = count(a for a in e.axes if a in first & second)
    own = {"m": [a for a in e.axes if a in first - second], "n": [a for a in e.axes if a in second - first]}
    size, image = max(v.dtype.bytes for v in op.inputs[:2]), dims.static(op.inputs[0].numel)
    taps = count(a for a in e.reduce if _slides(op, a))
    if not image:
        return None
    runs = "".join(_run(offset, {**own, "k": e.reduce}, size) for offset in _offsets(op, graph))
    m, n = map(count, own.values())
    return ProductShape(kind, size, 1, False, taps, runs, batch, m, n, count(e.reduce), image)


def _offsets(op: Op, graph: Graph) -> Iterator[Expr]:
    """Where a product finds the elements of its two operands, and where its result goes, by its axes. What views behind
    it make of the result is not looked at."""
    assert op.expr is not None

    def offset(v: Value, places: Sequence[Expr]) -> Expr:
        laid = graph.layouts.get(v)
        strides = dims.dense_strides(v.shape) if laid is None else laid.strides
        return dims.add(dims.ZERO, *map(dims.mul, places, strides))

    reads = {r.value: r for r in op.expr.reads()}
    for number in (0, 1):
        yield offset(op.inputs[number], reads[number].args)
    result = next(
        (v for v in graph.outputs if isinstance(v, Value) and v.shape == op.output.shape), op.output
    )
    yield offset(result, [axis(a) for a in op.expr.axes])


def _run(offset: Expr, own: Mapping[str, Sequence[Axis]], size: int) -> str:
    """Along which of the sides of a product, by their axes, one access takes 16 bytes of elements of such a `size`."""
    wide = ALIGNMENT // size
    found = (name for name, axes in own.items() if axes and side_by_side(offset, axes, wide) >= wide)
    return next(found, APART)


def _slides(op: Op, along: Axis) -> bool:
    """Whether a coordinate of what is read is moved by a place of the result and by one that is summed."""
    assert op.expr is not None
    kept = set(op.expr.axes)
    for read in (x for x in walk(op.expr.body[0]) if x.op == "read"):
        for coordinate in read.args:
            used = {x.value for x in axes_of(coordinate)}
            if along in used and used & kept:
                return True
    return False
