"""Which schedule? A heuristic from the form and the target's figures, through the type that a search would fill."""

from __future__ import annotations

from collections.abc import Callable

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.dtype import bool_
from tilewright.ir.expr import Axis, Expr, axes_of, axis, call, const, cost, is_const
from tilewright.ir.form import Form, Item
from tilewright.ir.schedule import ClassPlan, Math, Memory, Role, Schedule, Sized, Tiling
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.rounding import last_power_of_two
from tilewright.target import MemoryKind, Target
from tilewright.tuning.thresholds import CPU_VECTORS


def points(item: Item, hints: SizeHints) -> int:
    """Estimated evaluations of an item's body."""
    return hints.estimate(dims.prod(a.extent for a in item.axes))


def vector_lanes(target: Target) -> int:
    """Elements of 4 bytes in a vector register (a power of two): the lanes of every block, whatever its type."""
    return last_power_of_two(target.vector_lanes(4))


def vector_schedule(form: Form, target: Target, hints: SizeHints) -> Schedule:
    """Grid: classes that every item keeps. Lane: the class along which most memory is contiguous. The rest streams."""
    reduced = {a for i in form.items for a in i.reduce}
    scans = {i.scan for i in form.items if i.scan is not None}
    classes = form.classes()
    grid = [a for a in classes if a not in reduced | scans and all(a in i.axes for i in form.items)]
    lane = pick_lane(form, [a for a in classes if a not in scans], hints)
    width = vector_lanes(target)
    across = _across(form, grid, lane, width, hints)
    if lane is not None and across is not None:
        return _transposing(form, target, grid, *_turned_as_read(form, lane, across), hints)
    tile = _tile(form, grid, lane, target, hints)
    if lane in grid and _short(form, lane, len(grid) == 1):
        grid.remove(lane)
    inner = nest_order(form, [a for a in classes if a not in grid], lane)
    plans = [ClassPlan(a, Role.GRID) for a in _as_read(form, [a for a in grid if a != lane], hints)]
    if lane in grid:
        assert lane is not None
        folded = any(i.is_fold for i in form.items)
        plans.append(ClassPlan(lane, Role.GRID, tile, tile if folded else CPU_VECTORS.task_elements))
    side = _side(inner[-1], tile, target) if inner and lane in grid and inner[-1] in reduced - scans else 1
    for a in inner:
        step = tile if a == lane else side if a == inner[-1] else 1
        plans.append(ClassPlan(a, Role.SCAN if a in scans else Role.STREAMED, step))
    wide = tile if lane in grid else 1
    made = Schedule(
        Tiling(tuple(plans), lane, beside=inner[-1] if side > 1 else None),
        memory=Memory(
            scratch_cost=_scratch_cost(form, target, wide, hints), past_caches=_stream(form, target)
        ),
        math=Math(reciprocals=True),
    )
    return made.changed(next_point=_ahead(form, made, target))


def _across(form: Form, grid: list[Axis], lane: Axis | None, width: int, hints: SizeHints) -> Axis | None:
    """In a kernel without folds: the class that is contiguous where the lane is not, if such accesses weigh
    enough to be
    loaded along it and transposed in registers."""
    if lane not in grid or any(i.is_fold for i in form.items) or hints.estimate(lane.extent) < width:
        return None
    weight: dict[Axis, int] = {}
    for item in form.items:
        for param, offset in item.accesses():
            if form.params[param].dtype.bytes != 4 or dims.coefficient(offset, axis(lane)) in (
                dims.ONE,
                dims.ZERO,
            ):
                continue
            for a in grid:
                if dims.coefficient(offset, axis(a)) is dims.ONE and hints.estimate(a.extent) >= width:
                    weight[a] = weight.get(a, 0) + points(item, hints)
    return max(weight, key=lambda a: weight[a], default=None)


def _turned_as_read(form: Form, lane: Axis, across: Axis) -> tuple[Axis, Axis]:
    """Lane and across; the other way round where all that is written is contiguous along the one and all that is read
    over both, no more than that, along the other: turning a load costs half of what turning a store does."""
    accesses = [(p, offset) for i in form.outputs for p, offset in i.accesses() if p != i.param]
    reads = [(p, offset) for p, offset in accesses if axis(across) in axes_of(offset)]
    along = [dims.coefficient(offset, axis(lane)) for _, offset in reads]
    written = [dims.coefficient(i.offset, axis(across)) for i in form.outputs]
    wide = all(form.params[p].dtype.bytes == 4 for p, _ in reads)
    if wide and len(reads) <= len(written) and all(x is dims.ONE for x in (*along, *written)):
        return across, lane
    return lane, across


