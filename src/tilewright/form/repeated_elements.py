"""Folds of elements that are the same along a class.

    sum of x over n places     = n x
    maximum of x over n places = x

An operand of stride 0 and an expanded one repeat elements. A chain of n additions of one number rounds the same way
again and again, and takes n steps; the product rounds once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tilewright.ir.expr import Axis, Expr, axes_of, axis, call, cast
from tilewright.ir.reduction import Reduction
from tilewright.ir.sizes import dims

_IDEMPOTENT = frozenset({"maximum", "minimum", "and", "or"})


def fold_repeated(
    body: Sequence[Expr], over: Collection[Axis], reduction: Reduction
) -> tuple[tuple[Expr, ...], tuple[Axis, ...]]:
    """The elements of a fold and the classes that it has to walk: none along which all elements are the same, where the
    state of one element says that of n equal ones. Classes that may have no place stay."""
    used = frozenset[Expr]().union(*map(axes_of, body))
    same = [a for a in over if axis(a) not in used and dims.at_least(a.extent, 1)]
    kept = tuple(a for a in over if a not in same)
    if not same or any(x.op != "slot" for x in (*reduction.lift, *reduction.finish)):
        return tuple(body), tuple(over)
    if reduction.combiner in _IDEMPOTENT:
        return tuple(body), kept
    if reduction.combiner == "add":
        count = dims.prod([a.extent for a in same])
        return (call("mul", body[0], cast(count, body[0].dtype)),), kept
    return tuple(body), tuple(over)
