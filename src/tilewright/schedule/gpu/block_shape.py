"""What a form looks like where threads share a grid point: which classes are its grid, which loops walk, which lie
along memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tilewright.analysis.runs import words_of
from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.expr import Axis, Expr, axes_of, axis, call
from tilewright.ir.form import Form
from tilewright.ir.sizes import dims
from tilewright.schedule.cpu.vectors import nest_order, pick_lane, points
from tilewright.target import Target
from tilewright.tuning.thresholds import CONTRACTION, GPU_BLOCKS


@dataclass(frozen=True, slots=True)
class Shape:
    """What a form looks like: its grid, the classes that loops or blocks walk, the running one, the contiguous ones."""

    grid: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    scan: Axis | None
    lane: Axis | None
    across: Axis | None
    element: int
    """Bytes of the narrowest element that is accessed along the lane."""


def shape_of(form: Form, hints: SizeHints) -> Shape:
    """What `form` looks like."""
    reduced = {a for i in form.items for a in i.reduce}
    scans = {i.scan for i in form.items if i.scan is not None}
    classes = form.classes()
    grid = [a for a in classes if a not in reduced | scans and all(a in i.axes for i in form.items)]
    wide = [a for a in classes if a in grid or not is_narrow(a)]
    lane = (
        pick_lane(form, [a for a in classes if not is_narrow(a)], hints, _step_along)
        or pick_lane(form, wide, hints, _step_along)
        or _stored_along(form, wide)
        or pick_lane(form, classes, hints, _step_along)
    )
    if lane in grid:
        grid = [*(a for a in grid if a != lane), lane]
    inner = nest_order(form, [a for a in classes if a not in grid], lane)
    across = None
    if lane in grid and not any(i.is_fold for i in form.items):
        across = _across(form, grid, lane, hints)
    widths = [
        form.params[param].dtype.bytes
        for item in form.items
        for param, offset in item.accesses()
        if lane is not None and dims.coefficient(offset, axis(lane)) is dims.ONE
    ]
    return Shape(tuple(grid), tuple(inner), next(iter(scans), None), lane, across, min(widths, default=4))


def repeating_shape(form: Form, hints: SizeHints) -> Shape:
    """The same with a class on the grid that some folds lack, whose points each do these again: they fold no more than
    what each point folds in any case, as a norm in front of the product of a matrix and a vector. There is one such
    class at most."""
    shape = shape_of(form, hints)
    found = [a for a in shape.inner if a != shape.scan and _repeats_little(form, a, hints)]
    if len(found) != 1:
        return shape
    (a,) = found
    return replace(shape, grid=(*shape.grid, a), inner=tuple(b for b in shape.inner if b != a))


def _repeats_little(form: Form, a: Axis, hints: SizeHints) -> bool:
    """Whether only folds lack the class `a`, none folds along it, and others fold at each of its places as much as
    those that lack it do at all."""
    lacking = [i for i in form.items if a not in i.axes]
    own = [i for i in form.folds.values() if a in i.axes]
    if any(a in i.reduce for i in own) or not all(i.is_fold for i in lacking):
        return False
    again = sum(points(i, hints) for i in lacking) * max(1, hints.estimate(a.extent))
    return again <= sum(points(i, hints) for i in own)


def _step_along(offset: Expr, a: Expr) -> Expr | None:
    """How far neighbours lie apart; where several are one word of memory, how far words do."""
    found = dims.coefficient(offset, a)
    if found is not None or not isinstance(a.value, Axis):
        return found
    words = words_of(offset, (a.value,), CONTRACTION.min_block_side)
    return dims.coefficient(words.offset, a) if words.counts[a.value] > 1 else None


def is_narrow(a: Axis) -> bool:
    """Whether a class is too short to fill the threads of a warp, as the window of a pooling is."""
    extent = dims.static(a.extent)
    return extent is not None and extent < GPU_BLOCKS.min_contiguous_extent


def _stored_along(form: Form, classes: Sequence[Axis]) -> Axis | None:
    """The class along which an output is contiguous."""
    found = [a for o in form.outputs for a in classes if dims.coefficient(o.offset, axis(a)) is dims.ONE]
    return found[0] if found else None


def _across(form: Form, grid: Sequence[Axis], lane: Axis | None, hints: SizeHints) -> Axis | None:
    """The class that is contiguous in accesses where the lane is not, if there are such accesses."""
    weight: dict[Axis, int] = {}
    for item in form.items:
        for _, offset in item.accesses():
            if lane is None or dims.coefficient(offset, axis(lane)) in (dims.ONE, dims.ZERO):
                continue
            for a in grid:
                if a != lane and dims.coefficient(offset, axis(a)) is dims.ONE:
                    weight[a] = weight.get(a, 0) + hints.estimate(dims.prod(x.extent for x in item.axes))
    return max(weight, key=lambda a: weight[a], default=None)


def is_odd(form: Form, shape: Shape, target: Target) -> bool:
    """Whether rows are known to begin where no wide access may."""
    known = ((dims.static(step), size) for step, size in _steps(form, shape))
    return any(n is not None and n > 1 and n * size % target.vector_bytes for n, size in known)


def misalignment(form: Form, target: Target, hints: SizeHints) -> Expr | None:
    """The condition on the sizes under which rows begin where no wide access may, or may not: that a step is no
    multiple of as many elements as an access has bytes, as aligned variants need it. None if it is known before."""
    shape = shape_of(form, hints)
    open_ = {step for step, _ in _steps(form, shape) if dims.static(step) is None}
    if not open_ or is_odd(form, shape, target):
        return None
    rests = {dims.mod(s, dims.integer(target.vector_bytes)) for s in open_} - {dims.ZERO}
    if not rests:
        return None
    tests = [call("ne", r, dims.ZERO) for r in sorted(rests, key=repr)]
    return functools.reduce(lambda p, q: call("or", p, q), tests)


def _steps(form: Form, shape: Shape) -> Iterator[tuple[Expr, int]]:
    """From row to row of what is read or written along the contiguous classes, and the bytes of an element."""
    for item in form.items:
        for param, offset in item.accesses():
            steps = {a: dims.coefficient(offset, a) for a in axes_of(offset)}
            if {axis(a) for a in (shape.lane, shape.across) if a is not None} & {
                a for a, s in steps.items() if s is dims.ONE
            }:
                size = form.params[param].dtype.bytes
                yield from ((s, size) for s in steps.values() if s is not None and s is not dims.ONE)
