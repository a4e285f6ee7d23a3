"""Conditions as what they say of the lanes of one register."""

from __future__ import annotations

from tilewright.ir.dtype import i64
from tilewright.ir.expr import Axis, Expr, axes_of, walk
from tilewright.ir.sizes import dims

MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}
KINDS = {"lt": "below", "le": "below", "gt": "from", "ge": "from", "eq": "at", "ne": "not at"}


def compare_lanes(e: Expr, lane: Axis) -> tuple[str, Expr] | None:
    """A comparison of indices as ("below", n): it holds in the first n lanes; ("from", n): in all others; ("at", n) or
    ("not at", n): in that lane or all others. n is counted from the first lane of a register, which is the value of
    `lane` in it. None if it is nothing of the kind."""
    if e.op not in MIRRORED or e.args[0].dtype is not i64 or any(x.op == "var" for x in walk(e)):
        return None
    leaf = next((x for x in axes_of(e) if x.value == lane), dims.ZERO)
    coefficient = dims.coefficient(dims.sub(e.args[0], e.args[1]), leaf)
    step = None if coefficient is None else dims.static(coefficient)
    if step not in (1, -1):
        return None
    op, (left, right) = e.op, e.args
    if step == -1:
        left, right, op = right, left, MIRRORED[op]
    far = dims.sub(right, left)
    return KINDS[op], dims.add(far, dims.ONE) if op in ("le", "gt") else far
