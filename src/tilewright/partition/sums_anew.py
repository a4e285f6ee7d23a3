"""Kernels that compute a sum anew beside a value that another kernel folded of it.

The gradient of a softmax shows why that may be wrong: dS = P (dP - sum(P dP)), where dP is a product of matrices. The
rounding errors of dP cancel where P is near 1, but only if both terms see the same dP: another kernel may add up in
another order. Large products are computed in blocks that take their terms in order, whoever reads them; what is small
is computed in whatever order its kernel likes, and storing it costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.graph import Graph, Op, Value
from tilewright.tuning.thresholds import REGION_STORES

from .regions import is_product


class SumsAnew:
    """For values of a region, the products of which they hold folds, as the bits of a number by their place."""

    def __init__(self, region: Graph, hints: SizeHints) -> None:
        readers = region.consumers()
        exact = [
            op
            for op in region.ops
            if is_product(op)
            and _keeps_digits(op.output, readers.get(op.output, ()))
            and hints.estimate(op.output.numel) < REGION_STORES.max_small_elements
        ]
        self.products = tuple(op.output for op in exact if op.output in readers)
        """What another kernel may be given instead."""
        self._folded: dict[Value, int] = {}
        above: dict[Value, int] = {}
        for n, op in enumerate(region.ops):
            folds = op.expr is not None and op.expr.reduction is not None
            made = seen = 0
            for v in op.inputs:
                made |= self._folded.get(v, 0)
                seen |= above.get(v, 0)
            for v in op.outputs:
                self._folded[v] = made | seen if folds else made
                above[v] = seen | (1 << n if op in exact else 0)

    def spoil(self, ops: int, given: Collection[Value]) -> bool:
        """Whether a kernel of these ops (bits by their place) makes a product of which it is given a fold."""
        return any(self._folded[v] & ops for v in given)


def _keeps_digits(v: Value, readers: Collection[Op]) -> bool:
    """Whether someone reads more of a value than a half, which hides how it was summed."""
    return (
        v.dtype.is_float
        and not v.dtype.is_half
        and not (readers and all(r.output.dtype.is_half for r in readers))
    )
