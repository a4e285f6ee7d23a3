"""Few exponentials per element where each lane has a running maximum of its own.

When an element joins a lane, the new maximum is the old one or the element, so of exp(old - new) and exp(element - new)
one is 1. The other one is exp((old - new) + (element - new)), as the first difference or the second one is 0 (not a
number where the maximum is infinite, as both exponentials together are).

Where neighbours are a whole access, a lane takes all of them in a step: the maximum moves once for all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from tilewright.analysis.online.running import is_finite_part
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, Expr, axis, call, const, substitute, walk, where
from tilewright.ir.form import Form, FormStep, folds_read
from tilewright.ir.schedule import ClassPlan, Role, Schedule
from tilewright.ir.sizes import dims
from tilewright.target import Target

from .classes import split_class
from .companions import leaf_of
from .exp2 import quick_power

MAX_FLOAT32 = (2 - 2.0**-23) * 2.0**127
"""The largest number of single precision."""


def weight(element: Expr, leaf: Expr) -> Expr:
    """exp(element - maximum), as programs write it."""
    return call("exp", call("sub", element, leaf))


def merge_exponentials(old: Expr, element: Expr, new: Expr, quick: bool) -> tuple[Expr, Expr]:
    """exp(old - new) and exp(element - new) for a `new` that is the larger one of both, 1 and 0 where both are the
    maximum of nothing; see above. `quick`: the power may be the quick one."""
    most = MAX_FLOAT32 if new.dtype is f32 else sys.float_info.max
    top = call("maximum", new, const(-most, new.dtype))
    apart = call("add", call("sub", old, top), call("sub", element, top))
    power = quick_power(apart) if quick else call("exp", apart)
    rises, one = call("gt", element, old), const(1.0, power.dtype)
    return where(rises, power, one), where(rises, one, power)


def one_each(form: Form, lanes: Sequence[Axis]) -> bool:
    """Whether all that folds over `lanes` read of other folds over them are maxima (perhaps with 0 for infinity), in
    such exponentials."""
    over = {i.id: i for i in form.folds.values() if set(i.reduce) & set(lanes)}
    read = False
    for i in over.values():
        for d in sorted(folds_read(i.body) & over.keys()):
            up, read = over[d], True
            if up.reduction is None or up.reduction.combiner != "maximum" or up.reduce != i.reduce:
                return False
            leaf = leaf_of(up)
            tops = [leaf, *(x for b in i.body for x in walk(b) if is_finite_part(x, leaf, rising=True))]
            known = {weight(up.body[0], top): const(1.0, leaf.dtype) for top in tops}
            if any(
                x.op == "value" and x.value == leaf.value for b in i.body for x in walk(substitute(b, known))
            ):
                return False
    return read


def with_neighbours(form: Form, schedule: Schedule, target: Target) -> tuple[Form, Schedule]:
    """The form with the streamed class in accesses, all of which a lane takes at once, if such exponentials are folded
    over it and it is known to consist of whole accesses. Where only totals are left of rows, such exponentials are in
    their quick form, with neighbours or without. Else what was given."""
    c = _streamed(form, schedule, target)
    if c is None:
        return form, schedule
    stored = any(c.axis in o.axes for o in form.outputs)  # then the smallest numbers count, too
    schedule = schedule.changed(fast=() if stored else target.quick)
    count = _access(form, c, schedule, target)
    outer = dims.exact_div(c.axis.extent, dims.integer(count))
    if count == 1 or outer is None or dims.static(outer) is None:
        return form, schedule
    return _with_accesses(form, schedule, c, count)


def if_divisible(form: Form, schedule: Schedule, target: Target) -> tuple[Expr, Form, Schedule] | None:
    """The same for a streamed class of unknown extent, and the condition under which it consists of whole accesses;
    None where that is no question."""
    c = _streamed(form, schedule, target)
    if c is None or dims.static(c.axis.extent) is not None:
        return None
    count = _access(form, c, schedule, target)
    width = dims.integer(count)
    if count == 1:
        return None
    divisible = call("eq", dims.mod(c.axis.extent, width), dims.ZERO)
    return divisible, *_with_accesses(form, schedule, c, count)


def _streamed(form: Form, schedule: Schedule, target: Target) -> ClassPlan | None:
    """The streamed class of lanes over which such exponentials are folded."""
    c = next((p for p in schedule.tiling.classes if p.axis == schedule.tiling.lane), None)
    if target.lanes == 1 or c is None or c.role is not Role.STREAMED or not schedule.reductions.lane_states:
        return None  # where threads are alone, a vector is an access
    return c if one_each(form, [c.axis]) else None


def _access(form: Form, c: ClassPlan, schedule: Schedule, target: Target) -> int:
    """Elements of the widest type in an access, 1 if a step has fewer accesses than lanes."""
    widths = [
        form.params[param].dtype.bytes
        for item in form.items
        for param, offset in item.accesses()
        if dims.coefficient(offset, axis(c.axis)) is dims.ONE
    ]
    count = target.vector_bytes // max(widths, default=target.vector_bytes)
    return 1 if c.tile < count * target.lanes * schedule.launch.warps else count


def in_accesses(form: Form, counts: Mapping[Axis, int]) -> Form:
    """The form with each of these classes as accesses of so many elements: its extent is a multiple of that."""
    for a, count in counts.items():
        form = split_class(form, a, dims.floordiv(a.extent, dims.integer(count)), dims.integer(count))
    return form


def _with_accesses(form: Form, schedule: Schedule, c: ClassPlan, count: int) -> tuple[Form, Schedule]:
    split = in_accesses(form, {c.axis: count}).after(FormStep("in_accesses", ((c.axis.name, count),)))
    before = set(form.classes())
    far, near = sorted((a for a in split.classes() if a not in before), key=lambda a: int(a.name[1:]))
    plans = (ClassPlan(near, Role.RESIDENT, count), ClassPlan(far, Role.STREAMED, c.tile // count))
    classes = tuple(q for p in schedule.tiling.classes for q in (plans if p is c else (p,)))
    return split, schedule.changed(classes=classes, lane=near, merged_each_step=(near,))
