"""Elementwise ops. Operands come in with equal types; the result type follows from the scalar operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from tilewright.ir.builder import Builder
from tilewright.ir.dtype import DType, Kind, bool_
from tilewright.ir.expr import Expr, call, cast, const, is_const, where
from tilewright.ir.expr import narrow as narrow_expr
from tilewright.ir.graph import Value
from tilewright.ir.tensor import TensorExpr, output_axes

from .common import Arg, Binary, Scalar, Unary, arith, binary, is_true, number, pointwise, position, unary

HALF = Fraction(1, 2)


def _op(name: str) -> Unary:
    return unary(name, lambda x: call(name, x))


def _rounding(name: str) -> Unary:
    return unary(name, lambda x: call(name, x) if x.dtype.is_float else x)


def _test(name: str) -> Unary:
    return unary(name, lambda x: call(name, x) if x.dtype.is_float else const(False, bool_))


def _compare(name: str) -> Binary:
    return binary(name, lambda x, y: call(name, x, y))


def _logical(name: str) -> Binary:
    return binary(f"logical_{name}", lambda x, y: call(name, is_true(x), is_true(y)))


acos, acosh, asin, asinh, atan, atanh = map(_op, ("acos", "acosh", "asin", "asinh", "atan", "atanh"))
cos, cosh, sin, sinh, tan, tanh = map(_op, ("cos", "cosh", "sin", "sinh", "tan", "tanh"))
exp, exp2, expm1, erf, erfc, sigmoid = map(_op, ("exp", "exp2", "expm1", "erf", "erfc", "sigmoid"))
log, log2, log10, log1p = map(_op, ("log", "log2", "log10", "log1p"))
sqrt, rsqrt, reciprocal = map(_op, ("sqrt", "rsqrt", "reciprocal"))
floor, ceil, trunc, round_ = map(_rounding, ("floor", "ceil", "trunc", "round"))
isnan, isinf = map(_test, ("isnan", "isinf"))
eq, ne, lt, le, gt, ge = map(_compare, ("eq", "ne", "lt", "le", "gt", "ge"))
logical_and, logical_or, logical_xor = map(_logical, ("and", "or", "xor"))


def _unsigned(x: Expr) -> bool:
    return x.dtype.kind in (Kind.BOOL, Kind.UINT)


def _neg(x: Expr) -> Expr:
    return arith("sub", number(0, x), x) if x.dtype.kind is not Kind.FLOAT else call("neg", x)


neg = unary("neg", _neg)
abs_ = unary("abs", lambda x: x if _unsigned(x) else call("abs", x))
sign = unary("sign", lambda x: x if x.dtype is bool_ else call("sign", x))
logical_not = unary("logical_not", lambda x: call("not", is_true(x)))
bitwise_not = unary("bitwise_not", lambda x: call("not", x))
copy = unary("copy", lambda x: x)
isfinite = unary(
    "isfinite",
    lambda x: call("lt", call("abs", x), number(math.inf, x)) if x.dtype.is_float else const(True, bool_),
)


def _add(x: Expr, y: Expr) -> Expr:
    return call("or", x, y) if x.dtype is bool_ else arith("add", x, y)


def _mul(x: Expr, y: Expr) -> Expr:
    return call("and", x, y) if x.dtype is bool_ else arith("mul", x, y)


def _fused(x: Expr, y: Expr, z: Expr) -> Expr:
    """x * y + z: of floats with one rounding. A factor of one makes it the sum that it is then."""
    if not z.dtype.is_float:
        return arith("add", z, arith("mul", x, y))
    return call("add", z, y) if is_const(x, 1) else call("fma", x, y, z)


def _extremum(name: str, on_bool: str) -> Binary:
    return binary(name, lambda x, y: call(on_bool, x, y) if x.dtype is bool_ else call(name, x, y))


add, mul = binary("add", _add), binary("mul", _mul)
sub = binary("sub", lambda x, y: arith("sub", x, y))
div = binary("div", lambda x, y: call("div", x, y))


def _division(name: str, compute: Callable[[Expr, Expr], Expr]) -> Binary:
    """An op that fails for integers where its second operand is 0."""
    divide = binary(name, compute)

    def declare(b: Builder, x: Arg, y: Arg) -> Value:
        out = divide(b, x, y)
        if not out.dtype.is_float:
            b.require_divisor(y, out.shape)
        return out

    declare.__name__ = name
    return declare


floordiv = _division("floordiv", lambda x, y: call("floordiv", x, y))
truncdiv = _division(
    "truncdiv", lambda x, y: call("trunc", call("div", x, y)) if x.dtype.is_float else call("truncdiv", x, y)
)
remainder = _division("remainder", lambda x, y: call("mod", x, y))
fmod = _division("fmod", lambda x, y: call("fmod", x, y))
maximum, minimum = _extremum("maximum", "or"), _extremum("minimum", "and")
atan2 = binary("atan2", lambda x, y: call("atan2", x, y))
bitwise_and = binary("bitwise_and", lambda x, y: call("and", x, y))
bitwise_or = binary("bitwise_or", lambda x, y: call("or", x, y))
bitwise_xor = binary("bitwise_xor", lambda x, y: call("xor", x, y))
shift_left = binary("shift_left", lambda x, y: call("shl", x, y))
shift_right = binary("shift_right", lambda x, y: call("shr", x, y))


def _pow(x: Expr, y: Expr) -> Expr:
    """Small constant exponents are products, as in eager."""
    if y.op != "const" or isinstance(y.value, Fraction):
        return call("pow", x, y)
    if y.value == 2:
        return arith("mul", x, x)
    if y.value == 3:
        return arith("mul", arith("mul", x, x), x)
    if y.value == 1:
        return x
    if x.dtype.is_float and y.value in (HALF, -HALF, -1, -2):
        base = call("mul", x, x) if y.value == -2 else x
        name = "sqrt" if y.value == HALF else "rsqrt" if y.value == -HALF else "reciprocal"
        return call(name, base)
    return call("pow", x, y)


power = binary("pow", _pow)


def to(b: Builder, x: Value, dtype: DType) -> Value:
    """`x` converted to `dtype` (a cast of the source program, or one that promotion asks for)."""
    return x if x.dtype == dtype else pointwise(b, "cast", lambda e: cast(e, dtype), x)


def narrow(b: Builder, x: Value, dtype: DType) -> Value:
    """`x`, computed in a wider type by a declaration, in the program's type."""
    return x if x.dtype == dtype else pointwise(b, "narrow", lambda e: narrow_expr(e, dtype), x)


