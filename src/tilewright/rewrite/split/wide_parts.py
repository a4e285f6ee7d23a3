"""Which sums of singles leave doubles of their parts: those whose terms may cancel.

    s[i] = sum over p of (sum over r in part p of x(i, r))        parts in doubles, the whole rounded once

Each addition of singles rounds to half a unit of what has been summed so far, so a sum that comes out small keeps few
digits. Rounded parts would lose what cancels between them (see `form.wide_sums` for sums that are not split).
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.analysis.contraction import is_product_of_blocks
from tilewright.analysis.value.sign import sign_of
from tilewright.ir.expr import Expr, walk
from tilewright.ir.tensor import TensorExpr

from .merge_laws import SINGLES


def may_cancel(expr: TensorExpr, summed: Callable[[], Expr]) -> bool:
    """Whether a reduction sums singles of both signs that were no halves, and no products of blocks. `summed` tells
    what it sums, seen through the pointwise ops before it; it is asked of sums of singles alone, as it walks through
    them."""
    if expr.reduction != SINGLES or expr.scan is not None:
        return False
    term = summed()
    halves = any(x.op == "read" and x.dtype.is_half for x in walk(term))
    return cancels(term, halves) and not is_product_of_blocks(term, expr.axes, expr.reduce)


def cancels(term: Expr, halves: bool) -> bool:
    """Whether what is summed has both signs, and no halves among what it reads (`halves`)."""
    sign = sign_of(term)
    return not halves and not sign.nonnegative and not sign.nonpositive
