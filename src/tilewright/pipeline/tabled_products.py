"""Products of matrices where nothing may be timed: what a table says that was measured on devices of this kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tilewright.ir.expr import Axis, axes_of, walk
from tilewright.ir.graph import Graph, Op
from tilewright.ir.sizes import dims
from tilewright.library.cost import call_seconds
from tilewright.library.select import factor_axes
from tilewright.partition.products import ChosenProduct, ProductWay
from tilewright.schedule.product_table import (
    FastestProduct,
    ProductShape,
    ProductTable,
    blocks_of,
)
from tilewright.schedule.solver import Solver
from tilewright.tuning.timing_limits import PRODUCTS

from .prices import library_seconds
from .product_ways import ProductTask, Proposal, proposals_of_way


def tabled_product(task: ProductTask, solver: Solver, table: ProductTable) -> ChosenProduct | None:
    """The kernel that a table has for groups of like sizes, where it was faster than the library; None where it was
    not, where the table has no such sizes, and where these blocks are not proposed for this group.

    seconds = modelled seconds of the library * measured time of ours / measured time of the library. An entry of
    products alone serves those with more behind them, which a library computes in further passes."""
    shape = _shape_of(task)
    found = None if shape is None else _entry(shape, table)
    if shape is None or found is None or not found.blocks.tiles:
        return None
    library = replaced = library_seconds(task.region, solver)
    if shape.fused and not found.shape.fused:
        calls = (
            call_seconds([op], op.outputs, solver.target, solver.hints) for op in task.groups[0].products
        )
        replaced = sum(calls)
    seconds = found.ratio * replaced
    if seconds > PRODUCTS.max_preferred_ratio * library:
        return None
    return _with_blocks(task, solver, found, seconds, library)


def measured_first(
    task: ProductTask, proposals: Sequence[Proposal], solver: Solver, table: ProductTable
) -> Sequence[Proposal]:
    """Proposals for a clock, those in front whose blocks a table has for groups of like sizes: what was fastest there
    is timed here, however few are."""
    shape = _shape_of(task)
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


def _shape_of(task: ProductTask) -> ProductShape | None:
    return product_shape(task.region, task.groups[0].products, task.is_fusion)


def product_shape(graph: Graph, products: Sequence[Op], fused: bool) -> ProductShape | None:
    """What these products of a graph multiply, if all are alike and all sizes are known: blocks that were measured at
    one size may be bad at others."""
    calls = [graph.origins[op.origin].call for op in products]
    kinds = {call.reason if call is not None else "" for call in calls}
    found = {_shape(op, next(iter(kinds))) for op in products}
    first = next(iter(found), None)
    if first is None or len(found) > 1 or len(kinds) > 1:
        return None
    return replace(first, count=len(products), fused=fused)


def _shape(op: Op, kind: str) -> ProductShape | None:
    """Of one product of two factors; its rows are what the first one has alone."""
    e, sides = op.expr, factor_axes(op)
    if e is None or len(sides) != 2 or not all(dims.static(a.extent) for a in (*e.axes, *e.reduce)):
        return None
    first, second = sides

    def count(axes: Iterable[Axis]) -> int:
        return math.prod(dims.static(a.extent) or 0 for a in axes)

    kept = e.axes
    batch = count(a for a in kept if a in first & second)
    m, n = (count(a for a in kept if a in own) for own in (first - second, second - first))
    size = max(v.dtype.bytes for v in op.inputs[:2])
    taps = count(a for a in e.reduce if _slides(op, a))
    return ProductShape(kind, size, 1, False, taps, batch, m, n, count(e.reduce))


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


def _with_blocks(
    task: ProductTask, solver: Solver, found: FastestProduct, seconds: float, library: float
) -> ChosenProduct | None:
    """The fastest by the model of those that are proposed with these blocks."""
    way = ProductWay(found.blocks.parts, found.blocks.operands)
    best = next(proposals_of_way(task, way, solver, 1, found.blocks), None)
    if best is None:
        return None
    schedule = str(best.solution.schedule)
    return ChosenProduct(task.region.ops, schedule, seconds, library, way, f"a table, {found.source}")