def where_(b: Builder, condition: Value, yes: Arg, no: Arg) -> Value:
    """`yes` where `condition` (bool, or a number that is not zero) holds, else `no`; all broadcast."""
    return pointwise(b, "where", lambda c, y, n: where(is_true(c), y, n), condition, yes, no)


def clamp(b: Builder, x: Value, low: Arg | None, high: Arg | None) -> Value:
    """min(max(x, low), high); NaN of any operand wins."""
    bounds = [a for a in (low, high) if a is not None]

    def compute(e: Expr, *limits: Expr) -> Expr:
        rest = list(limits)
        if low is not None:
            e = call("maximum", e, rest.pop(0))
        return call("minimum", e, rest.pop(0)) if high is not None else e

    return pointwise(b, "clamp", compute, x, *bounds)


def relu(b: Builder, x: Value) -> Value:
    """max(x, 0)."""
    return pointwise(b, "relu", lambda e: call("maximum", e, number(0, e)), x)


def gelu(b: Builder, x: Value, approximate: str = "none") -> Value:
    """x * Phi(x), with Phi by erf, or by its tanh form (Hendrycks and Gimpel 2016) if `approximate` is "tanh"."""
    return pointwise(b, "gelu", _gelu_tanh if approximate == "tanh" else _gelu, x)


def _gelu(x: Expr) -> Expr:
    one, half = number(1, x), number(HALF, x)
    phi = call("add", one, call("erf", call("mul", x, number(math.sqrt(0.5), x))))
    return call("mul", call("mul", half, x), phi)


def _gelu_tanh(x: Expr) -> Expr:
    cubic = call("add", x, call("mul", number(0.044715, x), call("mul", call("mul", x, x), x)))
    inner = call("mul", number(math.sqrt(2 / math.pi), x), cubic)
    return call("mul", call("mul", number(HALF, x), x), call("add", number(1, x), call("tanh", inner)))


def silu(b: Builder, x: Value) -> Value:
    """x * sigmoid(x)."""
    return pointwise(b, "silu", lambda e: call("mul", e, call("sigmoid", e)), x)


def _bounded(x: Expr, low: float, high: float) -> Expr:
    return call("minimum", call("maximum", x, number(low, x)), number(high, x))


def _hardsigmoid(x: Expr) -> Expr:
    return call("div", _bounded(call("add", x, number(3, x)), 0, 6), number(6, x))


