"""Decisions are the same in every process: nothing follows the order of a set, which follows addresses."""

from __future__ import annotations

from tilewright.analysis.loop_classes import terms_of
from tilewright.ir.expr import Axis, Expr, axis
from tilewright.ir.sizes import dims


def test_terms_stand_in_the_order_in_which_an_offset_names_them() -> None:
    for turn in range(40):
        axes = [Axis(f"c{turn}_{k}", dims.integer(8)) for k in range(6)]
        offset: Expr = dims.ZERO
        for k, a in enumerate(axes):
            offset = dims.add(offset, dims.mul(axis(a), dims.integer(8**k)))
        assert list(terms_of(offset)) == axes
