"""Predicates in normal form mean what they meant, and laws of logic make them equal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.analysis.value import conditions
from tilewright.analysis.value.conditions import FALSE, TRUE, Condition, TooManyTerms, as_expr
from tilewright.interp import FLOATS
from tilewright.interp.evaluate import Evaluator
from tilewright.ir.dtype import bool_, f32, i32
from tilewright.ir.expr import Axis, Expr, axis, call, integer, read, substitute, symbol
from tilewright.ir.sizes import dims

ROWS, COLUMNS = Axis("i", integer(9)), Axis("j", integer(7))
I_, J_ = axis(ROWS), axis(COLUMNS)
GRID = {ROWS: np.arange(9)[:, None], COLUMNS: np.arange(7)[None, :]}
IDS = np.array([0, 0, 1, 1, 1, 2, 2, 0, 3], np.int32)
DATA = [IDS, np.arange(9) % 3 == 0, np.array([0.5, np.nan, 2, -1, np.nan, 0, 1, 3, 2], np.float32)]
D, T, X = (lambda e, k=k, t=t: read(k, (e,), t) for k, t in enumerate((i32, bool_, f32)))


def truth(e: Expr) -> np.ndarray:
    return np.broadcast_to(Evaluator(FLOATS, DATA, axes=GRID).value(e), (9, 7))


@st.composite
def forms(draw: st.DrawFn) -> Expr:
    a, b, c = (draw(st.integers(-2, 2)) for _ in range(3))
    e = dims.add(dims.mul(I_, integer(a)), dims.mul(J_, integer(b)), integer(c))
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return dims.floordiv(e, integer(3))
    return dims.mod(e, integer(3)) if kind == 1 else call("abs", e) if kind == 2 else e


@st.composite
def comparisons(draw: st.DrawFn) -> tuple[Expr, Callable[[], Condition]]:
    """A bool expression, and the same as a condition."""
    op = draw(st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]))
    kind = draw(st.integers(0, 5))
    if kind == 0:
        a, b = D(I_), D(J_)
        return call(op, a, b), lambda: conditions.data_comparison(op, a, b)
    if kind == 1:
        return T(I_), lambda: conditions.literal(T(I_))
    if kind == 2:
        a, b = X(I_), X(J_)
        return call(op, a, b), lambda: conditions.data_comparison(op, a, b)
    a, b = draw(forms()), draw(st.sampled_from([integer(2), I_, J_, integer(-1)]))
    return call(op, a, b), lambda: conditions.comparison(op, a, b)


@st.composite
def logic(draw: st.DrawFn, depth: int = 3) -> tuple[Expr, Callable[[], Condition]]:
    if not depth or draw(st.integers(0, 3)) == 0:
        return draw(comparisons())
    (a, ca), (b, cb) = draw(logic(depth - 1)), draw(logic(depth - 1))
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return call("and", a, b), lambda: conditions.conjunction((ca(), cb()))
    if kind == 1:
        return call("or", a, b), lambda: conditions.disjunction((ca(), cb()))
    return call("not", a), lambda: conditions.negation(ca())


@given(logic(), st.integers(0, 6))
@settings(max_examples=400, deadline=None)
def test_normal_form_keeps_the_meaning(pair: tuple[Expr, Callable[[], Condition]], place: int):
    e, build = pair
    try:
        c = build()
    except TooManyTerms:
        return
    assert np.array_equal(truth(as_expr(c)), truth(e))
    assert np.array_equal(truth(as_expr(conditions.negation(c))), ~truth(e))
    moved = {I_: J_, J_: integer(place)}
    assert np.array_equal(truth(as_expr(conditions.at(c, moved))), truth(substitute(e, moved)))


def le(a: Expr, b: Expr) -> Condition:
    return conditions.comparison("le", a, b)


P, Q, R = le(I_, J_), le(J_, integer(3)), conditions.literal(T(I_))
NOT, AND, OR = conditions.negation, conditions.conjunction, conditions.disjunction


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (NOT(NOT(P)), P),
        (NOT(AND((P, Q))), OR((NOT(P), NOT(Q)))),
        (OR((P, AND((P, Q)))), P),
        (OR((P, AND((NOT(P), R)))), OR((P, R))),
        (AND((P, OR((NOT(P), R)))), AND((P, R))),
        (OR((P, NOT(P))), TRUE),
        (AND((R, NOT(R))), FALSE),
        (OR((AND((P, R)), AND((P, NOT(R))))), P),
        (OR((le(I_, J_), le(dims.add(I_, integer(2)), J_))), P),
        (AND((le(I_, J_), conditions.comparison("eq", I_, J_))), conditions.comparison("eq", I_, J_)),
        (conditions.comparison("lt", dims.mul(I_, integer(2)), dims.mul(J_, integer(2))),
         conditions.comparison("lt", I_, J_)),
        (le(I_, integer(8)), TRUE),
        (conditions.comparison("gt", J_, integer(6)), FALSE),
        (le(symbol("n", 1), integer(0)), FALSE),
    ],
)  # fmt: skip
def test_laws(a: Condition, b: Condition):
    assert a == b


def test_comparisons_of_floats_may_both_fail():
    less, more = (conditions.data_comparison(op, X(I_), X(J_)) for op in ("lt", "ge"))
    assert NOT(less) != more and OR((less, more)) != TRUE


def test_too_many_terms_are_refused():
    many = [
        OR((conditions.comparison("eq", I_, integer(k)), conditions.comparison("eq", J_, integer(k % 7))))
        for k in range(9)
    ]
    with pytest.raises(TooManyTerms):
        AND(
            [
                *many,
                *(
                    OR((conditions.literal(T(integer(k))), conditions.literal(T(integer(k + 1)))))
                    for k in range(8)
                ),
            ]
        )
