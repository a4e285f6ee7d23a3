"""Which roles are legal for the classes of a form, and how many grid points make a task."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilewright.errors import IllegalSchedule
from tilewright.ir.dtype import f64
from tilewright.ir.expr import Axis, Expr
from tilewright.ir.form import Form, Item, folds_read, producers_first
from tilewright.ir.reduction import Reduction
from tilewright.ir.schedule import Role, Schedule
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import SUM_LEVELS

from .passes import pass_numbers

_NEST = "a class that a reduction keeps is outside those it reduces or runs along"


def check_roles(form: Form, schedule: Schedule) -> None:
    """Raise IllegalSchedule, naming the law, unless a form may be lowered under a schedule."""
    _check_scans(form, schedule)
    if schedule.memory.next_point and all(c.role is not Role.GRID for c in schedule.tiling.classes):
        said = "the next grid point's part is fetched where there is one point"
        raise IllegalSchedule(said, law="what is fetched ahead has a next grid point")
    roles = {c.axis: c for c in schedule.tiling.classes}
    order = [c.axis for c in schedule.tiling.classes]
    for item in form.items:
        for a in item.axes:
            if a not in roles:
                said = f"class {a.name} has no role"
                raise IllegalSchedule(said, law="every class has a role", phase="schedule")
        for a in item.reduce:
            if roles[a].role is Role.GRID:
                said = f"a reduction runs over {a.name}"
                raise IllegalSchedule(said, law="no reduction runs over a grid class", source=item.source)
        advanced = item.reduce if item.scan is None else (*item.reduce, item.scan)
        for d in item.kept:
            for c in advanced:
                if roles[d].role is not Role.RESIDENT and order.index(d) > order.index(c):
                    said = f"a reduction keeps {d.name} inside {c.name}"
                    raise IllegalSchedule(said, law=_NEST, source=item.source)
        if item.scan is not None and roles[item.scan].role not in (Role.SCAN, Role.RESIDENT):
            said = f"{item.scan.name} is scanned"
            raise IllegalSchedule(said, law="a scan runs in order", phase="schedule")


def _check_scans(form: Form, schedule: Schedule) -> None:
    """A running fold has a value only at its own step, and so has what is made of it at that index: what reads either
    must stand in the same pass, at the same index."""
    scans = {i.scan for i in form.items if i.scan is not None}
    if len(scans) > 1:
        names = ", ".join(sorted(a.name for a in scans))
        said = f"running reductions along {names}"
        raise IllegalSchedule(said, law="a kernel has one scanned class", phase="schedule")
    folds = form.folds
    for c in scans:
        ordered = producers_first(folds)
        reductions = schedule.reductions
        free = folds if reductions.online else None
        numbers, _ = pass_numbers(ordered, form.outputs, c, free, reductions.merged_each_step)
        running = {i.id for i in form.items if i.scan == c}
        for item in (*ordered, *form.outputs):
            for d in running.intersection(folds_read(item.roots)):
                if c not in item.axes or numbers[item.id] != numbers[d]:
                    raise IllegalSchedule(
                        "every step of a reduction that runs is needed elsewhere", source=folds[d].source,
                        law="a running reduction is read in its own pass",
                    )  # fmt: skip
                if c in item.kept:
                    running.add(item.id)


def grain(form: Form, schedule: Schedule) -> Expr:
    """Grid points that together touch `Launch.min_bytes_per_task`."""
    grid = {c.axis: c.chunk for c in schedule.tiling.classes if c.role is Role.GRID}
    best = dims.ONE
    for item in form.items:
        inner = [dims.integer(grid[a] or 1) if a in grid else a.extent for a in item.axes]
        size = dims.prod(dims.maximum(e, dims.ONE) for e in inner)
        if dims.static(size) is None or dims.at_least(dims.sub(size, best), 0):
            best = size
    fixed = dims.static(best)
    if fixed is not None:
        return dims.integer(max(1, schedule.launch.min_bytes_per_task // (8 * fixed)))
    return dims.add(dims.floordiv(dims.integer(schedule.launch.min_bytes_per_task // 8), best), dims.ONE)


def block_lengths(
    c: Axis, targets: Sequence[Item], schedule: Schedule, *, nested: bool = False
) -> tuple[int, ...]:
    """Values of class `c` per block, outermost level first, such that no float sum of `targets` is a chain of more than
    `chain` additions at any level; none if the loop is short enough as it is, or has to run in one go. `nested`: loops
    inside this one have levels of their own."""
    sums = [t for t in targets if t.reduction is not None and _rounds(t.reduction)]
    merged = [t.reduction for t in sums if t.reduction is not None]
    if not sums or not schedule.reductions.max_chain or any(t.scan is not None for t in targets):
        return ()
    chain, tile = schedule.reductions.max_chain, schedule.plan(c).tile
    order = [p.axis for p in schedule.tiling.classes]
    others = {a for t in sums for a in t.reduce if a != c}
    step = tile * prod(schedule.plan(a).tile for a in others)
    singly = step == 1 and schedule.tiling.peel
    if not schedule.tiling.peel and any(d is not f64 for r in merged for d in r.state):
        chain = min(chain, SUM_LEVELS.max_chain * step)
    if singly:
        most = SUM_LEVELS.max_single_chain
    elif schedule.tiling.peel:
        most = min(chain, SUM_LEVELS.max_lane_chain) if step < SUM_LEVELS.min_wide_step_elements else chain
    else:
        most = 2 * chain
    inside = 1
    for a in others:
        if order.index(a) > order.index(c):
            steps = max(1, (dims.static(a.extent) or chain) // schedule.plan(a).tile)
            inside *= chain if nested and steps > most else steps
    extent = dims.static(c.extent)
    if extent is None and (step >= SUM_LEVELS.min_tree_elements or all(r.step for r in merged)):
        return ()
    if extent is None:
        first = tile * max(1, (chain // 2 if singly else chain) // inside)
        return (first,) if tile >= SUM_LEVELS.min_two_level_lanes else (first * chain, first)
    steps = -(-extent // tile)
    if steps * inside <= most:
        return ()
    levels = 2
    while chain**levels < steps * inside:
        levels += 1
    even = 2
    while even**levels < steps * inside:
        even *= 2
    lengths = [max(1, even // inside)]
    for _ in range(levels - 2):
        lengths.append(lengths[-1] * even)
    return tuple(tile * n for n in reversed(lengths) if n < steps)


def _rounds(reduction: Reduction) -> bool:
    """Whether every merge may round: float sums, and states of several floats."""
    adds = reduction.combiner == "add" or (reduction.combiner is None and len(reduction.state) > 1)
    return adds and all(d.is_float for d in reduction.state)