def _transposing(
    form: Form, target: Target, grid: list[Axis], lane: Axis, across: Axis, hints: SizeHints
) -> Schedule:
    """Register tiles over the two classes. Where all that is written is contiguous along one of them: two registers
    along it, so that whole lines are written, and neighbouring tiles read the same lines' pages; else square blocks
    that a core's cache holds."""
    width = vector_lanes(target)
    plans = [ClassPlan(a, Role.GRID) for a in grid if a not in (lane, across)]
    line = next((a for a in (across, lane) if _writes_along(form, a)), None)
    if line is not None and hints.estimate(line.extent) >= 2 * width:
        other = lane if line == across else across
        rows, columns = (
            max(CPU_VECTORS.turned_rows_and_columns[0], 2 * width),
            CPU_VECTORS.turned_rows_and_columns[1],
        )
        tasks = max(points(i, hints) for i in form.outputs) / (rows * columns)
        if tasks < CPU_VECTORS.min_large_tasks_per_core * target.cores:
            rows, columns = 2 * width, 4 * CPU_VECTORS.transposed_side
        plans += [
            ClassPlan(line, Role.GRID, 2 * width, rows),
            ClassPlan(other, Role.GRID, width, columns),
        ]
    else:
        plans += [ClassPlan(a, Role.GRID, width, CPU_VECTORS.transposed_side) for a in (across, lane)]
    rest = [a for a in form.classes() if a not in grid]
    plans += [ClassPlan(a, Role.STREAMED) for a in rest]
    return Schedule(
        Tiling(tuple(plans), lane, last_outermost=line is not None),
        memory=Memory(past_caches=_stream(form, target)),
        math=Math(reciprocals=True),
    )


def _writes_along(form: Form, a: Axis) -> bool:
    return all(dims.coefficient(i.offset, axis(a)) is dims.ONE for i in form.outputs)


def _as_read(form: Form, grid: list[Axis], hints: SizeHints) -> list[Axis]:
    """Grid classes of a kernel without folds in the order in which its largest input lies in memory, where that is
    another one than the outputs': caches fetch ahead what is read in order, and stores do not wait."""
    reads = [(points(i, hints), offset) for i in form.outputs for p, offset in i.accesses() if p != i.param]
    if any(i.is_fold for i in form.items) or not reads:
        return grid
    _, offset = max(reads, key=lambda r: r[0])
    steps = {a: dims.coefficient(offset, axis(a)) for a in grid}
    sizes = {a: hints.estimate(e) for a, e in steps.items() if e is not None}
    if len(sizes) < len(grid) or 0 in sizes.values():
        return grid
    return sorted(grid, key=lambda a: -abs(sizes[a]))


def _short(form: Form, lane: Axis, alone: bool) -> bool:
    """Whether a parallel lane class is better walked whole by each grid point: no fold keeps it, and it is not long."""
    extent = dims.static(lane.extent)
    return (
        not alone
        and extent is not None
        and extent <= 4 * CPU_VECTORS.task_elements
        and not any(i.is_fold for i in form.items)
    )


