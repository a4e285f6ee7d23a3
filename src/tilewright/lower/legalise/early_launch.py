"""Kernels that begin before the kernel in front has ended: where they wait for it, and where they let the next begin.

They wait in front of all that they do. The kernel behind is released in front of the last stores, when nothing is left
to load: what it does before its own wait needs no memory, and its grid points get no place on the machine before all of
this kernel's have begun. A block that goes through grid points (`TileProgram.persistent`) waits once, and releases the
kernel behind in its first point: that one waits for the end of all of them before it touches memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.program import (
    Await,
    Branch,
    Load,
    Loop,
    Nest,
    Release,
    Stmt,
    Store,
    TileProgram,
    is_binding,
    walk_statements,
)


def with_early_launch(program: TileProgram, *, outside: bool) -> TileProgram:
    """The program with its wait, which may be one for a kernel from `outside`, and its release."""
    if any(isinstance(s, Await) for s in program.body):
        return program
    return replace(program, body=(Await(outside), *_released(program.body)))


def _released(body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """A body with a release behind its last load; in front of a part that is run many times, or not by all, and that
    stores, too."""
    last = next((k for k in reversed(range(len(body))) if _has(body[k], Load)), -1)
    s = body[last] if last >= 0 else None
    if isinstance(s, Nest) or (isinstance(s, Loop) and is_binding(s)):
        return (*body[:last], replace(s, body=_released(s.body)), *body[last + 1 :])
    if isinstance(s, (Loop, Branch)) and _has(s, Store):
        last -= 1
    return (*body[: last + 1], Release(), *body[last + 1 :])


def _has(s: Stmt, kind: type[Load] | type[Store]) -> bool:
    return any(isinstance(x, kind) for x in walk_statements((s,)))
