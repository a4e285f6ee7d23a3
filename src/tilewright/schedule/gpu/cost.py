"""Modelled time of a kernel on a machine whose threads share grid points: bytes, special functions, flops, waves.

Blocks run in waves over the cores. Memory is only as fast as the bytes that are under way allow (Little's law), and a
loop of dependent steps waits for memory once per step and stage.
"""

from __future__ import annotations

import math

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.dtype import i64
from tilewright.ir.expr import SCALARS, SPECIAL_COST, Expr, axes_of, axis, walk
from tilewright.ir.form import Form
from tilewright.ir.schedule import Role, Schedule
from tilewright.schedule.cpu.cost import traffic
from tilewright.schedule.cpu.vectors import points
from tilewright.target import MemoryKind, Target
from tilewright.tuning.thresholds import GPU_COST

from .matmul import product_seconds


def block_seconds(form: Form, schedule: Schedule, target: Target, hints: SizeHints) -> float:
    """Estimated seconds of one launch, symbols taken as typical sizes."""
    moved = traffic(form, hints)
    cache = target.level(MemoryKind.L2)
    near = cache is not None and moved < cache.lasting_bytes
    bandwidth = cache.bandwidth if near and cache is not None else target.device.bandwidth
    count, steps, held = 1, 1, 1
    for c in schedule.tiling.classes:
        extent = max(1, hints.estimate(c.axis.extent))
        turns = -(-extent // c.tile)
        if c.role is Role.GRID:
            count *= turns
        elif c.role is not Role.RESIDENT:
            steps *= turns
        held *= c.tile
    threads = schedule.launch.warps * target.lanes
    places = target.cores * max(1, target.threads // threads)
    under_way = (
        min(count, places) * held * _side_by_side(form) * 4 * (schedule.launch.stages if steps > 1 else 1)
    )
    reached = target.alone * min(count, target.cores) / target.cores
    needed = target.device.bandwidth * target.latency
    share = min(1.0, reached, under_way / needed) if needed else min(1.0, reached)
    waves = count / places
    tail = -(-count // places) / waves if waves > 1 else 1.0
    waiting = steps * target.latency / schedule.launch.stages * max(1.0, waves)
    memory = moved / (bandwidth * share) * tail
    products = product_seconds(form, schedule, target, hints)
    if products is not None:
        return max(moved / (bandwidth * min(1.0, reached)), products) + target.launch_seconds
    special, plain = _work(form, hints)
    busy = min(1.0, count * threads / (target.cores * target.lanes * 4))
    working = max(special / target.special, plain / target.flops) / busy
    folding = -(-count // target.cores) * _row_parts(form, schedule, hints) * GPU_COST.row_fold_seconds
    return max(memory, waiting, working * tail, folding) + target.launch_seconds


def _row_parts(form: Form, schedule: Schedule, hints: SizeHints) -> int:
    """Parts that the warps of a block have of columns whose rows are folded. Columns lie side by side in the lanes;
    each row is another warp's, as far as there are as many, and its part goes through shared memory."""
    tiles = {c.axis: c.tile for c in schedule.tiling.classes}
    turns = {
        c.axis: -(-max(1, hints.estimate(c.axis.extent)) // c.tile)
        for c in schedule.tiling.classes
        if c.role not in (Role.GRID, Role.RESIDENT)
    }
    lane = schedule.tiling.lane
    parts = 0
    for i in form.items:
        if i.reduction is None or lane is None or lane not in i.kept or tiles.get(lane, 1) == 1:
            continue
        rows = math.prod(tiles.get(a, 1) for a in i.reduce)
        if rows > 1:
            columns = math.prod(tiles.get(a, 1) * turns.get(a, 1) for a in i.kept)
            steps = 1 if schedule.per_lane(i.id) else math.prod(turns.get(a, 1) for a in i.reduce)
            parts += min(rows, schedule.launch.warps) * columns * steps
    return parts


def _side_by_side(form: Form) -> int:
    """Rows that are being loaded where folds take chunks of them: all at once, or none while the last are worked on."""
    found = [2]
    for i in form.items:
        if i.reduction is not None and i.reduction.step:
            along = {axis(a) for a in i.reduce}
            found.append(len({o for _, o in i.accesses() if axes_of(o) & along}))
    return max(found) // 2


def _work(form: Form, hints: SizeHints) -> tuple[float, float]:
    """Special functions and plain operations of all evaluations."""
    special = plain = 0.0
    for item in form.items:
        seen: set[Expr] = set()
        count = points(item, hints)
        steps = item.reduction.step if item.reduction is not None else ()
        for x in (x for root in (*item.body, *steps) for x in walk(root)):
            if x in seen or x.op not in SCALARS or x.dtype is i64:
                continue
            seen.add(x)
            if SCALARS[x.op].cost >= SPECIAL_COST:
                special += count * SCALARS[x.op].cost / SPECIAL_COST
            else:
                plain += count * SCALARS[x.op].cost
    return special, plain
