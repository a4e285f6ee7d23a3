"""Sizes that are equal range by range, and some that are not."""

from __future__ import annotations

import itertools

import pytest

from tilewright.ir.expr import Expr, integer, symbol
from tilewright.ir.sizes import cases, dims

S, U = symbol("s"), symbol("u", 2)
ZERO, ONE = integer(0), integer(1)


def _sum(e: Expr, n: int) -> Expr:
    return dims.add(e, integer(n))


def _above(e: Expr, n: int = 0) -> Expr:
    return dims.maximum(e, integer(n))


PAIRS: dict[str, tuple[Expr, Expr, bool]] = {
    "every third element from the second on": (
        dims.ceildiv(_above(dims.sub(S, dims.minimum(S, ONE))), integer(3)),
        dims.floordiv(_sum(S, 1), integer(3)), True,
    ),
    "half of the rest": (dims.ceildiv(_above(_sum(S, -1)), integer(2)), dims.floordiv(S, integer(2)), True),
    "half of the rest and one more": (
        dims.ceildiv(_above(_sum(S, -1)), integer(2)), dims.floordiv(_sum(S, 1), integer(2)), False,
    ),
    "differs at 0": (_above(_sum(S, -1)), _sum(S, -1), False),
    "differs above 9": (dims.minimum(S, integer(10)), S, False),
    "both ends": (
        dims.sub(dims.minimum(S, integer(10)), dims.minimum(S, integer(3))),
        _above(_sum(dims.minimum(S, integer(10)), -3)), True,
    ),
    "of two symbols": (_above(dims.sub(S, U)), dims.sub(S, U), False),
    "from the other side": (
        _above(dims.sub(integer(7), dims.mul(S, integer(2)))),
        dims.sub(integer(7), dims.mul(dims.minimum(S, integer(3)), integer(2))), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_equal_by_cases(name: str) -> None:
    a, b, equal = PAIRS[name]
    assert cases.equal(a, b) == equal and not dims.equal(a, b)


def test_no_pair_is_called_equal_that_differs_somewhere() -> None:
    made = [e for a, b, _ in PAIRS.values() for e in (a, b)]
    made += [_sum(e, 1) for e in made]
    for a, b in itertools.combinations(made, 2):
        points = [{"s": s, "u": u} for s in range(14) for u in (2, 3, 9)]
        if any(dims.evaluate(a, p) != dims.evaluate(b, p) for p in points):
            assert not cases.equal(a, b)


@pytest.mark.parametrize(("number", "quotient"), [(-1, -1), (-2, -1), (-3, None)])
def test_a_number_just_below_0_by_a_size(number: int, quotient: int | None) -> None:
    assert dims.static(dims.floordiv(integer(number), U)) == quotient
    rest = dims.mod(integer(number), U)
    assert (rest is _sum(U, number)) == (quotient is not None)
