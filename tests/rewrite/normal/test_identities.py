"""Scalar identities: every rewritten expression has the same value on ordinary and on special numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.errors import VerifyError
from tilewright.interp import FLOATS
from tilewright.interp.evaluate import Evaluator
from tilewright.ir.dtype import DTYPES, DType, Kind, bf16, bool_, f16, f32, f64, i8, i32, i64, u8
from tilewright.ir.expr import (
    SCALARS,
    Axis,
    Expr,
    axis,
    call,
    cast,
    const,
    integer,
    narrow,
    read,
    symbol,
    where,
)
from tilewright.ir.pattern import Pattern, Rule, any_, apply, constant, rewrite
from tilewright.ir.sizes import dims
from tilewright.rewrite.normal.identities import IEEE_RULES, holds_exactly

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -2.5, math.inf, -math.inf, math.nan, 1e-30, 65504.0, 300.7, -129.0]
TYPES = (f32, f16, i32, u8, bool_)
LANES = len(SPECIAL) ** 2


def operand(dtype: DType, which: int) -> np.ndarray:
    """All pairs of special values: operand 0 runs over the first, operand 1 over the second."""
    grid = np.array(SPECIAL)[np.indices((len(SPECIAL), len(SPECIAL)))[which].ravel()]
    if dtype is bool_:
        return grid > 0
    if dtype.is_float:
        with np.errstate(all="ignore"):
            return FLOATS.load(grid, dtype)
    return FLOATS.load(np.nan_to_num(grid, nan=7, posinf=100, neginf=-100), dtype)


READS = {
    (t, k): read(TYPES.index(t) * 2 + k, (axis(Axis("i", integer(LANES))),), t) for t in TYPES for k in (0, 1)
}
OPERANDS = [operand(t, k) for t in TYPES for k in (0, 1)]
LINE = {Axis("i", integer(LANES)): np.arange(LANES)}

FLOAT_OPS = ["fma", "add", "sub", "mul", "div", "maximum", "minimum", "neg", "abs", "sqrt", "pow"]
INT_OPS = ["add", "sub", "mul", "maximum", "minimum", "neg", "abs"]
BOOL_OPS = ["and", "or", "xor", "not"]
CONSTANTS = [0.0, -0.0, 1, -1, 2, 0.5, -0.5, 3, 4.0, -0.25, math.inf, -math.inf, math.nan]


@st.composite
def expressions(draw: st.DrawFn, dtype: DType | None = None, depth: int = 4) -> Expr:
    dtype = dtype or draw(st.sampled_from(TYPES))
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        if draw(st.booleans()):
            return READS[dtype, draw(st.integers(0, 1))]
        value = draw(st.sampled_from(CONSTANTS))
        if not dtype.is_float:
            value = int(value) % 5 if math.isfinite(value) else 0
        return const(value, dtype)

    def more(t: DType | None) -> Expr:
        return draw(expressions(t, depth - 1))

    choice = draw(st.integers(0, 4))
    if choice == 0:
        return where(more(bool_), more(dtype), more(dtype))
    if choice == 1:
        inner = more(None)
        return cast(inner, dtype) if draw(st.booleans()) else narrow(inner, dtype)
    if dtype is bool_ and choice == 2:
        kind = draw(st.sampled_from([f32, i32]))
        return call(draw(st.sampled_from(["eq", "ne", "lt", "le", "gt", "ge"])), more(kind), more(kind))
    ops = BOOL_OPS if dtype is bool_ else FLOAT_OPS if dtype.is_float else INT_OPS
    op = draw(st.sampled_from(ops))
    return call(op, *[more(dtype) for _ in range(SCALARS[op].arity)])


def values(e: Expr) -> np.ndarray:
    return np.broadcast_to(np.asarray(Evaluator(FLOATS, OPERANDS, axes=LINE).value(e)), (LANES,))


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits, except that all NaNs are one value."""
    if a.dtype.kind in "iub":
        return np.array_equal(a, b)
    x, y = a.astype(np.float64), b.astype(np.float64)
    return np.array_equal(x, y, equal_nan=True) and np.array_equal(
        np.signbit(x) | np.isnan(x), np.signbit(y) | np.isnan(y)
    )


@settings(max_examples=1200)
@given(expressions())
def test_rewriting_keeps_every_value(e: Expr):
    new = rewrite(e, IEEE_RULES)
    if "pow" in repr(e):
        return
    assert new.dtype is e.dtype
    assert same(values(e), values(new)), (e, new)


@settings(max_examples=300)
@given(expressions())
def test_rewriting_is_idempotent(e: Expr):
    once = rewrite(e, IEEE_RULES)
    assert rewrite(once, IEEE_RULES) is once


@pytest.mark.parametrize("exponent", [1, 2, 3, 0.5, -0.5, -1])
def test_powers_become_what_torch_does(exponent: float):
    import torch

    x = READS[f32, 0]
    new = rewrite(call("pow", x, const(exponent, f32)), IEEE_RULES)
    assert new.op != "pow"
    want = torch.from_numpy(OPERANDS[0]).pow(exponent)
    assert torch.allclose(torch.from_numpy(values(new).copy()), want, rtol=3e-7, equal_nan=True)


