"""What may fail at run time, and where it must not be tried: indices from data, integer divisors from data."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.dtype import bool_, i64
from tilewright.ir.expr import Expr, axes_of, both, call, checked, const, transform, walk, where
from tilewright.ir.program import Buffer
from tilewright.ir.sizes import dims

from .value.sign import sign_of

INDEX_ERROR = 1
"""Code of a failed index check (see `ir.program.Check`)."""
DIVISION_ERROR = 2
"""Code of an integer divided by zero."""

_DIVISIONS = frozenset({"floordiv", "mod", "truncdiv", "fmod"})


def checked_index(i: Expr, size: Expr, *, data: bool = False) -> Expr:
    """Index `i` into a dim of `size`: as it is unless it comes from `data`, which may be known by now, else tested and
    moved inside if it is not proved to lie there. What views make of indices lies inside by itself."""
    known = not from_data(i)
    if known and not data:
        return i
    i = transform(i, _without_wraparound)
    if inside_of(i, size) is None or known and _is_within(i, size):
        return i
    top = dims.sub(size, dims.ONE)
    fits = call("and", call("ge", i, dims.ZERO), call("le", i, top))
    return checked(dims.minimum(dims.maximum(i, dims.ZERO), top), fits)


def _is_within(i: Expr, size: Expr) -> bool:
    """Whether a known index lies in a dim of a known size, by the numbers that it may be."""
    n, may = dims.static(size), sign_of(i)
    return n is not None and may.finite and may.bottom >= 0 and may.top <= n - 1


def _without_wraparound(e: Expr) -> Expr | None:
    """A place counted from the end if it is negative, where it is not."""
    if e.op != "where" or e.args[0].op != "lt" or e.args[0].args[1] is not dims.ZERO:
        return None
    place = transform(e.args[2], _without_wraparound)
    return place if e.args[0].args[0] is e.args[2] and dims.at_least(place, 0) else None


def inside_of(i: Expr, size: Expr) -> Expr | None:
    """The condition that index `i` lies in a dim of `size`; None if that is proved."""
    low = None if dims.at_least(i, 0) else call("ge", i, dims.ZERO)
    high = None if dims.at_least(dims.sub(size, i), 1) else call("lt", i, size)
    return both(low, high)


def checked_where(e: Expr, condition: Expr) -> Expr:
    """`e` with its indices tested only where `condition` holds."""

    def visit(x: Expr) -> Expr | None:
        if x.op != "checked":
            return None
        index, tested = (transform(a, visit) for a in x.args)
        return checked(index, where(condition, tested, const(True, bool_)))

    return transform(e, visit)


def with_tests(e: Expr, index: Sequence[Expr]) -> Expr:
    """`e`, made from `index`, with those tests of it that went lost because `e` is the same along a dim."""
    wanted = [x for i in index for x in walk(i) if x.op == "checked"]
    left = {x for x in walk(e) if x.op == "checked"} if wanted else set[Expr]()
    for x in wanted:
        if x not in left:
            e = checked(e, x.args[1])
    return e


def from_data(e: Expr) -> bool:
    """Whether an index depends on the contents of tensors."""
    return any(x.op in ("read", "value") for x in walk(e))


def divisor(e: Expr) -> Expr | None:
    """The divisor of an integer division, if it may be zero: it comes from data, differs from element to element as
    what a program counts does, or is zero. What is made of sizes alone is known at the call
    (`Builder.require_divisor`)."""
    if e.op not in _DIVISIONS or e.dtype.is_float:
        return None
    by = e.args[1]
    if by.op == "const":
        return by if by.value == 0 else None
    return by if from_data(by) or axes_of(by) and not _is_nonzero(by) else None


def _is_nonzero(e: Expr) -> bool:
    known = e.dtype is i64 and (dims.at_least(e, 1) or dims.at_least(dims.sub(dims.ZERO, e), 1))
    return known or sign_of(e).nonzero


def unsafe(e: Expr, params: Sequence[Buffer]) -> bool:
    """Whether evaluating `e` where it is not meant could touch memory outside a buffer, or divide by zero."""
    for x in walk(e):
        if x.op == "read" and isinstance(x.value, int):
            offset = x.args[0]
            if not (dims.at_least(offset, 0) and dims.at_least(dims.sub(params[x.value].size, offset), 1)):
                return True
        if divisor(x) is not None:
            return True
    return False
