"""What a block without products needs of the shared memory, and schedules that fit it.

Where a target's loops copy the blocks of later steps into shared memory, each load has room there for every stage but
the last. What is read along one class and written along another is turned there. Blocks with products count by
themselves (`matmul`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.expr import Axis, axes_of, axis, walk
from tilewright.ir.form import Form
from tilewright.ir.program import Collapse, Dot, Load, Loop, Stmt, Store, TileProgram
from tilewright.ir.schedule import ClassPlan, Role, Schedule
from tilewright.ir.sizes import dims
from tilewright.lower.legalise.gpu import loads_ahead
from tilewright.schedule.scheduler import Lowered
from tilewright.target import MemoryKind, Target
from tilewright.tuning.thresholds import GPU_COST


def fit_shared_memory(form: Form, schedule: Schedule, target: Target, lowered: Lowered) -> Schedule:
    """`schedule`, or where a block of it needs more shared memory than there is, one with fewer stages or smaller
    tiles; the smallest if none fits. The form is `lowered` only where it might not fit."""
    level = target.level(MemoryKind.SHARED)
    if level is None or schedule.math.contracted or _most_bytes(form, schedule, target) <= level.capacity:
        return schedule
    while shared_bytes(lowered(form, schedule), target) > level.capacity:
        less = _smaller(schedule, target)
        if less is None:
            break
        schedule = less
    return schedule


def shared_bytes(program: TileProgram, target: Target) -> int:
    """Shared memory of a block: an estimate, from above where loops copy ahead, each loop after the other. What
    layouts of sums are converted through is left out."""
    if any(isinstance(s, Dot) for s in program.statements()):
        return 0
    tiles = {s.axis: s.tile for s in program.loops()}
    waiting = 0
    if target.copies_ahead:
        looped = (_flat(s.body) for s in program.loops() if loads_ahead(s))
        loads = ([_block(s, tiles) for s in body if isinstance(s, Load)] for body in looped)
        waiting = max(map(sum, loads), default=0) * (program.stages - 1)
    wide = target.lanes * target.vector_bytes // min((b.dtype.bytes for b in program.params), default=1)
    merged = (_merged(s, tiles, program.warps, wide) for s in program.statements() if isinstance(s, Collapse))
    return waiting + max(_turned(program, tiles), max(merged, default=0))


def _most_bytes(form: Form, schedule: Schedule, target: Target) -> int:
    """What a block needs at most, by the form alone."""
    tiles = {c.axis: c.tile for c in schedule.tiling.classes}
    waiting = turned = 0
    for item in form.items:
        size = _volume(item.axes, tiles)
        inside = {x for root in item.roots for x in walk(root)}
        chosen = any(x.op == "where" for x in inside)  # reads get its condition for a mask, and so its axes
        for x in inside:
            if x.op == "read" and isinstance(x.value, int):
                own = [a.value for a in axes_of(x) if isinstance(a.value, Axis)]
                elements = GPU_COST.loads_per_choice * size if chosen else _volume(own, tiles)
                waiting += elements * form.params[x.value].dtype.bytes
        if not item.is_fold:
            turned = max(turned, size * form.params[item.param].dtype.bytes)
    return waiting * (schedule.launch.stages - 1 if target.copies_ahead else 0) + turned


def _flat(body: Sequence[Stmt]) -> list[Stmt]:
    """The statements of a loop that run in each step, whatever axes they bind."""
    return [x for s in body for x in (_flat(s.body) if isinstance(s, Loop) else [s])]


def _block(s: Load, tiles: dict[Axis, int]) -> int:
    """Bytes that a load has in shared memory for one step: none if threads read less than can be copied."""
    own = _axes(s, tiles)
    size = s.buffer.dtype.bytes
    return _volume(own, tiles) * size if size >= GPU_COST.min_copy_bytes or _along(s, own) else 0


def _turned(program: TileProgram, tiles: dict[Axis, int]) -> int:
    """Bytes through which a block goes that is written along another axis than is read."""
    accesses = [s for s in program.statements() if isinstance(s, (Load, Store))]
    planes = [(s, own) for s in accesses if len(own := _axes(s, tiles)) > 1]
    if len({a for s, own in planes for a in _along(s, own)}) < 2:
        return 0
    return max(
        (_volume(own, tiles) * s.value.dtype.bytes for s, own in planes if isinstance(s, Store)), default=0
    )


def _merged(s: Collapse, tiles: dict[Axis, int], warps: int, wide: int) -> int:
    """Bytes through which warps tell each other what they have of a fold: those that do not lie side by side along the
    rest of the block, where a warp takes `wide` elements."""
    held = max(_volume(v.axes, tiles) for v in s.vars)
    parts = min(warps // max(1, held // wide), _volume(s.axes, tiles))
    return sum(_volume(v.axes, tiles) * v.dtype.bytes for v in s.vars) * parts if parts > 1 else 0


def _axes(s: Load | Store, tiles: dict[Axis, int]) -> list[Axis]:
    """The block axes of an access."""
    return [a for a in (s.var.axes if isinstance(s, Load) else s.axes) if tiles.get(a, 1) > 1]


def _along(s: Load | Store, own: Sequence[Axis]) -> list[Axis]:
    """The block axes along which an access is contiguous."""
    return [a for a in own if dims.coefficient(s.offset, axis(a)) is dims.ONE]


def _volume(axes: Sequence[Axis], tiles: dict[Axis, int]) -> int:
    size = 1
    for a in set(axes):
        size *= tiles.get(a, 1)
    return size


def _smaller(schedule: Schedule, target: Target) -> Schedule | None:
    """The next schedule that needs less shared memory: a stage less, which leaves about as much under way as fits, or
    half of the longest tile."""
    if schedule.launch.stages > 1 and target.copies_ahead:
        return schedule.changed(stages=schedule.launch.stages - 1)
    free = [c for c in schedule.tiling.classes if c.role is not Role.RESIDENT and c.tile > 1]
    longest = max(free, key=lambda c: c.tile, default=None)
    if longest is None:
        return None
    return schedule.changed(classes=tuple(_halved(c) if c is longest else c for c in schedule.tiling.classes))


def _halved(c: ClassPlan) -> ClassPlan:
    tile = c.tile // 2
    return replace(c, tile=tile, chunk=(tile if tile > 1 else 0) if c.chunk == c.tile else c.chunk)
