"""Which expressions one pass leaves in scratch memory for a later pass, instead of it computing them again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tilewright.analysis.needed_checks import unsafe_parts
from tilewright.ir.expr import Axis, Expr, axes_of, axis, cost, walk
from tilewright.ir.form import Item, folds_read
from tilewright.ir.schedule import Role, Schedule


def choose_scratch(
    cone: Sequence[Item], outputs: Sequence[Item], c: Axis, passes: Mapping[int, int], schedule: Schedule,
    sizes: Sequence[Expr],
) -> list[Expr]:  # fmt: skip
    """The largest expressions over class `c` that two passes evaluate to the same values, and that cost at least
    `Memory.scratch_cost`. What is there is read under other conditions than it was written, so all of it is written:
    what may fail (`sizes` are those of the parameters) has to be meant without a condition somewhere."""
    if not schedule.memory.scratch_cost:
        return []
    first: dict[Expr, int] = {}
    again: dict[Expr, None] = {}
    for i in sorted((i for i in (*cone, *outputs) if c in i.axes), key=lambda i: passes[i.id]):
        for x in (x for b in i.body for x in walk(b)):
            if x in first and first[x] < passes[i.id]:
                again[x] = None
            first.setdefault(x, passes[i.id])
    moving = {i.id: passes[i.id] for i in cone if c in i.reduce}
    chosen = [x for x in again if _costly(x, c, schedule) and _final(x, first[x], moving)]
    if chosen:
        roots = [b for i in (*cone, *outputs) if c in i.axes for b in i.body]
        risky = unsafe_parts(roots, sizes) - _meant_everywhere(roots)
        chosen = [x for x in chosen if x not in risky]
    inner = {y for x in chosen for y in walk(x) if y is not x}
    return [x for x in chosen if x not in inner]


def _meant_everywhere(roots: Sequence[Expr]) -> set[Expr]:
    """The parts of expressions that stand on no side of a choice."""
    found: set[Expr] = set()
    todo = list(roots)
    while todo:
        x = todo.pop()
        if x not in found:
            found.add(x)
            todo += x.args[:1] if x.op == "where" else x.args
    return found


def _costly(x: Expr, c: Axis, schedule: Schedule) -> bool:
    if (
        x.op in ("read", "value", "const", "axis")
        or axis(c) not in axes_of(x)
        or cost(x) < schedule.memory.scratch_cost
    ):
        return False
    classes = [a.value for a in axes_of(x) if isinstance(a.value, Axis)]
    return all(schedule.plan(a).role is not Role.SCAN for a in classes)


def _final(x: Expr, at: int, moving: Mapping[int, int]) -> bool:
    """Whether the folds that `x` reads are complete before pass `at`."""
    return all(moving.get(f, -1) < at for f in folds_read([x]))


def params_by_pass(
    items: Sequence[Item], passes: Mapping[int, int], kept: Collection[Expr]
) -> dict[int, set[int]]:
    """The parameters that each pass loads itself: what an earlier one left in scratch is not loaded again."""
    found: dict[int, set[int]] = {}
    left: set[Expr] = set()
    for q in sorted({passes[i.id] for i in items}):
        seen: set[Expr] = set()
        todo = [r for i in items if passes[i.id] == q for r in i.roots]
        while todo:
            x = todo.pop()
            if x not in seen and x not in left:
                seen.add(x)
                todo += x.args
        found[q] = {x.value for x in seen if x.op == "read" and isinstance(x.value, int)}
        left |= seen.intersection(kept)
    return found