def hardsigmoid(b: Builder, x: Value) -> Value:
    """clamp(x + 3, 0, 6) / 6."""
    return pointwise(b, "hardsigmoid", _hardsigmoid, x)


def hardswish(b: Builder, x: Value) -> Value:
    """x * clamp(x + 3, 0, 6) / 6."""

    def compute(e: Expr) -> Expr:
        return call("div", call("mul", e, _bounded(call("add", e, number(3, e)), 0, 6)), number(6, e))

    return pointwise(b, "hardswish", compute, x)


def decay(b: Builder, x: Value) -> Value:
    """exp(-|x|)."""
    return pointwise(b, "decay", lambda e: call("exp", call("neg", call("abs", e))), x)


def _negative(x: Expr) -> Expr:
    """Whether x has its sign bit set; -0 does. (The sign of a NaN is not looked at: it says which machine made it.)"""
    zero = number(0, x)
    if not x.dtype.is_float:
        return call("lt", x, zero) if not _unsigned(x) else const(False, bool_)
    negative_zero = call("and", call("eq", x, zero), call("lt", call("reciprocal", x), zero))
    return call("or", call("lt", x, zero), negative_zero)


def _copysign(x: Expr, y: Expr) -> Expr:
    size = call("abs", x)
    return where(_negative(y), call("neg", size), size)


def _skipping(op: str) -> Callable[[Expr, Expr], Expr]:
    def compute(x: Expr, y: Expr) -> Expr:
        if x.dtype is bool_ or not x.dtype.is_float:
            return call({"maximum": "or", "minimum": "and"}[op] if x.dtype is bool_ else op, x, y)
        return where(call("isnan", x), y, where(call("isnan", y), x, call(op, x, y)))

    return compute


signbit = unary("signbit", _negative)
copysign = binary("copysign", _copysign)
fmax, fmin = binary("fmax", _skipping("maximum")), binary("fmin", _skipping("minimum"))


def round_to(b: Builder, x: Value, decimals: int) -> Value:
    """x rounded to a number of decimal places, by scaling as eager does."""
    scale, there, back = 10.0 ** abs(decimals), *(("mul", "div") if decimals > 0 else ("div", "mul"))

    def compute(e: Expr) -> Expr:
        return call(back, call("round", call(there, e, number(scale, e))), number(scale, e))

    return pointwise(b, "round", compute, x)


def leaky_relu(b: Builder, x: Value, slope: Scalar) -> Value:
    """x where x > 0, else slope * x."""
    return pointwise(
        b, "leaky_relu", lambda e, s: where(call("gt", e, number(0, e)), e, call("mul", e, s)), x, slope
    )


def prelu(b: Builder, x: Value, weight: Value) -> Value:
    """x where x > 0, else weight * x, for a weight that broadcasts to x."""
    return pointwise(
        b, "prelu", lambda e, w: where(call("gt", e, number(0, e)), e, call("mul", w, e)), x, weight
    )


def elu(b: Builder, x: Value, alpha: Scalar, scale: Scalar, input_scale: Scalar) -> Value:
    """scale * x where x > 0, else scale * alpha * (exp(input_scale * x) - 1)."""

    def compute(e: Expr, a: Expr, s: Expr, i: Expr) -> Expr:
        low = call("mul", call("mul", call("expm1", call("mul", e, i)), a), s)
        return where(call("gt", e, number(0, e)), call("mul", e, s), low)

    return pointwise(b, "elu", compute, x, alpha, scale, input_scale)


def _softplus(x: Expr) -> Expr:
    """log(1 + exp(x)) without overflow."""
    tail = call("log1p", call("exp", call("neg", call("abs", x))))
    return call("add", call("maximum", x, number(0, x)), tail)


def softplus(b: Builder, x: Value, beta: Scalar, threshold: Scalar) -> Value:
    """log(1 + exp(beta * x)) / beta, and x itself where beta * x > threshold."""

    def compute(e: Expr, k: Expr, t: Expr) -> Expr:
        scaled = call("mul", e, k)
        return where(call("gt", scaled, t), e, call("div", call("log1p", call("exp", scaled)), k))

    return pointwise(b, "softplus", compute, x, beta, threshold)


def mish(b: Builder, x: Value) -> Value:
    """x * tanh(log(1 + exp(x)))."""
    return pointwise(b, "mish", lambda e: call("mul", e, call("tanh", _softplus(e))), x)


def log_sigmoid(b: Builder, x: Value) -> Value:
    """log(sigmoid(x)) = min(x, 0) - log1p(exp(-|x|))."""
    return pointwise(b, "log_sigmoid", lambda e: call("neg", _softplus(call("neg", e))), x)


