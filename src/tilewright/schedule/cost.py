"""Modelled time of a scheduled kernel: bytes against bandwidth, instructions against issue rate, idle cores, launch.

The model filters and ranks; measurement decides where it is asked (design law 4.2).
"""

from __future__ import annotations

from ..ir import dims
from ..ir.expr import Expr, axes_of, axis, cost, walk
from ..target import MemoryKind, Target
from .form import Form, Item
from .schedule import Role, Schedule
from .search import estimate, lanes, points

STRIDED = 3
"""Instructions per element of an access that is not contiguous along the lane."""

ISSUE = 8e9
"""Vector instructions per second of one core."""


def seconds(form: Form, schedule: Schedule, target: Target) -> float:
    """Estimated seconds of one launch, symbols taken as typical sizes."""
    cache = target.level(MemoryKind.L2)
    moved = traffic(form)
    fits = cache is not None and moved < cache.capacity // 2
    bandwidth = cache.bandwidth if fits and cache is not None else target.device.bandwidth
    width = lanes(target) if schedule.lane is not None else 1
    work = sum(_instructions(i, schedule, width) for i in form.items)
    tasks = 1
    for c in schedule.classes:
        if c.role is Role.GRID:
            extent = estimate(c.axis.extent)
            tasks *= -(-extent // c.chunk) if c.chunk else max(1, extent)
    busy = min(target.cores, max(1, tasks))
    share = busy / target.cores
    slow = moved / (bandwidth * (share if fits else max(share, 0.8)))
    return max(slow, work / (ISSUE * busy)) + target.launch_seconds


def _instructions(item: Item, schedule: Schedule, width: int) -> float:
    """Vector instructions of all evaluations of an item."""
    body = sum(cost(b) for b in item.body) + len(item.body)
    per_vector, per_element = float(body), 0.0
    lane = schedule.lane
    for _, offset in item.accesses():
        if lane is None or lane not in item.axes:
            per_element += 1
        elif dims.coefficient(offset, axis(lane)) in (dims.ONE, dims.ZERO):
            per_vector += 1
        else:
            per_element += STRIDED
    vectors = width if lane is not None and lane in item.axes else 1
    return points(item) * (per_vector / vectors + per_element)


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
