"""Indices as floats: each axis by itself.

A block of `f32(i - j)`, as a bias by distance has it, is a conversion for each of its elements, and a machine makes an
eighth as many of these as it adds. `f32(i) - f32(j)` is the same number where all are integers below 2^24, which fp32
has exactly, and takes a conversion for each row and each column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, Expr, axes_of, axis, call, cast, transform
from tilewright.ir.program import Compute, Stmt, TileProgram, Update, rewrite_body
from tilewright.ir.sizes import dims
from tilewright.lower.variants import is_index

MAX_EXACT = 1 << 22
"""Integers up to here, sums of two of them, and lanes as far behind the end of an axis are exact in fp32 (24 bits)."""


def convert_by_axes(program: TileProgram) -> TileProgram:
    """`program`, in which sums of several block axes become floats axis by axis."""
    blocks = {s.axis for s in program.loops() if s.tile > 1}

    def found(e: Expr) -> Expr | None:
        return _apart(e, blocks) if e.op == "cast" and e.dtype is f32 and is_index(e.args[0]) else None

    def change(s: Stmt) -> Sequence[Stmt] | None:
        match s:
            case Compute():
                return (replace(s, expr=transform(s.expr, found)),)
            case Update():
                return (replace(s, values=tuple(transform(e, found) for e in s.values)),)
            case _:
                return None

    return replace(program, body=rewrite_body(program.body, change))


def _apart(e: Expr, blocks: set[Axis]) -> Expr | None:
    """A float of a sum as a sum of floats, each of one block axis or none; None if it has only one, or may be large."""
    parts: dict[frozenset[Axis], Expr] = {}
    for monomial, factor in dims.linear(e.args[0]).items():
        own = frozenset(a for a in blocks if any(axis(a) in axes_of(m) for m in monomial))
        term = dims.mul(dims.integer(factor), *monomial)
        parts[own] = dims.add(parts.get(own, dims.ZERO), term)
    alone = parts.pop(frozenset(), dims.ZERO)
    if len(parts) != 2 or any(len(own) != 1 for own in parts):
        return None
    first, second = parts.values()
    first = dims.add(first, alone)
    if not all(_is_small(x) for x in (first, second)):
        return None
    return call("add", cast(first, f32), cast(second, f32))


def _is_small(e: Expr) -> bool:
    """Whether an index surely lies within `MAX_EXACT`."""
    low, high = dims.int_range(e)
    return low is not None and high is not None and -MAX_EXACT <= low and high <= MAX_EXACT
