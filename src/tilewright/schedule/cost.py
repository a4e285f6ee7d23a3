"""Modelled time of a scheduled kernel: bytes against bandwidth, instructions against issue rate, idle cores, launch.

The model filters and ranks; measurement decides where it is asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import dims
from ..ir.dtype import i64
from ..ir.expr import SCALARS, Axis, Expr, axes_of, axis, walk
from ..target import MemoryKind, Target
from ..tile.sizes import estimate
from .contract import contraction
from .form import Form, Item, folds_read
from .lower import lower
from .schedule import Role, Schedule
from .search import lanes, points
from .work import issued

STRIDED = 3
"""Instructions per element of an access that is not contiguous along the lane."""

OVERLAP = 4
"""Scalar computations of neighbouring points that a core keeps in flight."""

ISSUE = 8e9
"""Vector instructions per second of one core."""


def seconds(form: Form, schedule: Schedule, target: Target) -> float:
    """Estimated seconds of one launch, symbols taken as typical sizes."""
    cache = target.level(MemoryKind.L2)
    moved = traffic(form)
    fits = cache is not None and moved < cache.capacity // 2
    bandwidth = cache.bandwidth if fits and cache is not None else target.device.bandwidth
    width = lanes(target) if schedule.lane is not None else 1
    if any(contraction(t, form.params, lambda a: schedule.plan(a).tile) for t in form.folds.values()):
        work = issued(lower(form, schedule), width)
    else:
        work = sum(_instructions(i, schedule, width) * _repeats(i, form, schedule) for i in form.items)
    tasks = 1
    for c in schedule.classes:
        if c.role is Role.GRID:
            extent = estimate(c.axis.extent)
            tasks *= -(-extent // c.chunk) if c.chunk else max(1, extent)
    busy = min(target.cores, max(1, tasks))
    share = busy / target.cores
    slow = moved / (bandwidth * (share if fits else max(share, 0.8)))
    return max(slow, work / (ISSUE * busy)) + target.launch_seconds


def _repeats(item: Item, form: Form, schedule: Schedule) -> int:
    """How often a fold is computed again: once per step of the loops, over classes that it does not use, between which
    and the fold stands a loop over a class that it keeps."""
    order = [c for c in schedule.classes if c.role is Role.STREAMED]
    places = [k for k, c in enumerate(order) if c.axis in item.kept]
    if not item.is_fold or not places:
        return 1
    around = {a for i in form.items if item.id in folds_read(i.roots) for a in i.axes}
    loops = [c for c in order[: max(places)] if c.axis in around and c.axis not in item.axes]
    return math.prod(-(-estimate(c.axis.extent) // c.tile) for c in loops)


def _instructions(item: Item, schedule: Schedule, width: int) -> float:
    """Vector instructions of all evaluations of an item: each node once per point of the classes that it depends on,
    since lowering hoists it out of the other loops."""
    total = points(item) / _vectors(item.axes, schedule, width)
    seen: set[Expr] = set()
    for root in item.body:
        for x in walk(root):
            if x in seen or (x.op != "read" and (x.op not in SCALARS or x.dtype is i64)):
                continue
            seen.add(x)
            axes = [a.value for a in axes_of(x) if isinstance(a.value, Axis)]
            count = estimate(dims.prod(a.extent for a in axes))
            if x.op == "read":
                total += count * _access(x.args[0], axes, schedule, width)
            else:
                total += count * SCALARS[x.op].cost / _vectors(axes, schedule, width)
    if not item.is_fold:
        total += points(item) * _access(item.offset, item.kept, schedule, width)
    return total


def _vectors(axes: Sequence[Axis], schedule: Schedule, width: int) -> int:
    """Elements per instruction; scalar chains of different points overlap a little."""
    return width if schedule.lane is not None and schedule.lane in axes else min(width, OVERLAP)


def _access(offset: Expr, axes: Sequence[Axis], schedule: Schedule, width: int) -> float:
    """Instructions per element of one load or store."""
    lane = schedule.lane
    if lane is None or lane not in axes:
        return 1.0
    return 1.0 / width if dims.coefficient(offset, axis(lane)) in (dims.ONE, dims.ZERO) else STRIDED


def traffic(form: Form) -> int:
    """Bytes between memory and cores when each distinct access is made once per class that it uses (an estimate)."""
    total = 0
    seen: set[tuple[int, Expr]] = set()
    for item in form.items:
        for param, offset in item.accesses():
            if (param, offset) in seen:
                continue
            seen.add((param, offset))
            value = form.params[param]
            if any(x.op == "read" for x in walk(offset)):
                touched = points(item)
            else:
                used = axes_of(offset)
                touched = estimate(dims.prod(a.extent for a in item.axes if axis(a) in used))
            total += min(touched, 4 * max(1, estimate(value.numel))) * value.dtype.bytes
    return total
