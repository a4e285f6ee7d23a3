"""Accesses of one buffer at known distances of each other: their addresses are one, and the distance is part of the
instruction.

    x[e + 96], x[e + 192]     is printed as     (x + e) + 96, (x + e) + 192

Only what lies so near that an instruction holds the distance, and that (x + e) stays in reach of 32 bits where x[e] is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.expr import Expr
from tilewright.ir.program import Branch, Load, Loop, Nest, Stmt, Store
from tilewright.ir.sizes import dims
from tilewright.lower.variants import NARROW_LIMIT


def share_addresses(body: Sequence[Stmt], most_bytes: int) -> tuple[Stmt, ...]:
    """`body` whose accesses say how far `behind` the address they lie that they share with others; an instruction holds
    distances up to `most_bytes`."""
    shared = Counter(_address(s) for s in body if isinstance(s, (Load, Store)))
    made: list[Stmt] = []
    for s in body:
        match s:
            case Load() | Store() if shared[_address(s)] > 1 and _is_plain(s):
                s = replace(s, behind=_distance(s, most_bytes))
            case Loop() | Nest():
                s = replace(s, body=share_addresses(s.body, most_bytes))
            case Branch():
                yes, no = (share_addresses(b, most_bytes) for b in (s.body, s.orelse))
                s = replace(s, body=yes, orelse=no)
            case _:
                pass
        made.append(s)
    return tuple(made)


def _address(s: Load | Store) -> tuple[str, Expr]:
    """What accesses at known distances have in common."""
    return s.buffer.name, dims.sub(s.offset, dims.integer(_known_part(s.offset)))


def _known_part(offset: Expr) -> int:
    return dims.linear(offset).get((), 0)


def _distance(s: Load | Store, most_bytes: int) -> int:
    known = _known_part(s.offset)
    left = (1 << 31) - 1 - NARROW_LIMIT
    return known if abs(known) <= min(left, most_bytes // s.buffer.dtype.bytes) else 0


def _is_plain(s: Load | Store) -> bool:
    """Whether an access is printed as it is: nothing is told of its runs, and it is not spread."""
    return not s.runs and (isinstance(s, Store) or (s.descriptor is None and not s.alike))
