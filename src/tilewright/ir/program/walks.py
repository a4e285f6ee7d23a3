"""What statements evaluate, define and use; bodies walked and rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tilewright.ir.expr import Expr, walk
from tilewright.ir.sizes import dims

from .statements import (
    Await,
    Branch,
    Check,
    Collapse,
    Compute,
    Declare,
    Dot,
    Load,
    Loop,
    Nest,
    Prefix,
    Release,
    Stmt,
    Store,
    Update,
    Var,
)


def walk_statements(body: Sequence[Stmt]) -> Iterator[Stmt]:
    """The statements of a body and of what is inside them, outer before inner."""
    for s in body:
        yield s
        if isinstance(s, (Loop, Nest)):
            yield from walk_statements(s.body)
        elif isinstance(s, Branch):
            yield from walk_statements(s.body)
            yield from walk_statements(s.orelse)


def in_order(body: Sequence[Stmt]) -> Iterator[Stmt]:
    """The statements of a body, those of its nests in their places."""
    for s in body:
        if isinstance(s, Nest):
            yield from s.body
        else:
            yield s


def is_binding(s: Loop) -> bool:
    """Whether a loop has one step."""
    length = dims.static(dims.sub(s.stop, s.start))
    return length is not None and 0 < length <= s.tile


def expressions(s: Stmt) -> list[Expr]:
    """The expressions that a statement evaluates itself (not those of its body)."""
    match s:
        case Load():
            found = [s.offset, s.mask, s.other, s.ahead]
        case Compute():
            found = [s.expr]
        case Store():
            found = [s.offset, s.value, s.mask, s.stream]
        case Declare():
            found = list(s.values)
        case Update():
            found = [*s.values, s.mask]
        case Check():
            found = [s.condition, s.mask]
        case Loop():
            found = [s.start, s.stop]
        case Branch():
            found = [s.condition]
        case Collapse() | Prefix() | Dot() | Nest() | Await() | Release():
            found = []
    return [e for e in found if e is not None]


def defines(s: Stmt) -> tuple[Var, ...]:
    """The values that a statement defines."""
    match s:
        case Load() | Compute():
            return (s.var,)
        case Declare() | Collapse() | Prefix():
            return s.vars
        case _:
            return ()


def uses(s: Stmt) -> tuple[int, ...]:
    """Numbers of the values that a statement reads."""
    found = [x.value for e in expressions(s) for x in walk(e) if x.op == "var"]
    if isinstance(s, (Collapse, Prefix)):
        found += [v.id for v in s.parts]
    if isinstance(s, Dot):
        found += [s.acc.id, s.a.id, s.b.id]
    return tuple(v for v in found if isinstance(v, int))


def rewrite_body(body: Sequence[Stmt], change: Callable[[Stmt], Sequence[Stmt] | None]) -> tuple[Stmt, ...]:
    """Replace statements bottom up: `change` returns the statements that stand for one (None = keep)."""
    out: list[Stmt] = []
    for s in body:
        if isinstance(s, (Loop, Nest)):
            s = replace(s, body=rewrite_body(s.body, change))
        elif isinstance(s, Branch):
            s = replace(s, body=rewrite_body(s.body, change), orelse=rewrite_body(s.orelse, change))
        changed = change(s)
        out.extend((s,) if changed is None else changed)
    return tuple(out)
