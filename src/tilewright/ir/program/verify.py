"""The laws of a body: values are defined before use, axes are bound where used, states stay states; and every grid
point waits before it touches memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewright.ir.expr import Axis, walk

from .statements import Await, Branch, Check, Declare, Load, Loop, Nest, Release, Stmt, Store, Update
from .walks import defines, expressions, in_order, is_binding, uses, walk_statements


def verify_body(
    body: Sequence[Stmt],
    known: set[int],
    blocks: set[int],
    states: set[int],
    bound: set[Axis],
    buffers: set[str],
) -> None:
    """Raise ValueError unless the statements fit what is known before them: numbers of values, which of these are
    blocks or states, bound axes, names of buffers."""
    known, blocks, states = set(known), set(blocks), set(states)
    for s in in_order(body):
        loose = [v for v in uses(s) if v not in known]
        if loose:
            raise ValueError(f"{s}: uses v{loose[0]} before definition")
        if isinstance(s, Loop) and any(v in blocks for v in uses(s)):
            raise ValueError(f"a loop over {s.axis.name} ends at a block")
        for e in expressions(s):
            unbound = [
                x for x in walk(e) if isinstance(x.value, Axis) and x.op == "axis" and x.value not in bound
            ]
            if unbound:
                raise ValueError(f"{s}: axis {unbound[0]} is not bound here")
        if isinstance(s, (Load, Store)) and s.buffer.name not in buffers:
            raise ValueError(f"{s}: unknown buffer {s.buffer.name}")
        if isinstance(s, Update) and not all(v.id in states for v in s.vars):
            raise ValueError(f"{s}: updates a value that is not a state")
        known |= {v.id for v in defines(s)}
        blocks |= {v.id for v in defines(s) if v.axes}
        if isinstance(s, Declare):
            states |= {v.id for v in s.vars}
        if isinstance(s, Loop):
            if s.axis in bound:
                raise ValueError(f"axis {s.axis.name} is bound twice")
            verify_body(s.body, known, blocks, states, bound | {s.axis}, buffers)
        if isinstance(s, Branch):
            verify_body(s.body, known, blocks, states, bound, buffers)
            verify_body(s.orelse, known, blocks, states, bound, buffers)


def verify_order(body: Sequence[Stmt]) -> None:
    """Raise ValueError unless a program with an `Await` or a `Release` has one `Await`, which every grid point reaches
    once and before it touches memory, and at most one `Release`, in front of it or behind it, where a point comes once.

    A point that went past the wait could end before the kernel in front does. The kernel behind waits for the end of
    this one, and would take it for the end of both."""
    every = list(walk_statements(body))
    awaits, releases = (sum(isinstance(s, kind) for s in every) for kind in (Await, Release))
    if not awaits and not releases:
        return
    place = next((k for k, s in enumerate(body) if isinstance(s, Await)), None)
    if awaits != 1 or place is None:
        raise ValueError("not every grid point waits once for the kernel in front")
    early = [s for s in walk_statements(body[:place]) if isinstance(s, (Load, Store, Check))]
    if early:
        raise ValueError(f"{early[0]}: touches memory before the kernel in front has ended")
    if releases > 1 or releases != sum(isinstance(s, Release) for s in _once(body)):
        raise ValueError("the kernel behind is released more than once, or where not every point comes once")


def _once(body: Sequence[Stmt]) -> Iterator[Stmt]:
    """The statements that each grid point comes to once."""
    for s in body:
        yield s
        if isinstance(s, Nest) or (isinstance(s, Loop) and is_binding(s)):
            yield from _once(s.body)
