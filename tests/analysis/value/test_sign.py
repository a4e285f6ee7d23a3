"""Signs of expressions: what is claimed holds for every value that is tried, and what should be known is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.analysis.value.interval import (
    ANYTHING,
    BELOW,
    NAN,
    REAL,
    ZERO,
    Interval,
    interval,
    join,
    point,
)
from tilewright.analysis.value.sign import sign_of, signs_of
from tilewright.interp import FLOATS
from tilewright.interp.evaluate import Evaluator
from tilewright.ir import reduction
from tilewright.ir.dtype import bool_, f64, i64
from tilewright.ir.expr import Axis, Expr, axis, call, cast, const, integer, read, walk, where
from tilewright.ir.tensor import TensorExpr

LINE = Axis("i", integer(64))
PLACE = axis(LINE)
X, Y = read(0, (PLACE,), f64), read(1, (PLACE,), f64)
CORNERS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.75, 2.0, -3.0, math.inf, -math.inf, math.nan]


def c(x: float) -> Expr:
    return const(x, f64)


def call1(op: str) -> Expr:
    return call(op, X)


UNARY = ["neg", "abs", "exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "sigmoid", "erf", "erfc", "sqrt",
         "rsqrt", "reciprocal", "sin", "cos", "cosh", "sinh", "atan", "asin", "acos", "floor", "ceil", "round", "trunc",
         "sign", "atanh", "acosh"]  # fmt: skip
BINARY = ["add", "sub", "mul", "div", "maximum", "minimum", "pow", "mod", "fmod", "atan2"]
COMPARE = ["lt", "le", "gt", "ge", "eq", "ne"]


@st.composite
def numbers(draw: st.DrawFn, depth: int = 4) -> Expr:
    if depth == 0 or draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from([X, Y, c(0.0), c(1.0), c(-2.0), c(0.5), c(-math.inf), c(math.inf)]))
    more = lambda: draw(numbers(depth - 1))  # noqa: E731
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return call(draw(st.sampled_from(UNARY)), more())
    if kind == 4:
        x = more()
        return call("fma", x, x if draw(st.booleans()) else more(), more())
    if kind == 1:
        x = more()
        return call("mul", x, x) if draw(st.booleans()) else where(draw(truths(depth - 1)), x, more())
    if kind == 2:
        return cast(draw(truths(depth - 1)), f64)
    return call(draw(st.sampled_from(BINARY)), more(), more())


@st.composite
def truths(draw: st.DrawFn, depth: int = 2) -> Expr:
    if depth > 0 and draw(st.integers(0, 2)) == 0:
        return call(
            draw(st.sampled_from(["and", "or", "xor"])), draw(truths(depth - 1)), draw(truths(depth - 1))
        )
    if draw(st.integers(0, 5)) == 0:
        return call(draw(st.sampled_from(["isnan", "isinf"])), draw(numbers(depth)))
    test = call(draw(st.sampled_from(COMPARE)), draw(numbers(depth)), draw(numbers(depth)))
    return call("not", test) if draw(st.booleans()) else test


def evaluate(e: Expr, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        line = np.arange(len(x))
        return np.broadcast_to(Evaluator(FLOATS, [x, y], axes={LINE: line}).value(e), len(x))


def tame(e: Expr, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where rounding decides nothing: no inner result underflows, overflows, saturates or is next to a step."""
    fine = np.ones(len(x), bool)
    for node in walk(e):
        if not node.args or node.op == "read" or node.dtype is bool_:
            continue
        value, args = evaluate(node, x, y), [evaluate(a, x, y) for a in node.args]
        size = np.abs(value)
        with np.errstate(all="ignore"):
            fine &= ~np.isfinite(size) | (size == 0) | ((size > 1e-6) & (size < 1e6))
            if node.op in ("exp", "exp2", "expm1", "sinh", "cosh", "pow", "mul", "div", "add", "sub", "fma"):
                made = ~np.isfinite(value) | (value == 0)
                fine &= ~made | ~np.all([np.isfinite(a) & (a != 0) for a in args], axis=0)
            if node.op in ("tanh", "sigmoid", "erf", "erfc", "exp", "exp2", "expm1"):
                fine &= ~np.isfinite(args[0]) | (np.abs(args[0]) < 5)
            if node.op in ("sin", "cos"):
                fine &= size > 1e-6
    return fine


def holds(claim: Interval, x: float) -> bool:
    """Whether x is in the interval up to rounding of its bounds."""
    slack = 1e-9 * max(1.0, abs(x))
    return claim.contains(x) or (
        math.isfinite(x) and not (x == 0 and claim.low <= 0 <= claim.high)
        and claim.low - slack <= x <= claim.high + slack
    )  # fmt: skip


GRID = np.array(CORNERS)[np.indices((len(CORNERS),) * 2).reshape(2, -1)]


@given(numbers())
@settings(max_examples=400, deadline=None)
def test_what_is_claimed_holds_for_all_special_numbers(e: Expr):
    """Corners of either operand, infinities and NaN included."""
    claim, fine = sign_of(e, {X: ANYTHING, Y: ANYTHING}), tame(e, *GRID)
    values = evaluate(e, *GRID)
    wrong = [
        (x, y, v)
        for x, y, v, ok in zip(*GRID, values, fine, strict=True)
        if ok and not holds(claim, float(v))
    ]
    assert not wrong, (str(claim), wrong[:3])


