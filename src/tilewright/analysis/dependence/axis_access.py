"""How one dim of a read follows the axes of its op: in pieces that are one loop with it, as a window, or loosely.

A *piece* says that some digits of a dim, written in a mixed radix, are some digits of an axis: `(a // step) % count`
of an axis a, at stride `stride` of the dim. Plain reads, splits (`i // 64`, `i % 64`) and merges (`h * 64 + d`) are
sequences of pieces that cover the dim, or one of its equal parts, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from tilewright.ir.expr import Axis, Expr, axes_of, walk
from tilewright.ir.sizes import dims


@dataclass(frozen=True, slots=True)
class AxisDigits:
    """Digits of axis `axis` from place value `step` on, `count` in all, stand at place value `stride` of a dim."""

    axis: Axis
    step: Expr
    count: Expr
    stride: Expr


@dataclass(frozen=True, slots=True)
class DimAccess:
    """One dim of one read. `kind`: "fixed" (no axis), "pieces", "window" (around a place that `axes` give), "loose"
    (some function of `axes`), "data" (wherever data says)."""

    kind: Literal["fixed", "pieces", "window", "loose", "data"]
    pieces: tuple[AxisDigits, ...] = ()
    axes: tuple[Axis, ...] = ()


@lru_cache(1 << 14)
def access_of(index: Expr, extent: Expr, reduced: frozenset[Axis]) -> DimAccess:
    """How a dim of `extent` is read at `index` by an op that reduces the axes `reduced`."""
    if any(x.op == "read" for x in walk(index)):
        return DimAccess("data")
    used = tuple(sorted((a.value for a in axes_of(index) if isinstance(a.value, Axis)), key=lambda a: a.name))
    if not used:
        return DimAccess("fixed")
    pieces = pieces_of(index, extent)
    if pieces is not None:
        return DimAccess("pieces", pieces)
    if _is_window(index, extent, reduced, used):
        return DimAccess("window", axes=tuple(a for a in used if a not in reduced))
    return DimAccess("loose", axes=used)


def pieces_of(index: Expr, extent: Expr) -> tuple[AxisDigits, ...] | None:
    """The pieces, lowest first, of an index that runs once over all of a dim of `extent`, or over one of its equal
    parts (a chunk); None if it does neither."""
    fixed = {m: c for m, c in dims.linear(index).items() if not any(axes_of(atom) for atom in m)}
    left = [_piece(m, c) for m, c in dims.linear(index).items() if m not in fixed]
    chain: list[AxisDigits] = []
    at = dims.ONE
    while left:
        following = next((p for p in left if p is not None and dims.equal(p.stride, at)), None)
        if following is None:
            return None
        chain.append(following)
        left.remove(following)
        at = dims.mul(at, following.count)
    start = dims.from_linear(fixed)
    aligned = dims.exact_div(extent, at) is not None and dims.exact_div(start, at) is not None
    return tuple(chain) if aligned else None


def _piece(monomial: tuple[Expr, ...], factor: int) -> AxisDigits | None:
    moving = [a for a in monomial if axes_of(a)]
    if factor <= 0 or len(moving) != 1:
        return None
    stride = dims.mul(dims.integer(factor), *(a for a in monomial if a is not moving[0]))
    digits = _digits(moving[0])
    return None if digits is None else AxisDigits(*digits, stride)


def _digits(e: Expr) -> tuple[Axis, Expr, Expr] | None:
    """(a, step, count) if `e` is (a // step) % count, or a // step to the end of a."""
    if isinstance(e.value, Axis):
        return e.value, dims.ONE, e.value.extent
    if e.op not in ("floordiv", "mod") or axes_of(e.args[1]):
        return None
    inner, by = _digits(e.args[0]), e.args[1]
    if inner is None:
        return None
    a, step, count = inner
    quotient = dims.exact_div(count, by)
    if quotient is None:
        return None
    return (a, dims.mul(step, by), quotient) if e.op == "floordiv" else (a, step, by)


def _is_window(index: Expr, extent: Expr, reduced: frozenset[Axis], used: tuple[Axis, ...]) -> bool:
    """Whether reduced axes only move by less than half of the dim around a place that the others give."""
    reach = 0
    for m, c in dims.linear(index).items():
        if not any(a.value in reduced for atom in m for a in axes_of(atom)):
            continue
        a = m[0].value
        size = dims.static(a.extent) if isinstance(a, Axis) and len(m) == 1 else None
        if size is None:
            return False
        reach += abs(c) * (size - 1)
    length = dims.static(extent)
    return reach > 0 and any(a not in reduced for a in used) and (length is None or 2 * reach <= length)


def broadcast(op_axes: tuple[Axis, ...], read: Expr) -> tuple[Axis, ...]:
    """The axes that a read does not use: along them its element is the same (the paper's broadcast property)."""
    used = {a.value for i in read.args for a in axes_of(i)}
    return tuple(a for a in op_axes if a not in used and a.extent is not dims.ONE)


def strides_between(cuts: set[Expr], low: Expr, count: Expr) -> Iterator[Expr]:
    """Cuts strictly inside the digits from place value `low` on, `count` in all, as multiples of `low`."""
    for c in cuts:
        part = dims.exact_div(c, low)
        if part is not None and part is not dims.ONE and not dims.equal(part, count):
            if dims.exact_div(count, part) is not None:
                yield part
