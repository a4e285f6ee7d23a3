"""Sampling at places taken from data."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.builder import Builder
from tilewright.ir.dtype import i64
from tilewright.ir.expr import Expr, call, cast, const, narrow, read, where
from tilewright.ir.graph import Value
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes

from .common import number, position, within
from .view import replicated


def _place(g: Expr, size: Expr, align_corners: bool, border: bool) -> Expr:
    """A coordinate in [-1, 1] as a place in [0, size - 1]; outside it moves to the border if asked, and
    what is no number to the first."""
    n = cast(size, g.dtype)
    one, two = number(1, g), number(2, g)
    if align_corners:
        place = call("mul", call("div", call("add", g, one), two), call("sub", n, one))
    else:
        place = call("div", call("sub", call("mul", call("add", g, one), n), one), two)
    if not border:
        return place
    last = call("minimum", place, call("sub", n, one))
    return where(call("gt", place, number(0, g)), last, number(0, g))


def grid_sample(b: Builder, x: Value, grid: Value, nearest: bool, border: bool, align_corners: bool) -> Value:
    """x [N, C, spatial] sampled at grid [N, out, d], whose last dim holds d coordinates, the last spatial dim first.
    Linear in each dim, or `nearest`; places outside read 0, or the border."""
    space = x.shape[2:]
    axes = output_axes((*x.shape[:2], *grid.shape[1:-1]))
    i = [position(a) for a in axes]
    acc = x.dtype.compute
    places: list[Expr] = []
    for k, s in enumerate(space):
        last = dims.integer(len(space) - 1 - k)
        g = cast(read(1, [i[0], *i[2:], last], grid.dtype), acc)
        places.append(_place(g, s, align_corners, border))
    if nearest:
        body = _tap(x, i, [call("round", p) for p in places], acc_zero=const(0, acc))
    else:
        body = _linear(x, i, places)
    (out,) = b.emit("grid_sample", (x, grid), TensorExpr(axes, (narrow(body, x.dtype),)))
    return out


def _tap(x: Value, i: Sequence[Expr], places: Sequence[Expr], acc_zero: Expr) -> Expr:
    """The element of x at whole places, 0 outside."""
    checks = [
        call("and", call("ge", p, number(0, p)), call("le", p, cast(dims.sub(s, dims.ONE), p.dtype)))
        for p, s in zip(places, x.shape[2:], strict=True)
    ]
    condition = within(checks)
    assert condition is not None
    inner = [replicated(cast(p, i64), s) for p, s in zip(places, x.shape[2:], strict=True)]
    element = read(0, [*i[:2], *inner], x.dtype)
    return where(condition, cast(element, acc_zero.dtype), acc_zero)


def _linear(x: Value, i: Sequence[Expr], places: Sequence[Expr]) -> Expr:
    lows = [call("floor", p) for p in places]
    total: Expr | None = None
    for corner in range(1 << len(places)):
        chosen: list[Expr] = []
        weight: Expr | None = None
        for k, (p, low) in enumerate(zip(places, lows, strict=True)):
            upper = bool(corner >> k & 1)
            far = call("sub", p, low)
            w = far if upper else call("sub", number(1, p), far)
            chosen.append(call("add", low, number(1, p)) if upper else low)
            weight = w if weight is None else call("mul", weight, w)
        assert weight is not None
        term = call("mul", _tap(x, i, chosen, const(0, weight.dtype)), weight)
        total = term if total is None else call("add", total, term)
    assert total is not None
    return total
