"""Loads of a loop whose values the next step reads again, at another place of a window, are kept for it.

    for p: y[p] = f(x[p - 1], x[p], x[p + 1])  ->  a, b, c = x[start - 1], x[start], x[start + 1]
                                                   for p: d = x[p + 2]; y[p] = f(a, b, c); a, b, c = b, c, d

What step p + 1 loads at one place, step p loads at another one: the offsets and masks of the first are those of the
second with p + 1 in the place of p. So each line of an image is loaded once by a thread that walks down.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from tilewright.ir.dtype import DType
from tilewright.ir.expr import (
    Axis,
    Expr,
    axes_of,
    axis,
    both,
    call,
    conjuncts,
    const,
    is_const,
    substitute,
    walk,
)
from tilewright.ir.program import (
    Buffer,
    Compute,
    Declare,
    Load,
    Loop,
    Stmt,
    Store,
    TileProgram,
    Update,
    Var,
    defines,
    is_binding,
    rewrite_body,
    uses,
    value_of,
    walk_statements,
)
from tilewright.ir.sizes import dims

from .descriptors import DATA


@dataclass(frozen=True, slots=True)
class _MaskedRead:
    """What a value is: elements of memory where all of some conditions hold, which `mask` has in their order, else
    0."""

    buffer: Buffer
    offset: Expr
    conditions: frozenset[Expr]
    dtype: DType
    mask: Expr | None = field(compare=False)

    @classmethod
    def of(cls, s: Load, mask: Expr | None) -> _MaskedRead:
        """A load under a mask."""
        return cls(s.buffer, s.offset, frozenset(conjuncts(mask)), s.var.dtype, mask)

    def at(self, place: Axis, value: Expr) -> _MaskedRead:
        """The same with `value` in the place of an axis."""
        put = {axis(place): value}
        mask = None if self.mask is None else substitute(self.mask, put)
        offset, conditions = substitute(self.offset, put), frozenset(conjuncts(mask))
        return replace(self, offset=offset, conditions=conditions, mask=mask)

    def where(self, condition: Expr) -> _MaskedRead:
        """The same where a condition holds, too."""
        mask = condition if self.mask is None else both(self.mask, condition)
        return replace(self, conditions=frozenset(conjuncts(mask)), mask=mask)

    def load(self, var: Var) -> Load:
        """A load of it."""
        other = None if self.mask is None else const(0, self.dtype)
        return Load(var, self.buffer, self.offset, self.mask, other)


def with_carried_loads(program: TileProgram) -> TileProgram:
    """The same meaning: loops of single steps keep what their next step reads again. What is stored anywhere in the
    program is loaded anew."""
    stored = {s.buffer.name for s in program.statements() if isinstance(s, Store)}
    if program.over:
        return program
    fresh = _first_fresh(program.body, 0)

    def change(s: Stmt) -> Sequence[Stmt] | None:
        nonlocal fresh
        if not isinstance(s, Loop) or s.tile != 1 or is_binding(s):
            return None
        made = _carried(s, stored, fresh)
        if made is not None:
            fresh = max(fresh, _first_fresh(made, fresh))
        return made

    return replace(program, body=rewrite_body(program.body, change))


def _first_fresh(body: Sequence[Stmt], least: int) -> int:
    """The first number that nothing has."""
    return max((1 + v.id for s in walk_statements(body) for v in defines(s)), default=least)


def _carried(loop: Loop, stored: Set[str], fresh: int) -> Sequence[Stmt] | None:
    """The first values, their states and the loop; None if no step reads what the one before has read, or if there may
    be no step."""
    if not dims.at_least(dims.sub(loop.stop, loop.start), 1):
        return None
    found = {v: b for v, b in _blocks(loop.body).items() if b.buffer.name not in stored}
    moving = {v: b for v, b in found.items() if axis(loop.axis) in axes_of(b.offset)}
    choices = {v.id for v in moving}
    others = [s for s in loop.body if not (isinstance(s, Compute) and s.var.id in choices)]
    read = {v for s in walk_statements(others) for v in uses(s)}
    moving = {v: b for v, b in moving.items() if v.id in read}  # not what only choices read
    value_at = {b: v for v, b in moving.items()}
    step = dims.add(axis(loop.axis), dims.ONE)
    next_of = {v: n for v, b in moving.items() if (n := value_at.get(b.at(loop.axis, step))) is not None}
    if not next_of:
        return None
    numbers = itertools.count(fresh)
    before: list[Stmt] = []
    for v, block in moving.items():
        first = Var(next(numbers), v.dtype, v.axes)
        before += [block.at(loop.axis, loop.start).load(first), Declare((v,), (value_of(first),))]
    ahead: list[Load] = []
    more = call("lt", step, loop.stop)
    for v, block in moving.items():
        if v not in next_of:  # a step loads what only the next one reads, so that nothing waits for memory
            own = Var(next(numbers), v.dtype, v.axes)
            ahead.append(block.at(loop.axis, step).where(more).load(own))
            next_of[v] = own
    states = {v.id for v in moving}
    kept = _without_unread([s for s in loop.body if not states & {v.id for v in defines(s)}])
    update = Update(tuple(moving), tuple(value_of(next_of[v]) for v in moving))
    body = (*ahead, *kept, update)
    steps, length = dims.static(dims.sub(loop.stop, loop.start)), _rotation_length(next_of)
    whole = steps is None or steps >= length  # else the steps that are written out are never run
    return (*before, replace(loop, body=body, unrolled=length if whole else 1))


def _rotation_length(next_of: Mapping[Var, Var]) -> int:
    """After how many steps every value is in the register again in which it was."""
    longest = 1
    for v in next_of:
        way = {v}
        while (
            then := next_of.get(v)
        ) is not None and then not in way:  # rows that come around end where they began
            way.add(then)
            v = then
        longest = max(longest, len(way))
    return longest


def _without_unread(body: Sequence[Stmt]) -> list[Stmt]:
    """Without loads that nothing reads."""
    used = {v for s in walk_statements(body) for v in uses(s)}
    return [s for s in body if not isinstance(s, Load) or s.var.id in used]


def _blocks(body: Sequence[Stmt]) -> dict[Var, _MaskedRead]:
    """The values that statements define and that are blocks of memory: loads, and choices between one and 0."""
    found: dict[Var, _MaskedRead] = {}
    whole: dict[int, Load] = {}
    for s in body:
        if isinstance(s, Load) and _is_plain(s):
            found[s.var] = _MaskedRead.of(s, s.mask)
            if s.mask is None:
                whole[s.var.id] = s
        elif isinstance(s, Compute) and s.expr.op == "where":
            condition, value, other = s.expr.args
            read = whole.get(value.value) if value.op == "var" and isinstance(value.value, int) else None
            if (
                read is not None
                and is_const(other, 0)
                and s.var.dtype is read.var.dtype
                and _is_index(condition)
            ):
                found[s.var] = _MaskedRead.of(read, condition)
    return found


def _is_plain(s: Load) -> bool:
    """Whether nothing but places decides what a load gives, which is 0 where it loads nothing."""
    masked = s.mask is None or (_is_index(s.mask) and s.other is not None and is_const(s.other, 0))
    return masked and _is_index(s.offset) and s.descriptor is None


def _is_index(e: Expr) -> bool:
    return not any(x.op in DATA for x in walk(e))
