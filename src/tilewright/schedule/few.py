"""Which class of unknown extent are the few rows of products, for which a kernel has programs of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import dims
from ..ir.expr import Axis
from .contract import sides
from .form import Form

FEW = 8
"""Rows that fill at most half of the smallest block."""


def open_rows(form: Form, grid: Sequence[Axis], inner: Sequence[Axis]) -> tuple[Axis, int] | None:
    """The class of unknown extent among the rows of products, and how many rows there are for each element of it; None
    if there is none, or not one. Another fold walks what stands against them, or, where none of products does, them."""
    found = [s for i in form.folds.values() if (s := sides(i)) is not None]
    passed = {a for *_, folded in found for a in folded} & {a for s in found for side in s[:2] for a in side}
    where = set(grid) if passed & set(inner) else set(inner) - {a for *_, folded in found for a in folded}
    rows = {a for s in found for side in s[:2] if set(side) & where for a in side}
    open_ = [a for a in rows if a.extent.op == "symbol"]
    beside = [dims.static(a.extent) for a in rows if a not in open_]
    if len(open_) != 1 or None in beside:
        return None
    return open_[0], math.prod(n or 1 for n in beside)