def _tile(form: Form, grid: list[Axis], lane: Axis | None, target: Target, hints: SizeHints) -> int:
    """Several registers per block where one chain of dependent merges would wait for itself; whole stretches of memory
    where every step of a fold reads another row."""
    if lane is None:
        return 1
    width = vector_lanes(target)
    folds = [i for i in form.items if i.is_fold and lane in i.axes]
    extent = dims.static(lane.extent)
    limit = width
    if folds and all(i.reduction is not None and len(i.reduction.state) == 1 for i in folds):
        limit = 4 * width
        rows = min(hints.estimate(dims.prod(a.extent for a in i.reduce)) for i in folds)
        if extent is not None and lane in grid and rows >= CPU_VECTORS.min_rows_from_memory:
            others = hints.estimate(dims.prod(a.extent for a in grid if a != lane))
            while 2 * limit <= CPU_VECTORS.max_task_row_elements and _even(
                others * -(-extent // (2 * limit)), target.cores
            ):
                limit *= 2
    while limit > width and extent is not None and extent < limit:
        limit //= 2
    while limit > 1 and extent is not None and extent <= limit // 2:
        limit //= 2
    return limit


def _even(tasks: int, cores: int) -> bool:
    """Whether tasks of equal length keep the cores busy."""
    rounds = -(-tasks // cores)
    return tasks >= (1 - CPU_VECTORS.max_idle_ratio) * rounds * cores


def _side(rows: Axis, tile: int, target: Target) -> int:
    """Rows that one step folds, where it folds long pieces of them."""
    extent = dims.static(rows.extent)
    if (
        extent is None
        or extent < CPU_VECTORS.min_rows_from_memory
        or tile < CPU_VECTORS.max_states // CPU_VECTORS.max_rows_side_by_side
    ):
        return 1
    return min(CPU_VECTORS.max_rows_side_by_side, CPU_VECTORS.max_states // tile)


def pick_lane(
    form: Form,
    classes: list[Axis],
    hints: SizeHints,
    step_along: Callable[[Expr, Expr], Expr | None] = dims.coefficient,
) -> Axis | None:
    """The class along which most memory is contiguous, None if there is none. `step_along` tells how far neighbours of
    an access lie apart."""
    score: dict[Axis, int] = {}
    for item in form.items:
        for _, offset in item.accesses():
            used = axes_of(offset)
            weight = hints.estimate(dims.prod(a.extent for a in item.axes if axis(a) in used))
            for a in classes:
                factor = step_along(offset, axis(a))
                if factor is dims.ONE:
                    score[a] = score.get(a, 0) + 4 * weight
                elif factor is not dims.ZERO:
                    score[a] = score.get(a, 0) - weight
    best = max(score, key=lambda a: score[a], default=None)
    if best is None or score[best] <= 0 or best.extent is dims.ONE:
        return None
    return best


def nest_order(form: Form, classes: list[Axis], lane: Axis | None) -> list[Axis]:
    """Kept classes outside the classes that a fold reduces; otherwise the lane innermost, short strides inside."""
    outside: dict[Axis, set[Axis]] = {a: set() for a in classes}
    for i in form.items:
        for c in i.reduce:
            outside[c] |= {d for d in i.kept if d in outside}
    order: list[Axis] = []
    rest = list(classes)
    while rest:
        free = [a for a in rest if not (outside[a] & set(rest))] or rest
        pick = next((a for a in free if a != lane), free[0])
        order.append(pick)
        rest.remove(pick)
    return order


def _scratch_cost(form: Form, target: Target, wide: int, hints: SizeHints) -> int:
    capacity = target.core.capacity
    reduced = {a for i in form.items for a in i.reduce}
    for i in form.items:
        row = hints.estimate(dims.prod(a.extent for a in (i.reduce if i.is_fold else i.kept) if a in reduced))
        if 4 * row * wide > capacity:
            return 0
    return CPU_VECTORS.min_scratch_cost


def _stream(form: Form, target: Target) -> tuple[Sized, ...]:
    """Outputs too large for the last cache, which nobody reads soon."""
    cache = target.level(MemoryKind.L2)
    if cache is None:
        return ()
    outputs = [(i.param, form.params[i.param]) for i in form.outputs if _contiguous(i)]
    found = {p: _reaches(dims.mul(v.numel, dims.integer(v.dtype.bytes)), cache.capacity) for p, v in outputs}
    return tuple(Sized(p, when) for p, when in found.items() if when is not None)


def _reaches(size: Expr, least: int) -> Expr | None:
    """The condition that a size is at least `least`, None if it never is."""
    high = dims.int_range(size)[1]
    if high is not None and high < least:
        return None
    if dims.at_least(size, least):
        return const(True, bool_)
    return call("ge", size, dims.integer(least))


def _contiguous(i: Item) -> bool:
    return any(dims.coefficient(i.offset, axis(a)) is dims.ONE for a in i.kept)


def _ahead(form: Form, schedule: Schedule, target: Target) -> tuple[Sized, ...]:
    """Inputs from memory whose rows are walked in several passes, or with much work on each element: while a row is
    worked on in the nearest caches, memory would wait."""
    grid = [c for c in schedule.tiling.classes if c.role is Role.GRID]
    cache = target.level(MemoryKind.L2)
    if not grid or grid[-1].chunk or schedule.tiling.lane is None or cache is None:
        return ()
    found: dict[int, Expr] = {}
    working = [i for i in form.outputs if sum(map(cost, i.body)) >= CPU_VECTORS.min_scratch_cost]
    for item, (param, offset) in [(i, a) for i in (*form.folds.values(), *working) for a in i.accesses()]:
        if param != item.param:
            row = dims.coefficient(offset, axis(grid[-1].axis))
            if (
                row is None
                or row is dims.ZERO
                or dims.coefficient(offset, axis(schedule.tiling.lane)) is not dims.ONE
            ):
                continue
            size = dims.mul(form.sizes[param], dims.integer(form.params[param].dtype.bytes))
            large = _reaches(size, cache.lasting_bytes)
            far = _reaches(row, target.core.capacity // 16 + 1)
            near = const(True, bool_) if far is None else call("not", far)
            if large is not None and not is_const(near, False):
                found.setdefault(param, call("and", large, near))
    return tuple(Sized(p, when) for p, when in found.items())
