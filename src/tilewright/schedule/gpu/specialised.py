"""Schedules that are proposed for a loop over keys: the usual one with its warps specialised, for a clock to decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tilewright.errors import IllegalSchedule
from tilewright.form.wide_sums import with_wide_sums
from tilewright.ir.form import Form
from tilewright.ir.schedule import ClassPlan, Role, Schedule
from tilewright.ir.sizes import dims
from tilewright.lower.lower import lower
from tilewright.lower.specialise.analyse import specialise
from tilewright.lower.specialise.plan import STRIP_ROWS, WARPS_PER_STRIP
from tilewright.schedule.scheduler import Comparison, Solution
from tilewright.target import MemoryKind, Target
from tilewright.tuning.search_limits import SPECIALISED

from .capacity import check_capacity


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
