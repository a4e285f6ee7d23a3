"""Schedules that are proposed for sums of long rows, as products of a matrix and a vector are: the usual block is the
one that was fastest for a row of numbers, and how many bytes are under way with more operands, or at other lengths, no
model here knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product as choices

from tilewright.errors import IllegalSchedule
from tilewright.form.implied import drop_implied
from tilewright.ir.expr import Axis
from tilewright.ir.form import Form, folds_read
from tilewright.ir.schedule import Schedule
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.rounding import next_power_of_two
from tilewright.lower.legality import check_roles
from tilewright.schedule.gpu.block_memory import ProductBlocks
from tilewright.schedule.gpu.block_shape import Shape, shape_of
from tilewright.schedule.gpu.blocks import schedule_of_blocks
from tilewright.schedule.gpu.matmul_cost import bytes_once
from tilewright.schedule.scheduler import Comparison, Solution
from tilewright.target import Target
from tilewright.tuning.search_limits import ROW_SUMS
from tilewright.tuning.thresholds import GPU_ROWS


def row_sum_proposals(found: Solution, by: Comparison) -> Sequence[Solution]:
    """The same form in blocks of several rows. None of what moves little, or is no such sum."""
    form = drop_implied(found.form)
    shape = shape_of(form, by.hints)
    if not _sums_rows(form, shape) or bytes_once(form, by.hints) < ROW_SUMS.min_bytes:
        return ()
    made: list[Solution] = []
    for schedule in _schedules(form, shape, by.target):
        own, schedule = by.completed_as_it_is(
            found.form, schedule.changed(form_steps=found.schedule.form_steps)
        )
        if _is_legal(own, schedule) and not _alike(schedule, found.schedule):
            made.append(replace(found, schedule=schedule, form=own))
    return made


def _sums_rows(form: Form, shape: Shape) -> bool:
    """Whether all folds go along one class of known length, contiguous in memory, of which no result has a place, and
    none waits for another."""
    (lane, *others) = shape.inner or (None,)
    return (
        lane is not None
        and not others
        and shape.lane == lane
        and shape.scan is None
        and dims.static(lane.extent) is not None
        and bool(shape.grid)
        and all(f.reduce == (lane,) and not folds_read(f.roots) for f in form.folds.values())
        and not any(lane in o.axes for o in form.outputs)
    )


def _schedules(form: Form, shape: Shape, target: Target) -> Iterator[Schedule]:
    """Several rows at a time: a piece of each, or all of it where it is short."""
    (lane,), (*_, rows) = shape.inner, shape.grid
    whole = next_power_of_two(dims.static(lane.extent) or 1)
    pieces = [(t, ROW_SUMS.thread_bytes_of_pieces) for t in ROW_SUMS.pieces if t < whole]
    if whole <= ROW_SUMS.max_whole:
        pieces.append((whole, ROW_SUMS.thread_bytes_of_rows))
    for (tile, held), count in choices(pieces, ROW_SUMS.rows):
        warps = count * tile * shape.element // (held * target.lanes)
        if 1 <= warps <= target.block_threads // target.lanes:
            yield _schedule(form, shape, {lane: tile, rows: count}, warps, target)


def _schedule(form: Form, shape: Shape, tiles: dict[Axis, int], warps: int, target: Target) -> Schedule:
    most = {a: n for a in shape.inner if (n := dims.static(a.extent)) is not None}
    every = dict.fromkeys((*shape.grid, *shape.inner), 1) | tiles
    made = schedule_of_blocks(form, shape, ProductBlocks(every, warps, 1), most, multiplied=False)
    return made.changed(hoisted_bytes=GPU_ROWS.max_hoisted_bytes_per_thread * warps * target.lanes)


def _is_legal(form: Form, schedule: Schedule) -> bool:
    try:
        check_roles(form, schedule)
    except IllegalSchedule:
        return False
    return True


def _alike(a: Schedule, b: Schedule) -> bool:
    return (a.tiling.classes, a.launch.warps) == (b.tiling.classes, b.launch.warps)
