"""Identities of scalar expressions that hold for every value, as data. Each line: name, shape, result, law.

All of them are true in IEEE arithmetic as torch computes it: `x + 0.0` is not among them (it turns -0.0 into
0.0), nor is `x * 0 = 0`, nor anything that reassociates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from tilewright.ir.dtype import DType, Kind, bool_, i64
from tilewright.ir.expr import Expr, call, cast, conjuncts, const, substitute, walk, where
from tilewright.ir.pattern import Captures, ExprRule, Pattern, Rule, always, any_, apply, constant
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.linear_form import may_wrap

_MANTISSA = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}
_EXPONENT = {"f16": 5, "bf16": 8, "f32": 8, "f64": 11}


def holds_exactly(wide: DType, narrow: DType) -> bool:
    """Whether every value of type `narrow` is a value of type `wide`."""
    if wide == narrow or narrow.kind is Kind.BOOL:
        return True
    if wide.is_float:
        if narrow.is_float:
            more_digits = _MANTISSA[wide.name] >= _MANTISSA[narrow.name]
            return more_digits and _EXPONENT[wide.name] >= _EXPONENT[narrow.name]
        return 8 * narrow.bytes - (narrow.kind is Kind.INT) <= _MANTISSA[wide.name]
    if narrow.is_float or wide.kind is Kind.BOOL:
        return False
    grows = wide.bytes > narrow.bytes
    return grows and (wide.kind is Kind.INT or narrow.kind is Kind.UINT)


def total(e: Expr) -> bool:
    """Whether `e` can be evaluated anywhere: it has no read and no integer division by what might be zero."""
    return not any(x.op == "read" or _may_divide_by_zero(x) for x in walk(e))


def _may_divide_by_zero(x: Expr) -> bool:
    if x.op not in ("floordiv", "mod", "truncdiv", "fmod") or x.dtype.is_float:
        return False
    return x.dtype is not i64 or not dims.at_least(x.args[1], 1)


def decide(e: Expr) -> Expr | None:
    """A comparison of index expressions that the facts of their leaves decide, as a constant. Tests that may fail stay,
    whatever they are compared with."""
    found = _decided(e)
    return None if found is not None and any(x.op == "checked" for x in walk(e)) else found


def _decided(e: Expr) -> Expr | None:
    a, b = e.args
    if a.dtype is not i64:
        return None
    gap = dims.sub(a, b)
    if e.op in ("eq", "ne") and (dims.at_least(gap, 1) or dims.at_least(dims.sub(b, a), 1)):
        return const(e.op == "ne", bool_)
    if e.op in ("eq", "ne"):
        return const(e.op == "eq", bool_) if dims.equal(a, b) else None
    if may_wrap(a) or may_wrap(b):
        return None
    yes, no = {
        "lt": ((b, a, 1), (a, b, 0)),
        "le": ((b, a, 0), (a, b, 1)),
        "gt": ((a, b, 1), (b, a, 0)),
        "ge": ((a, b, 0), (b, a, 1)),
    }[e.op]
    for (high, low, by), answer in ((yes, True), (no, False)):
        if dims.at_least(dims.sub(high, low), by):
            return const(answer, bool_)
    return None


def fold(e: Expr) -> Expr | None:
    """An operation on constants whose exact result its type can hold, as a constant."""
    values = [a.value for a in e.args]
    if not all(a.op == "const" for a in e.args) or e.op not in _EXACT:
        return None
    numbers: list[Fraction] = []
    for v in values:
        if not isinstance(v, (bool, int, float, Fraction)) or (isinstance(v, float) and not math.isfinite(v)):
            return None
        if isinstance(v, float) and not v:
            return None
        numbers.append(Fraction(v))
    if e.op == "div" and (not numbers[1] or not e.dtype.is_float):
        return None
    exact = _EXACT[e.op](*numbers)
    if isinstance(exact, bool):
        return const(exact, bool_)
    if e.dtype.is_float:
        return const(float(exact), e.dtype) if exact and _representable(exact, e.dtype) else None
    low, high = _range(e.dtype)
    return const(int(exact), e.dtype) if e.dtype.kind is not Kind.BOOL and low <= exact <= high else None


_EXACT: dict[str, Callable[..., Fraction | bool]] = {
    "fma": lambda a, b, c: a * b + c,
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "neg": lambda a: -a,
    "div": lambda a, b: a / b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


def _range(dtype: DType) -> tuple[int, int]:
    bits = 8 * dtype.bytes
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if dtype.kind is Kind.INT else (0, (1 << bits) - 1)


def _representable(x: Fraction, dtype: DType) -> bool:
    """Whether `x` is a normal number of `dtype`."""
    digits = x.denominator
    if digits & (digits - 1):
        return False
    top = abs(x.numerator)
    exponent = top.bit_length() - digits.bit_length()
    top //= top & -top
    limit = (1 << (_EXPONENT[dtype.name] - 1)) - 2
    return top.bit_length() <= _MANTISSA[dtype.name] and -limit < exponent < limit


def _inverse(c: Expr) -> Expr | None:
    """The constant 1/c if c and it are normal powers of two, so that dividing by c is multiplying by it."""
    value = c.value
    if not isinstance(value, (float, Fraction)) or not value or not math.isfinite(value):
        return None
    inverse = 1 / Fraction(value)
    one_bit = abs(inverse.numerator) & (abs(inverse.numerator) - 1) == 0
    return const(float(inverse), c.dtype) if one_bit and _representable(inverse, c.dtype) else None


def _divide(m: Captures) -> Expr | None:
    inverse = _inverse(m["c"])
    return None if inverse is None else call("mul", m["x"], inverse)


def _passes_through(m: Captures) -> bool:
    """Whether converting x to the type of c first changes nothing about its conversion to the type of e."""
    x, c, e = m["x"].dtype, m["c"].dtype, m["e"].dtype
    if not holds_exactly(c, x):
        return False
    through_float = c.is_float and not x.is_float
    return not through_float or e.is_float or e.kind is Kind.BOOL or holds_exactly(e, x)


def assume(e: Expr) -> Expr | None:
    """`where` with the terms of its condition replaced by what they are on each side; None if nothing
    changes."""
    condition, yes, no = e.args
    terms = conjuncts(condition)
    true = {t: const(True, bool_) for t in terms if t.op != "const"}
    new_yes = substitute(yes, true)
    new_no = substitute(no, {condition: const(False, bool_)})
    return None if new_yes is yes and new_no is no else where(condition, new_yes, new_no)


def _is_float(e: Expr) -> bool:
    return e.dtype.is_float


def _is_data_integer(e: Expr) -> bool:
    return not e.dtype.is_float and e.dtype.kind is not Kind.BOOL


def _is_bool(e: Expr) -> bool:
    return e.dtype is bool_


X, Y, C, D = any_("x"), any_("y"), any_("c"), any_("d")
F = any_("x", _is_float)
N = any_("x", _is_data_integer)


def _line(
    name: str,
    match: Pattern,
    make: Callable[[Captures], Expr | None],
    law: str,
    when: Callable[[Captures], bool] = always,
) -> ExprRule:
    return Rule(name, match, make, law, "ieee", when)


ARITHMETIC: tuple[ExprRule, ...] = (
    _line("mul one", apply("mul", X, constant(1)), lambda m: m["x"], "x*1 = x"),
    _line("div one", apply("div", X, constant(1)), lambda m: m["x"], "x/1 = x"),
    _line("mul -1", apply("mul", F, constant(-1)), lambda m: call("neg", m["x"]), "x*-1 = -x"),
    _line("sub zero", apply("sub", X, constant(0)), lambda m: m["x"], "x - (+0) = x"),
    _line("add -0", apply("add", F, constant(-0.0)), lambda m: m["x"], "x + (-0) = x"),
    _line("add 0", apply("add", N, constant(0)), lambda m: m["x"], "n + 0 = n for integers"),
    _line("neg neg", apply("neg", apply("neg", X)), lambda m: m["x"], "-(-x) = x"),
    _line("not not", apply("not", apply("not", X)), lambda m: m["x"], "not not p = p"),
    _line("abs abs", apply("abs", apply("abs", F)), lambda m: call("abs", m["x"]), "||x|| = |x|"),
    _line("abs neg", apply("abs", apply("neg", F)), lambda m: call("abs", m["x"]), "|-x| = |x|"),
    _line("sub neg", apply("sub", F, apply("neg", Y)), lambda m: call("add", m["x"], m["y"]), "x - (-y) = x+y"),
    _line("add neg", apply("add", F, apply("neg", Y)), lambda m: call("sub", m["x"], m["y"]), "x + (-y) = x-y"),
    _line("mul neg", apply("mul", apply("neg", F), apply("neg", Y)), lambda m: call("mul", m["x"], m["y"]),
          "-x * -y = x*y"),
    _line("fma one", apply("fma", constant(1), F, Y), lambda m: call("add", m["y"], m["x"]), "1*x + y = y+x"),
    _line("fma by one", apply("fma", F, constant(1), Y), lambda m: call("add", m["y"], m["x"]), "x*1 + y = y+x"),
    _line("fma -1", apply("fma", constant(-1), F, Y), lambda m: call("sub", m["y"], m["x"]), "-1*x + y = y-x"),
    _line("fma by -1", apply("fma", F, constant(-1), Y), lambda m: call("sub", m["y"], m["x"]), "x*-1 + y = y-x"),
    _line("fma -0", apply("fma", F, Y, constant(-0.0)), lambda m: call("mul", m["x"], m["y"]), "x*y + (-0) = x*y"),
    _line("fma neg", apply("fma", apply("neg", F), apply("neg", Y), C), lambda m: call("fma", m["x"], m["y"], m["c"]),
          "-x * -y + c = x*y + c"),
    _line("div 2^k", apply("div", F, constant(name="c")), _divide, "x / 2^k = x * 2^-k"),
)  # fmt: skip

POWERS: tuple[ExprRule, ...] = (
    _line("pow 1", apply("pow", F, constant(1)), lambda m: m["x"], "x^1 = x"),
    _line("pow 2", apply("pow", F, constant(2)), lambda m: call("mul", m["x"], m["x"]), "x^2 = x*x"),
    _line("pow 3", apply("pow", F, constant(3)), lambda m: call("mul", call("mul", m["x"], m["x"]), m["x"]),
          "x^3 = x*x*x"),
    _line("pow 1/2", apply("pow", F, constant(0.5)), lambda m: call("sqrt", m["x"]), "x^0.5 = sqrt x"),
    _line("pow -1/2", apply("pow", F, constant(-0.5)), lambda m: call("rsqrt", m["x"]), "x^-0.5 = rsqrt x"),
    _line("pow -1", apply("pow", F, constant(-1)), lambda m: call("reciprocal", m["x"]), "x^-1 = 1/x"),
)  # fmt: skip
"""What torch itself does for these exponents, so they are its meaning."""

ORDER: tuple[ExprRule, ...] = (
    _line("max same", apply("maximum", X, X), lambda m: m["x"], "max(x, x) = x"),
    _line("min same", apply("minimum", X, X), lambda m: m["x"], "min(x, x) = x"),
    _line("max -inf", apply("maximum", F, constant(-math.inf)), lambda m: m["x"], "max(x, -inf) = x"),
    _line("min inf", apply("minimum", F, constant(math.inf)), lambda m: m["x"], "min(x, inf) = x"),
    _line("and same", apply("and", X, X), lambda m: m["x"], "p and p = p"),
    _line("or same", apply("or", X, X), lambda m: m["x"], "p or p = p"),
)

INDEX_COMPARISONS: tuple[ExprRule, ...] = tuple(
    _line(f"decide {op}", Pattern(op, (X, Y), "e"), lambda m: decide(m["e"]), "a comparison that is decided")
    for op in ("lt", "le", "gt", "ge", "eq", "ne")
)

CHOICE: tuple[ExprRule, ...] = (
    _line("where not", apply("where", apply("not", C), X, Y), lambda m: where(m["c"], m["y"], m["x"]),
          "where(not c, x, y) = where(c, y, x)"),
    _line("where bool", apply("where", C, constant(True), constant(False), when=_is_bool), lambda m: m["c"],
          "where(c, true, false) = c"),
    _line("where known", Pattern("where", (C, X, Y), "e"), lambda m: assume(m["e"]),
          "on the side where c holds, c is true; on the other, false"),
    _line("where and", apply("where", C, apply("where", D, X, Y), Y),
          lambda m: where(call("and", m["c"], m["d"]), m["x"], m["y"]),
          "where(c, where(d, x, y), y) = where(c and d, x, y)", lambda m: total(m["d"])),
)  # fmt: skip

CASTS: tuple[ExprRule, ...] = (
    _line("cast cast", apply("cast", apply("cast", X, name="c"), name="e"), lambda m: cast(m["x"], m["e"].dtype),
          "a conversion through a type that loses nothing", _passes_through),
    _line("narrow cast", apply("narrow", apply("cast", X, name="c"), name="e"), lambda m: m["x"],
          "a value that was widened and comes back",
          lambda m: m["e"].dtype == m["x"].dtype and _passes_through(m)),
)  # fmt: skip

CONSTANTS: tuple[ExprRule, ...] = tuple(
    _line(f"fold {op}", Pattern(op, name="e"), lambda m: fold(m["e"]), "an exact result of constants")
    for op in _EXACT
)

IEEE_RULES: tuple[ExprRule, ...] = (
    ARITHMETIC + POWERS + ORDER + INDEX_COMPARISONS + CHOICE + CASTS + CONSTANTS
)
"""Everything that may always be applied."""
