"""Kernels that begin before the kernel in front has ended: where they wait for it, and where they let the next begin.

They wait in front of all that they do. The kernel behind is released in front of the last stores, when nothing is left
to load: what it does before its own wait needs no memory, and its grid points get no place on the machine before all of
this kernel's have begun. A kernel that has little to do with memory releases first of all: then the one behind is on
the machine before it is needed, and the end of the kernel in front is still waited for, as this one ends after it and
the one behind waits for this one's end. A block that goes through grid points (`TileProgram.persistent`) waits once and
releases the kernel behind in its first point: that one waits for the end of all of them before it touches memory."""

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
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import GPU_BLOCKS


def with_early_launch(program: TileProgram, *, outside: bool) -> TileProgram:
    """The program with its wait, which may be one for a kernel from `outside`, and its release."""
    if any(isinstance(s, Await) for s in program.body):
        return program
    if not program.persistent and _moves_little(program):
        return replace(program, body=(Release(), Await(outside), *program.body))
    return replace(program, body=(Await(outside), *_released(program.body)))


def _moves_little(program: TileProgram) -> bool:
    """Whether all that a kernel reads and stores is known to be little."""
    sizes = [dims.static(b.size) for b in program.params]
    found = sum(n * b.dtype.bytes for n, b in zip(sizes, program.params, strict=True) if n is not None)
    return None not in sizes and found <= GPU_BLOCKS.max_early_release_bytes


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
