"""Schedules that are proposed for windows without matrices (depthwise convolutions), for a clock to decide.

Taps are written out (`form.unrolled_sums`), line by line or all at once. A block has channels, or whatever lies along
memory, and places of a line; a thread has several results side by side, which share what they read.

    seconds = launch + max(terms) + loss * min(terms) + steps of a thread + elements that it reads
    terms   = bytes from memory / bandwidth, lines of all loads and stores of a core / lines that its cache gives

where an access of a warp takes a line at least, and one across memory one for each element of a thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product as choices

from tilewright.analysis.size_hints import SizeHints
from tilewright.form.steps import take
from tilewright.form.unrolled_sums import is_window, taps_of
from tilewright.ir.dtype import f16
from tilewright.ir.expr import Axis, axes_of, axis, walk
from tilewright.ir.form import Form
from tilewright.ir.schedule import Schedule
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.rounding import next_power_of_two
from tilewright.schedule.scheduler import Comparison, Solution, grid_points
from tilewright.target import MemoryKind, Target
from tilewright.tuning.search_limits import PROPOSALS
from tilewright.tuning.thresholds import FORMS, GPU_COST, GPU_MATMUL

from .block_memory import ProductBlocks
from .block_shape import shape_of
from .blocks import schedule_of_blocks
from .matmul_cost import bytes_once

STEP = "unroll_sums"
"""The step of a form that writes its windows out."""
WINDOW_BYTES = f16.bytes
"""Of an element: windows read halves (`form.unrolled_sums.is_window`)."""


def window_proposals(found: Solution, by: Comparison) -> Sequence[Solution]:
    """Other schedules of a form whose folds are windows, the fastest by the model first; none of another form."""
    form, target, hints = found.form, by.target, by.hints
    if not form.folds or not all(is_window(i, form) for i in form.folds.values()):
        return ()
    lane = shape_of(form, hints).lane
    line = _line(form, lane)
    if lane is None or line is None or any(lane not in o.kept for o in form.outputs):
        return ()
    kept: list[Solution] = []
    for count, lines in choices(PROPOSALS.results_side_by_side, _lines_at_once(form)):
        made: list[Solution] = []
        written = take(STEP, form, target, hints, {line: count, **lines})
        if written is form:
            continue
        places = next((a for a in written.classes() if a not in form.classes()), line)
        for blocks in _blocks(written, lane, places, target):
            schedule = schedule_of_blocks(written, shape_of(written, hints), blocks, {}, multiplied=False)
            own, schedule = by.completed(written, schedule)
            if not lines or _may_wait_once(own, schedule, target, hints):
                made.append(Solution(schedule, own, window_seconds(own, schedule, target, hints), found.rows))
        kept += sorted(made, key=lambda s: s.seconds)[: PROPOSALS.max_kept_windows]
    return sorted(kept, key=lambda s: s.seconds)[: PROPOSALS.max_kept]


def is_written_out(form: Form) -> bool:
    """Whether a form's windows are written out."""
    return any(step.name == STEP for step in form.steps)


@dataclass(frozen=True, slots=True)
class ThreadWork:
    """What a thread of a window's kernel does: steps one after the other, elements that it reads, and lines that its
    warp's loads and stores take of the first cache."""

    steps: int
    elements: float
    lines: float


def thread_work(form: Form, schedule: Schedule, target: Target) -> ThreadWork:
    """Of windows that are written out."""
    tiles = {c.axis: c.tile for c in schedule.tiling.classes}
    lane, warps = schedule.tiling.lane, schedule.launch.warps
    held = max(1.0, math.prod(tiles[a] for a in form.outputs[0].kept) / (warps * target.lanes))
    whole = max(1.0, held * WINDOW_BYTES * target.lanes / GPU_COST.line_bytes)
    elements, lines = 0.0, len(form.outputs) * whole
    # Results side by side share what they read.
    often = {x: math.prod(dims.static(a.extent) or 1 for a in i.reduce) for i in form.items for b in i.body
             for x in walk(b) if x.op == "read" and isinstance(x.value, int)}  # fmt: skip
    for x, times in often.items():
        across = lane is not None and axis(lane) in axes_of(x)
        along = lane is not None and dims.coefficient(x.args[0], axis(lane)) is dims.ONE
        elements += times * (held if across else 1.0)
        lines += times * (whole if along else held if across else 1.0)
    return ThreadWork(max(often.values(), default=1), elements, lines)


def window_seconds(form: Form, schedule: Schedule, target: Target, hints: SizeHints) -> float:
    """Modelled seconds of one launch, for windows that are written out."""
    work, blocks = thread_work(form, schedule, target), grid_points(schedule, hints)
    near, moved = target.level(MemoryKind.SHARED), bytes_once(form, hints)
    warps = schedule.launch.warps * -(-blocks // target.cores)
    first = 0.0 if near is None else work.lines * warps * GPU_COST.line_bytes * target.cores / near.bandwidth
    reached = min(1.0, target.alone * blocks / target.cores)
    last = moved / (target.device.bandwidth * reached)
    alone = work.steps * GPU_COST.window_step_seconds + work.elements * GPU_COST.window_element_seconds
    return target.launch_seconds + max(last, first) + GPU_MATMUL.overlap_loss_ratio * min(last, first) + alone


def _may_wait_once(form: Form, schedule: Schedule, target: Target, hints: SizeHints) -> bool:
    """Whether a thread's registers hold all lines of a window, and a core has so few warps that they wait."""
    warps = schedule.launch.warps * grid_points(schedule, hints) / target.cores
    read = thread_work(form, schedule, target).elements * WINDOW_BYTES
    return warps <= GPU_COST.max_waiting_warps and read <= GPU_COST.max_window_bytes


def _lines_at_once(form: Form) -> list[dict[Axis, int]]:
    """Classes of taps that may be written out with the innermost one, by their numbers; none first."""
    large = [i for i in form.folds.values() if taps_of(i) > FORMS.max_taps_at_once]
    outer = {a: dims.static(a.extent) or 1 for i in large for a in i.reduce[:-1]}
    return [{}, outer] if outer else [{}]


def _line(form: Form, lane: Axis | None) -> Axis | None:
    """The class along which windows lie closest that is not the lane; one with a border, if there are borders."""
    near: dict[Axis, int] = {}
    bordered = {a.value for i in form.folds.values() for b in i.body for x in walk(b) if x.op == "where"
             for a in walk(x.args[0]) if a.op == "axis"}  # fmt: skip
    for a in form.outputs[0].kept:
        step = dims.coefficient(form.outputs[0].offset, axis(a))
        known = None if step is None else dims.static(step)
        if a != lane and known and dims.static(a.extent) is not None and (not bordered or a in bordered):
            near[a] = known
    return min(near, key=lambda a: near[a], default=None)


def _blocks(form: Form, lane: Axis, line: Axis, target: Target) -> Iterator[ProductBlocks]:
    """Blocks in which each thread has one access of the lane for each of its results, or less where a line is short."""
    access = target.vector_bytes // min(v.dtype.bytes for v in form.params)
    wide, long = (next_power_of_two(dims.static(a.extent) or PROPOSALS.lanes[-1]) for a in (lane, line))
    for width, warps in choices(PROPOSALS.lanes, PROPOSALS.window_warps):
        places = min(long, warps * target.lanes * access // width)
        if width <= wide and places and width * places >= warps * target.lanes:
            yield ProductBlocks(dict.fromkeys(form.classes(), 1) | {lane: width, line: places}, warps, 1)
