"""Schedules that are proposed for windows without matrices (depthwise convolutions), for a clock to decide.

Taps are written out (`form.unrolled_sums`). A block has channels, or whatever lies along memory, and places of a line;
a thread has several results side by side, which share what they read. The model counts bytes:

    seconds = launch + max(terms) + loss * min(terms)
    terms   = bytes from memory / bandwidth, bytes of all loads and stores / bandwidth of the first cache

where narrow accesses take longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product as choices

from tilewright.analysis.size_hints import SizeHints
from tilewright.form.steps import take
from tilewright.form.unrolled_sums import is_window
from tilewright.ir.dtype import f16
from tilewright.ir.expr import Axis, axis, walk
from tilewright.ir.form import Form
from tilewright.ir.schedule import Schedule
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.rounding import next_power_of_two
from tilewright.schedule.scheduler import Comparison, Solution
from tilewright.target import MemoryKind, Target
from tilewright.tuning.search_limits import PROPOSALS
from tilewright.tuning.thresholds import GPU_COST, GPU_MATMUL

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
    for count in PROPOSALS.results_side_by_side:
        made: list[Solution] = []
        written = take(STEP, form, target, hints, {line: count})
        if written is form:
            continue
        places = next((a for a in written.classes() if a not in form.classes()), line)
        for blocks in _blocks(written, lane, places, target):
            schedule = schedule_of_blocks(written, shape_of(written, hints), blocks, {}, multiplied=False)
            own, schedule = by.completed(written, schedule)
            made.append(Solution(schedule, own, window_seconds(own, schedule, target, hints), found.rows))
        kept += sorted(made, key=lambda s: s.seconds)[
            : PROPOSALS.max_kept // len(PROPOSALS.results_side_by_side)
        ]
    return sorted(kept, key=lambda s: s.seconds)


def is_written_out(form: Form) -> bool:
    """Whether a form's windows are written out."""
    return any(step.name == STEP for step in form.steps)


def window_seconds(form: Form, schedule: Schedule, target: Target, hints: SizeHints) -> float:
    """Modelled seconds of one launch, for windows that are written out."""
    tiles = {c.axis: c.tile for c in schedule.tiling.classes}
    loads = {x: form.params[x.value].dtype.bytes for i in form.items for b in i.body for x in walk(b)
             if x.op == "read" and isinstance(x.value, int)}  # fmt: skip
    bytes_moved = 0
    for x, size in loads.items():
        own = {a.value for a in walk(x) if a.op == "axis"}
        bytes_moved += size * _elements([a for a in tiles if a in own], tiles, hints)
    for i in form.outputs:
        bytes_moved += form.params[i.param].dtype.bytes * _elements(i.kept, tiles, hints)
    blocks = 1
    for a, tile in tiles.items():
        blocks *= -(-max(1, hints.estimate(a.extent)) // tile)
    busy = min(1.0, blocks / target.cores)
    near, moved = target.level(MemoryKind.SHARED), bytes_once(form, hints)
    threads = schedule.launch.warps * target.lanes
    access = min(target.vector_bytes, WINDOW_BYTES * math.prod(tiles.values()) // threads)
    issued = 1 + GPU_COST.short_access_ratio * (target.vector_bytes / max(1, access) - 1)
    first = issued * bytes_moved / (near.bandwidth * busy) if near is not None else 0.0
    reached = min(1.0, target.alone * blocks / target.cores)
    last = moved / (target.device.bandwidth * reached)
    return target.launch_seconds + max(last, first) + GPU_MATMUL.overlap_loss_ratio * min(last, first)


def _elements(axes: Sequence[Axis], tiles: dict[Axis, int], hints: SizeHints) -> int:
    """Elements of whole tiles."""
    size = 1
    for a in axes:
        size *= -(-max(1, hints.estimate(a.extent)) // tiles[a]) * tiles[a]
    return size


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
