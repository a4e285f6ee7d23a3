"""Schedules with matrix products inside, for machines with vectors: tiles that the nearest caches hold.

One parallel class, which every product keeps, runs in vector lanes, so that all folds go across registers and not
inside them: a block of queries against blocks of keys, or a block of keys against blocks of queries. The other side of
each product is read one number at a time and multiplied with several registers, which is the plan of fast products on
such machines: as many sums as the registers hold, one line of the lane side and one number of each row per step.
"""

from __future__ import annotations

from collections.abc import Collection

from tilewright.analysis.contraction import contraction, product_sides
from tilewright.analysis.loop_segments import growth
from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, axes_of, axis
from tilewright.ir.form import Form
from tilewright.ir.schedule import ClassPlan, Math, Memory, Reductions, Role, Schedule, Tiling
from tilewright.ir.sizes import dims
from tilewright.target import MemoryKind, Target
from tilewright.tuning.thresholds import CONTRACTION, CPU_MATMUL

from .vectors import nest_order, vector_lanes


def matmul_schedule(form: Form, target: Target, hints: SizeHints) -> Schedule | None:
    """A schedule in which every sum of products is a product of blocks; None if `form` has no such sum, or if no
    parallel class can be the lane of all of them."""
    sums = {i.id: s for i in form.folds.values() if (s := product_sides(i)) is not None}
    if not sums or any(i.scan is not None for i in form.items):
        return None
    if any(len(s[2]) > 1 or form.items[i].body[0].dtype is not f32 for i, s in sums.items()):
        return None
    longest = [[max(side, key=lambda a: hints.estimate(a.extent)) for side in s] for s in sums.values()]
    reduced = {a for i in form.items for a in i.reduce}
    grid = [a for a in form.classes() if a not in reduced and all(a in i.axes for i in form.items)]
    lane = next((a for a in grid if all(a in kept[:2] for kept in longest)), None)
    if lane is None:
        return None
    tiles = dict.fromkeys(form.classes(), 1)
    for a in (a for kept in longest for a in kept if a not in grid):
        tiles[a] = _inner(a, vector_lanes(target))
    tiles |= {
        a: min(tiles[a], CPU_MATMUL.max_summed_step_elements) for a in _summed(form, sums) if tiles[a] > 1
    }
    tiles[lane] = _across(lane, target)
    made = [contraction(form.items[i], form.params, tiles.__getitem__) for i in sums]
    if any(c is None or lane not in (c.m, c.n) for c in made):
        return None
    inner = nest_order(form, [a for a in form.classes() if a not in grid], lane)
    plans = [ClassPlan(a, Role.GRID) for a in grid if a != lane]
    descending = growth(form.items, lane) > 0
    plans.append(ClassPlan(lane, Role.GRID, tiles[lane], tiles[lane], descending))
    for a in inner:
        extent = dims.static(a.extent)
        untiled = extent is not None and tiles[a] > 1 and tiles[a] >= extent
        plans.append(ClassPlan(a, Role.RESIDENT if untiled else Role.STREAMED, tiles[a]))
    fetch = _in_bands(form, lane, [c.axis for c in plans if c.role is Role.STREAMED], target, hints)
    return Schedule(
        Tiling(tuple(plans), lane),
        Reductions(online=True, lane_states=False, max_chain=CPU_MATMUL.max_chain, skip_hidden=True),
        Memory(next_step=fetch),
        Math(reciprocals=True),
    )


def _summed(form: Form, products: Collection[int]) -> set[Axis]:
    """Classes that float sums fold, and products do not."""
    plain = [i for i in form.folds.values() if i.id not in products and i.reduction is not None]
    added = {a for i in plain if i.reduction and i.reduction.combiner == "add" for a in i.reduce}
    return added - {a for i in products for a in form.items[i].reduce}


def _in_bands(
    form: Form, lane: Axis, streamed: list[Axis], target: Target, hints: SizeHints
) -> tuple[int, ...]:
    """Inputs from memory of which a step reads a few bytes of many rows: no machine sees what comes next."""
    cache = target.level(MemoryKind.L2)
    found: list[int] = []
    for param, offset in (x for i in form.folds.values() for x in i.accesses()):
        size = hints.estimate(form.sizes[param]) * form.params[param].dtype.bytes
        walked = [a for a in streamed if axis(a) in axes_of(offset)]
        dense = any(dims.coefficient(offset, axis(a)) is dims.ONE for a in (*walked, lane))
        if walked and dense and axis(lane) in axes_of(offset) and cache and 2 * size >= cache.capacity:
            found.append(param)
    return tuple(dict.fromkeys(found))


def _across(lane: Axis, target: Target) -> int:
    """Values of the lane class in a block: all registers that one step multiplies, fewer where it is short."""
    width = vector_lanes(target)
    extent = dims.static(lane.extent)
    most = CPU_MATMUL.max_lane_registers * width
    while most < CONTRACTION.min_block_side:
        most *= 2
    return most if extent is None else max(CONTRACTION.min_block_side, min(most, -(-extent // width) * width))


def _inner(a: Axis, width: int) -> int:
    """The tile of another class: the whole of a short one, in whole registers."""
    extent = dims.static(a.extent)
    if extent is None or extent > CPU_MATMUL.max_untiled_extent:
        return CPU_MATMUL.streamed_step_elements
    step = max(width, CONTRACTION.min_block_side)
    return -(-extent // step) * step
