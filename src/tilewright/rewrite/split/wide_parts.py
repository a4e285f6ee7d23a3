"""Sums of singles whose parts are doubles in memory, where terms may cancel.

    s[i] = sum over p of (sum over r in part p of x(i, r))        parts in doubles, the whole rounded once

Each addition of singles rounds to half a unit of what has been summed so far, so a sum that comes out small keeps few
digits. Rounded parts would lose what cancels between them (see `form.wide_sums` for sums that are not split).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilewright.analysis.contraction import is_product_of_blocks
from tilewright.analysis.value.sign import sign_of
from tilewright.ir.dtype import DType, f32, f64
from tilewright.ir.expr import Expr, call, cast, const, read, slot, walk
from tilewright.ir.reduction import Reduction, sum_
from tilewright.ir.tensor import TensorExpr

SINGLES = sum_(f32)
"""The sum of singles, over a state of a single."""


def _in_doubles(name: str, element: DType, *, rounded: bool) -> Reduction:
    a, b, e = slot("a", 0, f64), slot("b", 0, f64), slot("e", 0, element)
    return Reduction(
        name,
        (element,),
        (f64,),
        (const(0, f64),),
        (cast(e, f64),),
        (call("add", a, b),),
        (cast(a, f32) if rounded else a,),
    )


IN_DOUBLES = _in_doubles("sum in doubles", f32, rounded=True)
"""The sum of singles over a state of a double."""
TO_DOUBLES = _in_doubles("sum to doubles", f32, rounded=False)
"""The same, which its readers round: a sum of n equal singles, divided by n, is that single only if it was not rounded
before."""
OF_PARTS = _in_doubles("sum of parts", f64, rounded=True)
"""The sum of singles from its parts, each a double."""


def with_wide_parts(part: TensorExpr, merge: TensorExpr) -> tuple[TensorExpr, TensorExpr]:
    """A sum in two steps, what it keeps of each part in doubles. `merge` reads the parts as its first operand."""
    return (
        replace(part, body=(cast(part.body[0], f64),), reduction=sum_(f64)),
        replace(merge, body=(read(0, merge.body[0].args, f64),), reduction=OF_PARTS),
    )


def may_cancel(expr: TensorExpr, summed: Callable[[], Expr]) -> bool:
    """Whether a fold sums singles of both signs that were no halves, and no products of blocks. `summed` tells what it
    sums, seen through the pointwise ops before it; it is asked of sums of singles alone, as it walks through them."""
    if expr.reduction != SINGLES or expr.scan is not None:
        return False
    term = summed()
    halves = any(x.op == "read" and x.dtype.is_half for x in walk(term))
    return cancels(term, halves) and not is_product_of_blocks(term, expr.axes, expr.reduce)


def cancels(term: Expr, halves: bool) -> bool:
    """Whether what is summed has both signs, and no halves among what it reads (`halves`)."""
    sign = sign_of(term)
    return not halves and not sign.nonnegative and not sign.nonpositive
