"""Products of matrices where nothing may be timed: what a table says that was measured on devices of this kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.runs import side_by_side
from tilewright.ir.expr import Axis, Expr, axes_of, axis, walk
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.sizes import dims
from tilewright.library.select import factor_axes
from tilewright.lower.variants import ALIGNMENT
from tilewright.partition.products import ChosenProduct, ProductWay
from tilewright.schedule.product_table import APART, FastestProduct, ProductShape, ProductTable, blocks_of
from tilewright.schedule.solver import Solver
from tilewright.tuning.thresholds import GPU_MATMUL
from tilewright.tuning.timing_limits import PRODUCTS

from .prices import way_seconds
from .product_ways import ProductTask, Proposal, proposals_of, proposals_of_way


def tabled_product(task: ProductTask, solver: Solver, table: ProductTable) -> ChosenProduct | None:
    """The kernel that a table has for groups of like sizes, where it was faster than the library; None where it was
    not, where the table has no such sizes, and where these blocks are not proposed for this group (of windows, which
    the model knows better, then the kernel that it prefers, if what was measured was much faster).

    seconds = modelled seconds of the library * measured time of ours / measured time of the library. An entry of
    products of matrices alone serves those with more behind them, which a library computes in further passes; of
    convolutions it does not, since a library takes a bias and an activation into its call."""
    shape = _shape_of(task, table)
    found = None if shape is None else _entry(shape, table)
    if shape is None or found is None or not found.blocks.tiles:
        return None
    alone = shape.fused and not found.shape.fused
    if alone and shape.kind != "contraction":
        return None
    library = way_seconds(task.region, task.library, solver)
    seconds = found.ratio * (library.calls if alone else library.total)
    if seconds > PRODUCTS.max_preferred_ratio * library.total:
        return None
    way = ProductWay(found.blocks.parts, found.blocks.operands)
    best = next(proposals_of_way(task, way, solver, 1, found.blocks), None)
    if (
        best is None
        and shape.kind == "depthwise"
        and seconds <= GPU_MATMUL.max_unproposed_ratio * library.total
    ):
        best = next(iter(proposals_of(task, solver)), None)
    if best is None:
        return None
    schedule, source = str(best.solution.schedule), f"a table, {found.source}"
    return ChosenProduct(task.region, schedule, seconds, library.total, best.way, source)


def measured_first(
    task: ProductTask, proposals: Sequence[Proposal], solver: Solver, table: ProductTable
) -> Sequence[Proposal]:
    """Proposals for a clock, those in front whose blocks a table has for groups of like sizes: what was fastest there
    is timed here, however few are."""
    shape = _shape_of(task, table)
    found = None if shape is None else _entry(shape, table)
    if found is None or not found.blocks.tiles:
        return proposals
    blocks, way = found.blocks, ProductWay(found.blocks.parts, found.blocks.operands)

    def has_blocks(proposal: Proposal) -> bool:
        return proposal.way == way and blocks_of(proposal.solution.schedule).are_like(blocks)

    wanted = [p for p in proposals if has_blocks(p)]
    others = [p for p in proposals if not has_blocks(p)]
    return [*(wanted or proposals_of_way(task, way, solver, 1, blocks)), *others]


def _entry(shape: ProductShape, table: ProductTable) -> FastestProduct | None:
    """The entry of a table for a shape, or for its products alone."""
    return table.find(shape) or (table.find(shape.alone()) if shape.fused else None)


def _shape_of(task: ProductTask, table: ProductTable) -> ProductShape | None:
    """What a task multiplies, if a table may say something of it: of products that unpack operands none does."""
    group = task.groups[0]
    return product_shape(task.region, group.products) if table.entries and not group.unpacks else None


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
    """Of one product of two factors; its rows are what the first one has alone. What views behind it make of the result
    is not looked at."""
    e, sides = op.expr, factor_axes(op)
    reads = () if e is None else tuple(e.reads())
    if e is None or not len(sides) == len(reads) == 2:
        return None
    (first, second), operands = sides, [op.inputs[r.value] for r in reads if isinstance(r.value, int)]
    image = dims.static(operands[0].numel)
    if not image or not all(dims.static(a.extent) for a in (*e.axes, *e.reduce)):
        return None

    def count(axes: Iterable[Axis]) -> int:
        return math.prod(dims.static(a.extent) or 0 for a in axes)

    rows, columns, both = first - second, second - first, first & second
    if kind == "convolution" and not columns:
        kind, columns, both = "depthwise", both, set[Axis]()
    own = {"m": [a for a in e.axes if a in rows], "n": [a for a in e.axes if a in columns]}
    size = max(v.dtype.bytes for v in operands)
    taps = count(a for a in e.reduce if _slides(op, a)) if kind != "contraction" else 1
    batch = count(a for a in e.axes if a in both)
    result = next(
        (v for v in graph.outputs if isinstance(v, Value) and v.shape == op.output.shape), op.output
    )
    accesses = [*zip(operands, (r.args for r in reads), strict=True), (result, tuple(map(axis, e.axes)))]
    runs = "".join(_run(_offset(v, args, graph), {**own, "k": e.reduce}, size) for v, args in accesses)
    m, n = map(count, own.values())
    return ProductShape(kind, size, 1, False, taps, runs, batch, m, n, count(e.reduce), image)


def _offset(v: Value, places: Sequence[Expr], graph: Graph) -> Expr:
    """Where the element of a value at some places lies."""
    laid = graph.layouts.get(v)
    strides = dims.dense_strides(v.shape) if laid is None else laid.strides
    return dims.add(dims.ZERO, *map(dims.mul, places, strides))


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
