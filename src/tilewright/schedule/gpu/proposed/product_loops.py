"""Schedules that are proposed for loops with products of blocks, for a clock to decide: the usual one with its warps
specialised, and the same form in other blocks, of which the model knows less than of plain products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tilewright.analysis.contraction import product_sides
from tilewright.errors import IllegalSchedule
from tilewright.form.implied import drop_implied, listed_tiles
from tilewright.form.wide_sums import with_wide_sums
from tilewright.ir.form import Form
from tilewright.ir.schedule import ClassPlan, Role, Schedule
from tilewright.ir.sizes import dims
from tilewright.lower.legality import check_roles
from tilewright.lower.lower import lower
from tilewright.lower.specialise.analyse import specialise
from tilewright.lower.specialise.plan import STRIP_ROWS, WARPS_PER_STRIP
from tilewright.schedule.gpu.block_shape import shape_of
from tilewright.schedule.gpu.blocks import schedule_of_blocks
from tilewright.schedule.gpu.capacity import check_capacity
from tilewright.schedule.gpu.matmul import TileLimits, other_blocks
from tilewright.schedule.gpu.matmul_cost import plain_product
from tilewright.schedule.scheduler import Comparison, Solution
from tilewright.target import MemoryKind, Target
from tilewright.tuning.search_limits import OTHER_BLOCKS, SPECIALISED


def specialised_proposals(found: Solution, by: Comparison) -> Sequence[Solution]:
    """The same form and the same order of all that is computed, in blocks for specialised warps; none where these are
    not understood, or not had."""
    target, tiling = by.target, found.schedule.tiling
    if not target.specialised_warps:
        return ()
    blocks = [c for c in tiling.classes if c.tile > 1]
    rows = [c.axis for c in blocks if c.role is Role.GRID]
    if len(rows) != 1 or sum(c.role is Role.STREAMED for c in blocks) != 1:
        return ()
    # Fewer rows would leave a warp group of each block without work.
    count = dims.static(rows[0].extent)
    if count is not None and count <= SPECIALISED.rows - STRIP_ROWS:
        return ()
    made: list[Solution] = []
    for keys in SPECIALISED.keys:
        legal = (s for s in _with_slots(found.schedule, keys) if _is_legal(found.form, s, target))
        best = next(legal, None)
        made += [] if best is None else [replace(found, schedule=best)]
    return made


def other_block_proposals(found: Solution, by: Comparison) -> Sequence[Solution]:
    """The same form in other blocks, the fastest by the model first; none of a plain product, which has proposals of
    its own, or without a loop."""
    target, hints, usual = by.target, by.hints, found.schedule
    multiplies = any(product_sides(i) is not None for i in found.form.folds.values())
    if not multiplies or usual.memory.warp_specialised:
        return ()
    if plain_product(by.take("merge_sides", found.form)) is not None:
        return ()
    form = drop_implied(found.form)
    shape = shape_of(form, hints)
    most = {a: n for a in shape.inner if (n := dims.static(a.extent)) is not None}
    blocks = other_blocks(form, shape, TileLimits(most, listed_tiles(found.form)), target, hints)
    made: list[Solution] = []
    for seconds, c in blocks:
        if seconds > OTHER_BLOCKS.max_modelled_ratio * blocks[0][0] or len(made) == OTHER_BLOCKS.max_kept:
            break
        plain = schedule_of_blocks(form, shape, c, most, multiplied=True)
        own, schedule = by.completed(found.form, plain.changed(descriptors=usual.memory.descriptors))
        looped = any(p.role is Role.STREAMED for p in schedule.tiling.classes)
        if own == found.form and looped and schedule.tiling != usual.tiling and _fits(own, schedule, target):
            made.append(Solution(replace(schedule, form_steps=usual.form_steps), own, seconds, found.rows))
    return made


def _fits(form: Form, schedule: Schedule, target: Target) -> bool:
    try:
        check_roles(form, schedule)
        check_capacity(form, schedule, target)
    except IllegalSchedule:
        return False
    return True


def _with_slots(schedule: Schedule, keys: int) -> Iterator[Schedule]:
    """The schedule with blocks of so many keys, and with each number of buffers."""
    classes = tuple(_tiled(c, keys) for c in schedule.tiling.classes)
    warps = SPECIALISED.rows * WARPS_PER_STRIP // STRIP_ROWS
    for slots in SPECIALISED.slots:
        yield schedule.changed(
            classes=classes, warps=warps, stages=slots, descriptors=True, warp_specialised=True
        )


def _tiled(c: ClassPlan, keys: int) -> ClassPlan:
    if c.tile > 1 and c.role is Role.GRID:
        return replace(c, tile=SPECIALISED.rows, chunk=SPECIALISED.rows)
    return replace(c, tile=keys) if c.tile > 1 and c.role is Role.STREAMED else c


def _is_legal(form: Form, schedule: Schedule, target: Target) -> bool:
    try:
        check_capacity(form, schedule, target)
        program = lower(with_wide_sums(form, schedule), schedule)
        needed = specialise(program).shared_bytes
    except IllegalSchedule:
        return False
    near = target.level(MemoryKind.SHARED)
    return near is None or needed <= near.capacity
