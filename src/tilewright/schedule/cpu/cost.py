"""Modelled time of a scheduled kernel: bytes against bandwidth, instructions against issue rate, idle cores, launch.

The model filters and ranks; measurement decides where it is asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tilewright.analysis.contraction import contraction
from tilewright.analysis.runs import words_of
from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.dtype import i64
from tilewright.ir.expr import SCALARS, Axis, Expr, axes_of, axis, walk
from tilewright.ir.form import Form, Item, folds_read
from tilewright.ir.graph import Value
from tilewright.ir.schedule import Role, Schedule
from tilewright.ir.sizes import dims
from tilewright.lower.lower import lower
from tilewright.schedule.instructions import count_instructions
from tilewright.target import MemoryKind, Target
from tilewright.tuning.search_limits import SCHEDULES
from tilewright.tuning.thresholds import CONTRACTION, CPU_COST

from .vectors import points, vector_lanes


def vector_seconds(form: Form, schedule: Schedule, target: Target, hints: SizeHints) -> float:
    """Estimated seconds of one launch, symbols taken as typical sizes."""
    cache = target.level(MemoryKind.L2)
    moved = traffic(form, hints)
    fits = cache is not None and moved < cache.lasting_bytes
    bandwidth = cache.bandwidth if fits and cache is not None else target.device.bandwidth
    width = vector_lanes(target) if schedule.tiling.lane is not None else 1
    if any(contraction(t, form.params, lambda a: schedule.plan(a).tile) for t in form.folds.values()):
        work = count_instructions(lower(form, schedule), width, hints)
    else:
        repeats = _repeats(form, schedule, hints)
        work = sum(_instructions(i, schedule, width, hints) * repeats[k] for k, i in enumerate(form.items))
    tasks = 1
    for c in schedule.tiling.classes:
        if c.role is Role.GRID:
            extent = hints.estimate(c.axis.extent)
            tasks *= -(-extent // c.chunk) if c.chunk else max(1, extent)
    busy = min(target.cores, max(1, tasks))
    share = busy / target.cores
    slow = moved / (bandwidth * (share if fits else max(share, 0.8)))
    return max(slow, work / (CPU_COST.instructions_per_second * busy)) + target.launch_seconds


def _repeats(form: Form, schedule: Schedule, hints: SizeHints) -> dict[int, int]:
    """How often each item is computed again: once per step of the loops around it over classes that it does not use."""
    trips = {c.axis: -(-hints.estimate(c.axis.extent) // c.tile) for c in schedule.tiling.classes}
    return {
        k: sum(math.prod(trips[a] for a in loops if a not in form.items[k].axes) for loops in around)
        for k, around in _loops_around(form, schedule).items()
    }


def _loops_around(form: Form, schedule: Schedule) -> dict[int, list[frozenset[Axis]]]:
    """By an item's place, the sets of loops in which it is evaluated. A fold stands in those of what reads it, and of
    what reads that in turn, as far as a loop over a class that it keeps lies inside; none of the sets holds another."""
    order = [c.axis for c in schedule.tiling.classes if c.role is Role.STREAMED]
    place = {a: k for k, a in enumerate(order)}
    readers = dict[int, list[int]]()
    for k, i in enumerate(form.items):
        for read in folds_read(i.roots):
            readers.setdefault(read, []).append(k)
    found: dict[int, list[frozenset[Axis]]] = {}
    for k in _readers_first(form, readers):
        item = form.items[k]
        innermost = max((place[a] for a in item.kept if a in place), default=0)
        sets = {
            frozenset(a for a in (*loops, *form.items[r].axes) if place.get(a, innermost) < innermost)
            for r in (readers.get(item.id, ()) if item.is_fold else ())
            for loops in found[r]
        }
        if len(sets) > SCHEDULES.max_loop_sets:
            sets = {frozenset[Axis]().union(*sets)}
        found[k] = [s for s in sets if not any(s < other for other in sets)] or [frozenset()]
    return found


def _readers_first(form: Form, readers: Mapping[int, Sequence[int]]) -> list[int]:
    """Places of items, each behind those of all that read it."""
    waiting = {k: len(readers.get(i.id, ())) if i.is_fold else 0 for k, i in enumerate(form.items)}
    places = {i.id: k for k, i in enumerate(form.items) if i.is_fold}
    ready = [k for k, n in waiting.items() if n == 0]
    for k in ready:
        for read in folds_read(form.items[k].roots):
            waiting[places[read]] -= 1
            if waiting[places[read]] == 0:
                ready.append(places[read])
    return ready


def _instructions(item: Item, schedule: Schedule, width: int, hints: SizeHints) -> float:
    """Vector instructions of all evaluations of an item: each node once per point of the classes that it depends on,
    since lowering hoists it out of the other loops."""
    total = points(item, hints) / _vectors(item.axes, schedule, width)
    seen: set[Expr] = set()
    for root in item.body:
        for x in walk(root):
            if x in seen or (x.op != "read" and (x.op not in SCALARS or x.dtype is i64)):
                continue
            seen.add(x)
            axes = [a.value for a in axes_of(x) if isinstance(a.value, Axis)]
            count = hints.estimate(dims.prod(a.extent for a in axes))
            if x.op == "read":
                total += count * _access(x.args[0], axes, schedule, width)
            else:
                total += count * SCALARS[x.op].cost / _vectors(axes, schedule, width)
    if not item.is_fold:
        total += points(item, hints) * _access(item.offset, item.kept, schedule, width)
    return total


def _vectors(axes: Sequence[Axis], schedule: Schedule, width: int) -> int:
    """Elements per instruction; scalar chains of different points overlap a little."""
    return (
        width
        if schedule.tiling.lane is not None and schedule.tiling.lane in axes
        else min(width, CPU_COST.overlapping_points)
    )


def _access(offset: Expr, axes: Sequence[Axis], schedule: Schedule, width: int) -> float:
    """Instructions per element of one load or store."""
    lane = schedule.tiling.lane
    if lane is None or lane not in axes:
        return 1.0
    return (
        1.0 / width
        if dims.coefficient(offset, axis(lane)) in (dims.ONE, dims.ZERO)
        else CPU_COST.strided_instructions
    )


def traffic(form: Form, hints: SizeHints) -> int:
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
                touched = points(item, hints)
            else:
                used = axes_of(offset)
                axes = [a for a in item.axes if axis(a) in used]
                touched = hints.estimate(dims.prod(a.extent for a in axes)) // _parts_of_word(
                    offset, axes, value
                )
            total += min(touched, 4 * max(1, hints.estimate(value.numel))) * value.dtype.bytes
    return total


def _parts_of_word(offset: Expr, axes: Sequence[Axis], value: Value) -> int:
    """How many places of classes read one word of packed numbers: it is loaded once for them."""
    if value.dtype.is_float:
        return 1
    words = words_of(offset, axes, CONTRACTION.min_block_side)
    return math.prod(words.counts.values()) if words.is_whole else 1