def threshold(b: Builder, x: Value, limit: Scalar, value: Scalar) -> Value:
    """x where x > limit, else value; NaN stays."""
    return pointwise(b, "threshold", lambda e, t, v: where(call("le", e, t), v, e), x, limit, value)


def softshrink(b: Builder, x: Value, limit: Scalar) -> Value:
    """x moved towards zero by `limit`, 0 between."""

    def compute(e: Expr, t: Expr) -> Expr:
        small = where(call("lt", e, call("neg", t)), call("add", e, t), call("mul", e, number(0, e)))
        return where(call("gt", e, t), call("sub", e, t), small)

    return pointwise(b, "softshrink", compute, x, limit)


def hardshrink(b: Builder, x: Value, limit: Scalar) -> Value:
    """x where |x| > limit, else 0; NaN stays."""
    return pointwise(
        b, "hardshrink", lambda e, t: where(call("le", call("abs", e), t), number(0, e), e), x, limit
    )


# Where eager's kernels round a product and a sum once (they are compiled to, on CPUs and GPUs), so do these: where the
# two nearly cancel, all digits of the result are those of that rounding.


def fma(b: Builder, x: Arg, y: Arg, z: Arg) -> Value:
    """x * y + z, rounded once."""
    return pointwise(b, "fma", _fused, x, y, z)


def addcmul(b: Builder, x: Value, first: Value, second: Value, value: Scalar) -> Value:
    """x + value * first * second, the last product and the sum rounded once."""

    def compute(e: Expr, p: Expr, q: Expr, v: Expr) -> Expr:
        scaled = p if is_const(v, 1) else arith("mul", v, p)
        return call("fma", scaled, q, e) if e.dtype.is_float else _fused(scaled, q, e)

    return pointwise(b, "addcmul", compute, x, first, second, value)


def addcdiv(b: Builder, x: Value, first: Value, second: Value, value: Scalar) -> Value:
    """x + value * first / second. Product and sum are rounded once, as on GPUs; eager's CPU kernels divide last, which
    rounds once more."""
    return pointwise(
        b, "addcdiv", lambda e, p, q, v: _fused(v, call("div", p, q), e), x, first, second, value
    )


def lerp(b: Builder, start: Value, end: Value, weight: Arg) -> Value:
    """start + weight * (end - start), from the nearer end, product and sum rounded once."""

    def compute(s: Expr, e: Expr, w: Expr) -> Expr:
        gap = call("sub", e, s)
        far = call("fma", call("neg", gap), call("sub", number(1, w), w), e)
        return where(call("lt", call("abs", w), number(HALF, w)), call("fma", w, gap, s), far)

    return pointwise(b, "lerp", compute, start, end, weight)


def tanh_backward(b: Builder, gradient: Value, y: Value) -> Value:
    """gradient * (1 - y * y), product and difference rounded once."""
    return pointwise(
        b,
        "tanh_backward",
        lambda g, e: call("mul", g, call("fma", call("neg", e), e, number(1, e))),
        gradient,
        y,
    )


def scaled_sum(b: Builder, x: Arg, y: Arg, alpha: Scalar) -> Value:
    """x + alpha * y, rounded once."""
    return pointwise(b, "add", lambda p, q, a: _fused(a, q, p), x, y, alpha)


def scaled_difference(b: Builder, x: Arg, y: Arg, alpha: Scalar) -> Value:
    """x - alpha * y, rounded once."""

    def compute(p: Expr, q: Expr, a: Expr) -> Expr:
        if not p.dtype.is_float:
            return arith("sub", p, arith("mul", a, q))
        return call("fma", call("neg", a), q, p)

    return pointwise(b, "sub", compute, x, y, alpha)


def full(b: Builder, shape: tuple[Expr, ...], value: Scalar) -> Value:
    """A tensor whose elements all are `value`."""
    (out,) = b.emit("full", (), TensorExpr(output_axes(shape), (value,)))
    return out


def iota(b: Builder, count: Expr, start: Scalar, step: Scalar, dtype: DType) -> Value:
    """start + k * step for k < count, computed in the type of `start`, as elements of `dtype`."""
    (a,) = output_axes((count,))
    k = cast(position(a), start.dtype)
    value = arith("add", start, arith("mul", k, step))
    body = value if value.dtype == dtype else narrow_expr(value, dtype)
    (out,) = b.emit("iota", (), TensorExpr((a,), (body,)))
    return out
