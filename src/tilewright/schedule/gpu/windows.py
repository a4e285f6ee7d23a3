"""Schedules that are proposed for windows without matrices (depthwise convolutions), for a clock to decide.

Taps are written out (`form.unrolled_sums`), line by line or all at once. A block has channels, or whatever lies along
memory, and places of a line, or one place of several lines; a thread has several results side by side, which share what
they read.

    seconds = launch + max(terms) + loss * sum(other terms) + steps of a thread + elements that it reads
    terms   = bytes from memory / bandwidth, lines of all loads and stores of a core / lines that its cache gives,
              instructions / their rate

where an access of a warp takes a line at least, and one across memory one for each element of a thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product as choices

from tilewright.analysis.size_hints import SizeHints
from tilewright.form.steps import take
from tilewright.form.unrolled_sums import UNROLL, is_window, taps_of
from tilewright.ir.dtype import f16
from tilewright.ir.expr import Axis, Expr, axes_of, axis, substitute, walk
from tilewright.ir.form import Form
from tilewright.ir.schedule import Schedule
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.rounding import next_power_of_two
from tilewright.schedule.scheduler import Comparison, Solution
from tilewright.target import MemoryKind, Target
from tilewright.tuning.search_limits import PROPOSALS
from tilewright.tuning.thresholds import FORMS, GPU_COST

from .block_memory import ProductBlocks
from .block_shape import shape_of
from .blocks import schedule_of_blocks
from .matmul_cost import bytes_once

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
    across = _across(form, lane, line)
    for count, lines in choices(PROPOSALS.results_side_by_side, _lines_at_once(form)):
        written = take(UNROLL, form, target, hints, {line: count, **lines})
        if written is form:
            continue
        places = next((a for a in written.classes() if a not in form.classes()), line)
        work = WindowWork.of(written, lane, hints)
        for beside, most in ((places, PROPOSALS.max_kept_windows), (across, PROPOSALS.max_kept_across)):
            made = [
                (seconds_of(work, blocks, target, hints), blocks)
                for blocks in (_blocks(written, lane, beside, target) if beside is not None else ())
                if not lines or _may_wait_once(work, blocks, target, hints)
            ]
            for n, (seconds, blocks) in enumerate(sorted(made, key=lambda m: m[0])[:most]):
                own, schedule = _completed(written, blocks, work.is_along, by)
                kept.append(Solution(schedule, own, seconds, found.rows))
                if across is not None and beside is places and n < PROPOSALS.max_kept_walks:
                    kept += _walked(kept[-1], work, blocks, across, by)
    return sorted(kept, key=lambda s: s.seconds)[: PROPOSALS.max_kept]


def _completed(form: Form, blocks: ProductBlocks, along: bool, by: Comparison) -> tuple[Form, Schedule]:
    """The schedule of blocks. Products go into their sums in one step each, as in a library's convolution."""
    schedule = schedule_of_blocks(form, shape_of(form, by.hints), blocks, {}, multiplied=False)
    own, schedule = by.completed(form, schedule)
    memory, math = replace(schedule.memory, own_copies=along), replace(schedule.math, contracted=True)
    reductions = replace(schedule.reductions, term_by_term=bool(own.folds))
    return own, replace(schedule, reductions=reductions, memory=memory, math=math)


def _walked(
    single: Solution, work: WindowWork, blocks: ProductBlocks, rows: Axis, by: Comparison
) -> Iterator[Solution]:
    """The same where a thread walks over `rows`, with weights in registers, and the lines of the image that the next
    row has too: where all taps are written out, and registers hold this."""
    target, hints = by.target, by.hints
    extent = dims.static(rows.extent)
    if single.form.folds or extent is None or work.products > PROPOSALS.max_walked_products:
        return
    if work.registers(blocks, rows, target) > target.vector_registers:
        return
    plans = single.schedule.tiling.classes
    for steps in PROPOSALS.window_rows:
        if extent % steps == 0:
            walked = replace(next(c for c in plans if c.axis == rows), chunk=steps, tile=1)
            classes = (*(c for c in plans if c.axis != rows), walked)
            schedule = single.schedule.changed(classes=classes, carried=True)
            seconds = seconds_of(work, blocks, target, hints, RowWalk(rows, steps))
            yield Solution(schedule, single.form, seconds, single.rows)


def is_written_out(form: Form) -> bool:
    """Whether a form's windows are written out."""
    return any(step.name == UNROLL for step in form.steps)


@dataclass(frozen=True, slots=True)
class _Read:
    """One read of a form, which a thread does so many `times` for each of its elements: whether it differs along the
    lane, and lies along it; the read itself."""

    times: int
    across: bool
    along: bool
    read: Expr

    def moves(self, rows: Axis) -> bool:
        """Whether it reads something else in each row."""
        return axis(rows) in axes_of(self.read)

    def next_row(self, rows: Axis) -> Expr:
        """What it reads in the next row."""
        return substitute(self.read, {axis(rows): dims.add(axis(rows), dims.ONE)})