X, P = READS[f32, 0], READS[bool_, 0]
PLACE, N = axis(Axis("i", integer(9))), symbol("n", 1)
J = axis(Axis("j", N))
NOT_RULES = [
    call("add", X, const(0.0, f32)),
    call("sub", X, const(-0.0, f32)),
    call("mul", X, const(0.0, f32)),
    call("sub", X, X),
    call("div", X, X),
    call("div", X, const(3, f32)),
    call("eq", X, X),
    call("maximum", X, const(math.inf, f32)),
    cast(cast(READS[f32, 0], f16), f32),
    cast(cast(READS[i32, 0], f32), i32),
    where(P, const(1, f32), const(0, f32)),
    narrow(X, f16),
    call("add", call("mul", X, READS[f32, 1]), X),
    call("sub", X, call("mul", X, X)),
    call("fma", X, X, const(0.0, f32)),
    call("fma", const(2, f32), X, X),
    call("fma", X, call("neg", X), X),
]


@pytest.mark.parametrize("e", NOT_RULES, ids=repr)
def test_what_only_looks_like_an_identity_stays(e: Expr):
    assert rewrite(e, IEEE_RULES) is e


@pytest.mark.parametrize(("e", "want"), [
    (call("mul", call("sub", X, const(0, f32)), const(1, f32)), X),
    (call("fma", const(-1, f32), X, READS[f32, 1]), call("sub", READS[f32, 1], X)),
    (call("fma", const(3, f32), const(0.5, f32), const(1, f32)), const(2.5, f32)),
    (call("div", X, const(-8, f32)), call("mul", X, const(-0.125, f32))),
    (cast(cast(READS[f16, 0], f32), f16), READS[f16, 0]),
    (cast(cast(READS[u8, 0], i32), f32), cast(READS[u8, 0], f32)),
    (narrow(cast(READS[f16, 0], f32), f16), READS[f16, 0]),
    (where(call("not", P), X, const(0, f32)), where(P, const(0, f32), X)),
    (where(P, where(P, X, const(1, f32)), const(0, f32)), where(P, X, const(0, f32))),
    (where(P, X, where(call("and", P, READS[bool_, 1]), const(1, f32), const(0, f32))),
     where(P, X, const(0, f32))),
    (where(call("and", P, READS[bool_, 1]), where(P, X, const(2, f32)), X), X),
    (where(call("lt", PLACE, integer(9)), X, const(0, f32)), X),
    (where(call("ge", J, N), X, const(0, f32)), const(0, f32)),
    (call("eq", PLACE, integer(12)), const(False, bool_)),
    (call("add", const(Fraction(1, 4), f32), const(2, f32)), const(2.25, f32)),
    (call("lt", const(2, f32), const(3, f32)), const(True, bool_)),
], ids=str)  # fmt: skip
def test_results(e: Expr, want: Expr):
    assert rewrite(e, IEEE_RULES) is want


def test_constants_fold_only_exactly():
    tenth = const(0.1, f32)
    for e in (
        call("add", tenth, tenth),
        call("mul", tenth, const(3, f32)),
        call("div", const(1, f32), const(3, f32)),
    ):
        assert rewrite(e, IEEE_RULES) is e or rewrite(e, IEEE_RULES).op == "const" and e.op == "add"
    assert rewrite(call("mul", const(2**60, i32), const(4, i32)), IEEE_RULES).op == "mul"


@pytest.mark.parametrize("wide", DTYPES.values(), ids=str)
@pytest.mark.parametrize("small", DTYPES.values(), ids=str)
def test_holds_exactly(wide: DType, small: DType):
    """Checked on extreme and odd values of the small type."""
    if not holds_exactly(wide, small):
        return
    if small.kind is Kind.BOOL:
        points = np.array([False, True])
    elif small.is_float:
        points = FLOATS.load(np.array([1.0, 1 / 3, 1e-8, 65504, 3e38, 1e-39, -0.0]), small)
    else:
        low = 0 if small.kind is Kind.UINT else -(1 << (8 * small.bytes - 1))
        top = (1 << (8 * small.bytes - (small.kind is Kind.INT))) - 1
        points = np.array([low, low + 1, 0, 1, top - 1, top]).astype(FLOATS.storage(small))
    there = FLOATS.apply("cast", [points], small, wide)
    back = FLOATS.apply("cast", [there], wide, small)
    assert np.array_equal(back, points)


def test_holds_exactly_says_yes_where_it_should():
    yes = [
        (f32, f16),
        (f32, bf16),
        (f64, f32),
        (f64, i32),
        (f32, u8),
        (i64, u8),
        (i32, i8),
        (bf16, u8),
        (f16, bool_),
    ]
    no = [(f16, bf16), (bf16, f16), (f32, i32), (u8, i8), (i32, f16), (i8, u8), (bool_, u8)]
    assert all(holds_exactly(*pair) for pair in yes) and not any(holds_exactly(*pair) for pair in no)


def test_patterns_match_either_order_and_repeated_names():
    a, b = READS[f32, 0], READS[f32, 1]
    double = apply("add", any_("x"), any_("x"))
    assert double(call("add", a, a)) == {"x": a} and double(call("add", a, b)) is None
    scaled = apply("mul", constant(name="k"), apply("neg", any_("x")))
    e = call("mul", call("neg", a), const(3, f32))
    assert scaled(e) == {"k": const(3, f32), "x": a}
    assert apply("sub", any_("x"), constant(1))(call("sub", const(1, f32), a)) is None
    assert constant(0.0)(const(-0.0, f32)) is None and constant(-0.0)(const(-0.0, f32)) is not None


def test_a_rule_set_that_never_ends_is_an_error():
    swap = Rule(
        "swap", Pattern("sub", (any_("x"), any_("y"))), lambda m: call("sub", m["y"], m["x"]), "none", "ieee"
    )
    with pytest.raises(VerifyError):
        rewrite(call("sub", READS[f32, 0], READS[f32, 1]), (swap,))


def test_every_rule_states_its_law():
    assert all(rule.law and rule.name and rule.proof == "ieee" for rule in IEEE_RULES)
    assert dims.ONE.dtype is i64