@given(numbers(), st.floats(-3, 0), st.floats(0, 3))
@settings(max_examples=300, deadline=None)
def test_what_is_claimed_of_bounded_operands_holds(e: Expr, low: float, high: float):
    known = {X: interval(low, high), Y: interval(0.25, 2)}
    x, y = np.repeat(np.linspace(low, high, 9), 9), np.tile(np.linspace(0.25, 2, 9), 9)
    claim, fine = sign_of(e, known), tame(e, x, y)
    wrong = [v for v, ok in zip(evaluate(e, x, y), fine, strict=True) if ok and not holds(claim, float(v))]
    assert not wrong, (str(claim), wrong[:3])


@pytest.mark.parametrize(
    ("e", "sign"),
    [
        (call1("exp"), "positive"),
        (call("mul", X, X), "nonnegative"),
        (call1("abs"), "nonnegative"),
        (call("add", call("mul", X, X), c(1e-6)), "positive"),
        (call1("sigmoid"), "positive"),
        (call("sub", c(1.0), call1("sigmoid")), "nonnegative"),
        (call("add", c(50.0), call("mul", c(50.0), call1("tanh"))), "nonnegative"),
        (call("maximum", X, c(0.0)), "nonnegative"),
        (call("maximum", X, c(1e-20)), "positive"),
        (call("minimum", X, c(-1.0)), "negative"),
        (call("neg", call1("exp")), "negative"),
        (call("div", call1("exp"), call("exp", Y)), "positive"),
        (call("sqrt", call("mul", X, X)), "nonnegative"),
        (call("rsqrt", call("add", call("mul", X, X), c(1.0))), "positive"),
        (call("mul", call1("exp"), c(0.0)), "zero"),
        (call("pow", X, c(4.0)), "nonnegative"),
        (call("mul", X, Y), "any"),
        (call("sub", call1("exp"), c(1.0)), "any"),
        (where(call("gt", X, c(0.0)), X, c(0.5)), "positive"),
        (where(call("lt", X, c(0.0)), call("neg", X), X), "nonnegative"),
        (where(call("eq", X, c(0.0)), c(1.0), call("mul", X, X)), "positive"),
        (cast(integer(3), f64), "positive"),
        (cast(PLACE, f64), "nonnegative"),
        (cast(call("gt", X, Y), f64), "nonnegative"),
    ],
    ids=str,
)
def test_signs(e: Expr, sign: str):
    assert sign_of(e).sign == sign


def test_a_masked_score_is_not_finite_but_its_power_is_not_negative():
    masked = where(call("le", PLACE, integer(3)), X, c(-math.inf))
    assert sign_of(masked).below and not sign_of(masked).above
    assert sign_of(call("exp", masked)).sign == "nonnegative" and sign_of(call("exp", X)).positive
    guarded = where(call("eq", masked, c(-math.inf)), c(0.0), masked)
    assert sign_of(guarded).finite


def test_facts_about_inner_nodes_are_used():
    gap = call("sub", X, Y)
    assert sign_of(call("exp", gap), {gap: interval(-math.inf, 0)}).high == 1


@pytest.mark.parametrize(
    ("reducer", "element", "sign"),
    [
        (reduction.sum_(f64), call1("exp"), "positive"),
        (reduction.sum_(f64), call("mul", X, X), "nonnegative"),
        (reduction.sum_(f64), X, "any"),
        (reduction.product(f64), call1("exp"), "positive"),
        (reduction.maximum(f64), call1("exp"), "positive"),
        (reduction.maximum(f64), call("neg", call1("exp")), "negative"),
        (reduction.minimum(f64), call1("abs"), "nonnegative"),
        (reduction.logsumexp(f64), X, "any"),
    ],
    ids=str,
)
def test_signs_of_reductions(reducer: reduction.Reduction, element: Expr, sign: str):
    expr = TensorExpr((), (element,), (LINE,), reducer)
    (found,) = signs_of(expr, [REAL])
    assert found.sign == sign


def test_a_reduction_of_nothing_is_its_identity():
    empty = Axis("r", integer(0))
    x = read(0, (axis(empty),), f64)
    (found,) = signs_of(TensorExpr((), (call("exp", x),), (empty,), reduction.sum_(f64)), [REAL])
    assert found.sign == "nonnegative"
    (top,) = signs_of(TensorExpr((), (x,), (empty,), reduction.maximum(f64)), [REAL])
    assert top.below


def test_moments_have_a_spread_that_is_not_negative():
    expr = TensorExpr((), (X,), (LINE,), reduction.moments(f64))
    count, mean, spread = signs_of(expr, [REAL])
    assert count.positive and mean.sign == "any" and spread.nonnegative


def test_intervals_say_what_they_hold():
    assert join((point(-1), BELOW)).sign == "negative" and ZERO.constant == 0 and BELOW.constant == -math.inf
    assert REAL.constant is None and math.isnan(NAN.constant or 0) and str(REAL) == "[-inf, inf]"
    assert interval(0, 0, zero=False).empty and not interval(0, 1, zero=False).contains(0)
    assert sign_of(const(True, bool_)).constant == 1 and sign_of(const(-4, i64)).negative


@pytest.mark.parametrize(("other", "sign"), [(0, "nonnegative"), (1, "any")])
def test_equal_factors_of_products_are_squares(other: int, sign: str):
    x, same, size = (read(k, (axis(LINE),), f64) for k in (0, other, 2))
    product = call("mul", call("mul", x, size), call("mul", same, size))
    facts = {read(k, (axis(LINE),), f64): REAL for k in (0, 1)}
    assert sign_of(product, facts | {size: interval(1, 2)}).sign == sign