@dataclass(frozen=True, slots=True)
class RowWalk:
    """A thread's way over so many rows, one after the other."""

    rows: Axis
    steps: int


@dataclass(frozen=True, slots=True, eq=False)
class WindowWork:
    """What kernels of a form do whose windows are written out, whatever their blocks: reads, and products for each
    element of a thread."""

    form: Form
    lane: Axis
    reads: tuple[_Read, ...]
    products: int
    moved: int
    """Bytes that are read and written at least."""

    @classmethod
    def of(cls, form: Form, lane: Axis, hints: SizeHints) -> WindowWork:
        """Of a form that is written out. Results side by side share what they read."""
        bodies = [
            (b, math.prod(dims.static(a.extent) or 1 for a in i.reduce)) for i in form.items for b in i.body
        ]
        often = {x: n for b, n in bodies for x in walk(b) if x.op == "read" and isinstance(x.value, int)}
        products = sum(n for b, n in bodies for x in walk(b) if x.op == "mul" and x.dtype.is_float)
        reads = tuple(
            _Read(n, axis(lane) in axes_of(x), dims.coefficient(x.args[0], axis(lane)) is dims.ONE, x)
            for x, n in often.items()
        )
        return cls(form, lane, reads, products, bytes_once(form, hints))

    @property
    def steps(self) -> int:
        """How often a thread waits for memory."""
        return max((x.times for x in self.reads), default=1)

    @property
    def is_along(self) -> bool:
        """Whether all that differs along the lane lies along it."""
        return all(x.along for x in self.reads if x.across)

    def held(self, blocks: ProductBlocks, target: Target) -> float:
        """Elements of each result that a thread has."""
        kept = math.prod(blocks.tiles[a] for a in self.form.outputs[0].kept)
        return max(1.0, kept / (blocks.warps * target.lanes))

    def count(self, blocks: ProductBlocks, hints: SizeHints) -> int:
        """Blocks of a launch."""
        kept = self.form.outputs[0].kept
        return math.prod(-(-max(1, hints.estimate(a.extent)) // blocks.tiles[a]) for a in kept)

    def elements(self, held: float) -> float:
        """What a thread reads that has so many elements of each result."""
        return sum(x.times * (held if x.across else 1.0) for x in self.reads)

    def instructions(self, held: float) -> float:
        """Of such a thread: products with their additions, halves that become singles, loads and what is around."""
        loads = GPU_COST.window_load_instructions * sum(x.times for x in self.reads)
        return self.products * held + self.elements(held) + loads + GPU_COST.window_thread_instructions

    def lines(self, blocks: ProductBlocks, target: Target) -> float:
        """Lines of the first cache that loads and stores of a warp take: at least one for each of the runs along the
        lane that do not follow each other in memory."""
        held = self.held(blocks, target)
        along = blocks.tiles[self.lane]
        steps = [self._step(a) for a in self.form.outputs[0].kept if a != self.lane and blocks.tiles[a] > 1]
        runs = 1.0 if along in steps else max(1.0, held * target.lanes / along)
        whole = max(runs, held * WINDOW_BYTES * target.lanes / GPU_COST.line_bytes)
        apart = max(whole, held)
        loads = sum(x.times * (whole if x.along else apart if x.across else 1.0) for x in self.reads)
        return loads + len(self.form.outputs) * whole

    def _step(self, a: Axis) -> int | None:
        """How far neighbours along a class lie apart in the first result."""
        step = dims.coefficient(self.form.outputs[0].offset, axis(a))
        return None if step is None else dims.static(step)

    def registers(self, blocks: ProductBlocks, rows: Axis, target: Target) -> float:
        """Of a thread that walks over rows: what it keeps of each read, what it loads for the next row, what it makes,
        and what is around."""
        held = self.held(blocks, target)
        kept = self.elements(held) + self.in_a_row(rows).elements(held) + held * len(self.form.outputs)
        return kept + GPU_COST.window_thread_registers

    def in_a_row(self, rows: Axis) -> WindowWork:
        """What is left to do in each row of a walk: reads that neither all rows share nor the row before had."""
        moving = [x for x in self.reads if x.moves(rows)]
        had = {x.read for x in moving}
        fresh = tuple(x for x in moving if x.next_row(rows) not in had)
        return replace(self, reads=fresh)


def window_seconds(form: Form, schedule: Schedule, target: Target, hints: SizeHints) -> float:
    """Modelled seconds of one launch, for windows that are written out."""
    tiles = {c.axis: c.tile for c in schedule.tiling.classes}
    lane = schedule.tiling.lane
    assert lane is not None, "windows are proposed along one"
    blocks = ProductBlocks(tiles, schedule.launch.warps, 1)
    walked = [RowWalk(c.axis, c.chunk) for c in schedule.tiling.classes if c.chunk > c.tile]
    walk = walked[0] if walked and schedule.memory.carried else None
    return seconds_of(WindowWork.of(form, lane, hints), blocks, target, hints, walk)


def seconds_of(
    work: WindowWork, blocks: ProductBlocks, target: Target, hints: SizeHints, walk: RowWalk | None = None
) -> float:
    """Modelled seconds of one launch of such blocks, whose threads may walk over rows."""
    count, held = work.count(blocks, hints), work.held(blocks, target)
    near, reached = target.level(MemoryKind.SHARED), min(1.0, target.alone * count / target.cores)
    warps = blocks.warps * -(-count // target.cores)
    row = work if walk is None else work.in_a_row(walk.rows)
    begun = 0.0 if walk is None else work.elements(held) / walk.steps
    """Elements that a walk begins with, for each of its rows."""
    line_bytes = row.lines(blocks, target) * warps * GPU_COST.line_bytes * target.cores
    issued = (row.instructions(held) + begun) * warps * target.lanes * target.cores
    terms = (
        work.moved / (target.device.bandwidth * reached),
        0.0 if near is None else line_bytes / near.bandwidth,
        2 * issued / target.flops,
    )
    others = GPU_COST.window_loss_ratio * (sum(terms) - max(terms))
    alone = work.steps * GPU_COST.window_step_seconds + work.elements(held) * GPU_COST.window_element_seconds
    alone += 0.0 if walk is None else walk.steps * GPU_COST.window_step_seconds
    return target.launch_seconds + max(terms) + others + alone


def _may_wait_once(work: WindowWork, blocks: ProductBlocks, target: Target, hints: SizeHints) -> bool:
    """Whether a thread's registers hold all lines of a window, and a core has so few warps that they wait."""
    warps = blocks.warps * work.count(blocks, hints) / target.cores
    read = work.elements(work.held(blocks, target)) * WINDOW_BYTES
    return warps <= GPU_COST.max_waiting_warps and read <= GPU_COST.max_window_bytes


def _lines_at_once(form: Form) -> list[dict[Axis, int]]:
    """Classes of taps that may be written out with the innermost one, by their numbers; none first."""
    large = [i for i in form.folds.values() if taps_of(i) > FORMS.max_taps_at_once]
    outer = {a: dims.static(a.extent) or 1 for i in large for a in i.reduce[:-1]}
    return [{}, outer] if outer else [{}]


def _line(form: Form, lane: Axis | None) -> Axis | None:
    """The class along which windows lie closest that is not the lane; one with a border, if there are borders."""
    bordered = {a.value for i in form.folds.values() for b in i.body for x in walk(b) if x.op == "where"
                for a in walk(x.args[0]) if a.op == "axis"}  # fmt: skip
    near = _steps(form)
    known = [a for a in near if a != lane and dims.static(a.extent) is not None]
    return min((a for a in known if not bordered or a in bordered), key=lambda a: near[a], default=None)


def _across(form: Form, lane: Axis, line: Axis) -> Axis | None:
    """The class of lines that are next to each other, whose windows have lines in common."""
    near = {a: n for a, n in _steps(form).items() if a not in (lane, line)}
    taps = max(len([a for a in i.reduce if a.extent is not dims.ONE]) for i in form.folds.values())
    return min(near, key=lambda a: near[a], default=None) if taps > 1 else None


def _steps(form: Form) -> dict[Axis, int]:
    """How far neighbours of the first result lie apart along each of its classes, where that is known."""
    steps = {a: dims.coefficient(form.outputs[0].offset, axis(a)) for a in form.outputs[0].kept}
    known = {a: None if step is None else dims.static(step) for a, step in steps.items()}
    return {a: step for a, step in known.items() if step}


def _blocks(form: Form, lane: Axis, beside: Axis, target: Target) -> Iterator[ProductBlocks]:
    """Blocks along the lane and one other class in which a thread has one access of the lane for each of its results,
    or part of one."""
    access = target.vector_bytes // min(v.dtype.bytes for v in form.params)
    wide, long = (next_power_of_two(dims.static(a.extent) or PROPOSALS.lanes[-1]) for a in (lane, beside))
    options = choices(PROPOSALS.lanes, PROPOSALS.window_warps, PROPOSALS.window_access_parts)
    found = {
        (width, min(long, warps * target.lanes * access // (width * part)), warps)
        for width, warps, part in options
        if width <= wide
    }
    for width, places, warps in sorted(found):
        if places and width * places >= warps * target.lanes:
            yield ProductBlocks(dict.fromkeys(form.classes(), 1) | {lane: width, beside: places}, warps, 1)
