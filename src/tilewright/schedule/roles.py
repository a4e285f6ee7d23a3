"""Which roles are legal for the classes of a form, and how many grid points make a task."""

from __future__ import annotations

from ..errors import IllegalSchedule
from ..ir import dims
from ..ir.expr import Expr
from .form import Form
from .schedule import Role, Schedule

_NEST = "a class that a fold keeps is outside those it reduces"


def check_roles(form: Form, schedule: Schedule) -> None:
    """Raise IllegalSchedule, naming the law, unless a form may be lowered under a schedule."""
    roles = {c.axis: c for c in schedule.classes}
    order = [c.axis for c in schedule.classes]
    for item in form.items:
        for a in item.axes:
            if a not in roles:
                raise IllegalSchedule(
                    f"class {a.name} has no role", law="every class has a role", phase="schedule"
                )
        for a in item.reduce:
            if roles[a].role is Role.GRID:
                raise IllegalSchedule(
                    f"fold {item.id} reduces {a.name}", law="no fold reduces a grid class", phase="schedule"
                )
        for d in item.kept:
            for c in item.reduce:
                if roles[d].role is not Role.RESIDENT and order.index(d) > order.index(c):
                    raise IllegalSchedule(
                        f"fold {item.id} keeps {d.name} inside {c.name}", law=_NEST, phase="schedule"
                    )
        if item.scan is not None and (roles[item.scan].role is not Role.SCAN or roles[item.scan].tile != 1):
            raise IllegalSchedule(
                f"{item.scan.name} is scanned", law="a scan runs in order, in steps of one", phase="schedule"
            )


def grain(form: Form, schedule: Schedule) -> Expr:
    """Grid points that together touch `grain_bytes`."""
    grid = {c.axis: c.chunk for c in schedule.classes if c.role is Role.GRID}
    best = dims.ONE
    for item in form.items:
        inner = [dims.integer(grid[a] or 1) if a in grid else a.extent for a in item.axes]
        size = dims.prod(dims.maximum(e, dims.ONE) for e in inner)
        if dims.static(size) is None or dims.at_least(dims.sub(size, best), 0):
            best = size
    fixed = dims.static(best)
    if fixed is not None:
        return dims.integer(max(1, schedule.grain_bytes // (8 * fixed)))
    return dims.add(dims.floordiv(dims.integer(schedule.grain_bytes // 8), best), dims.ONE)
