"""Elementwise ops, creation and conversion."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tilewright.ir.dtype import f64, i64
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Value
from tilewright.ir.ops import pointwise as ops
from tilewright.ir.ops.common import Arg, Binary, Unary
from tilewright.ir.sizes import dims

from .registry import (  # fmt: skip
    ALWAYS_BOOL,
    BOOL_TO_LONG,
    DEFAULT,
    INT_TO_FLOAT,
    LATE,
    Call,
    Kind,
    NoDeclaration,
    Number,
    OpEntry,
    Size,
    lower,
    size,
    sizes,
    to_dtype,
)

aten = torch.ops.aten


def _unary(names: str, kind: Kind, declare: Callable[[str], Unary] | None = None) -> None:
    for name in names.split():
        declaration: Unary = getattr(ops, name) if declare is None else declare(name)
        packet = getattr(aten, name.rstrip("_"))

        def rule(c: Call, x: Value, declaration: Unary = declaration) -> Value:
            (x_,) = c.promote(x, kind=kind)
            assert isinstance(x_, Value)
            return declaration(c.b, x_)

        lower(packet.default)(rule)


_unary(
    "acos acosh asin asinh atan atanh cos cosh sin sinh tan tanh exp exp2 expm1 erf erfc sigmoid log log2 log10 log1p"
    " sqrt rsqrt reciprocal",
    INT_TO_FLOAT,
)
_unary("floor ceil trunc neg abs_ sign bitwise_not relu silu hardsigmoid hardswish mish", DEFAULT)
_unary("isnan isinf isfinite logical_not", ALWAYS_BOOL)
lower(aten.sgn.default)(lambda c, x: ops.sign(c.b, x))
lower(aten.signbit.default)(lambda c, x: ops.signbit(c.b, x))


def _binary(pairs: dict[str, Binary], kind: Kind, overloads: str = "Tensor Scalar") -> None:
    for name, declaration in pairs.items():
        packet = getattr(aten, name)

        def rule(c: Call, x: Value | Number, y: Value | Number, declaration: Binary = declaration) -> Value:
            p, q = c.promote(x, y, kind=kind)
            return declaration(c.b, p, q)

        for overload in overloads.split():
            if overload in packet.overloads():
                lower(getattr(packet, overload))(rule)


_binary({n: getattr(ops, n) for n in ("eq", "ne", "lt", "le", "gt", "ge")}, ALWAYS_BOOL)
_binary({n: getattr(ops, n) for n in ("logical_and", "logical_or", "logical_xor")}, ALWAYS_BOOL, "default")
_binary({"mul": ops.mul}, DEFAULT, "Scalar Scalar_Tensor")
_binary({n: getattr(ops, n) for n in ("remainder", "fmod")}, DEFAULT, "Tensor Scalar Scalar_Tensor")
_binary(
    {n: getattr(ops, n) for n in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    DEFAULT,
    "Tensor Scalar Scalar_Tensor",
)
_binary({"bitwise_left_shift": ops.shift_left}, DEFAULT, "Tensor Tensor_Scalar Scalar_Tensor")
_binary({"__lshift__": ops.shift_left, "__rshift__": ops.shift_right}, DEFAULT)
_binary({"bitwise_right_shift": ops.shift_right}, DEFAULT, "Tensor Tensor_Scalar Scalar_Tensor")
_binary({n: getattr(ops, n) for n in ("maximum", "minimum")}, DEFAULT, "default")
_binary({"atan2": ops.atan2, "copysign": ops.copysign}, INT_TO_FLOAT, "default Tensor Scalar")
_binary({"fmax": ops.fmax, "fmin": ops.fmin}, DEFAULT, "default")
_binary({"pow": ops.power}, BOOL_TO_LONG, "Tensor_Tensor Tensor_Scalar Scalar")
_binary({"floor_divide": ops.floordiv}, DEFAULT, "default Scalar")


def _scaled(c: Call, x: Value | Number, y: Value | Number, alpha: Number, subtract: bool) -> Value:
    p, q = c.promote(x, y)
    if alpha == 1:
        return (ops.sub if subtract else ops.add)(c.b, p, q)
    return (ops.scaled_difference if subtract else ops.scaled_sum)(c.b, p, q, c.number(alpha, c.dtype))


@lower(aten.add.Tensor, aten.add.Scalar)
def _add(c: Call, x: Value | Number, y: Value | Number, alpha: Number = 1) -> Value:
    return _scaled(c, x, y, alpha, subtract=False)


@lower(aten.sub.Tensor, aten.sub.Scalar)
def _sub(c: Call, x: Value | Number, y: Value | Number, alpha: Number = 1) -> Value:
    return _scaled(c, x, y, alpha, subtract=True)


@lower(aten.rsub.Tensor, aten.rsub.Scalar)
def _rsub(c: Call, x: Value | Number, y: Value | Number, alpha: Number = 1) -> Value:
    return _scaled(c, y, x, alpha, subtract=True)


def _by(c: Call, declaration: Binary, x: Value | Number, y: Value | Number, kind: Kind) -> Value:
    """Multiply or divide. Halves by a tensor without dims of a wider type: that one is not rounded first, or every
    result would err in the same direction."""
    p, q = c.promote(x, y, kind=kind)
    if isinstance(p, Value) and p.dtype.is_half and isinstance(y, Value) and not y.shape:
        wide = p.dtype.compute
        if y.dtype.is_float and not y.dtype.is_half:
            return c.to(declaration(c.b, c.to(p, wide), c.to(y, wide)), p.dtype)
    return declaration(c.b, p, q)


@lower(aten.mul.Tensor)
def _mul(c: Call, x: Value | Number, y: Value | Number) -> Value:
    return _by(c, ops.mul, x, y, DEFAULT)


@lower(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.true_divide.Scalar)
def _div(c: Call, x: Value | Number, y: Value | Number) -> Value:
    return _by(c, ops.div, x, y, INT_TO_FLOAT)


@lower(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div_mode(c: Call, x: Value | Number, y: Value | Number, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return _div(c, x, y)
    return (ops.floordiv if rounding_mode == "floor" else ops.truncdiv)(c.b, *c.promote(x, y))


@lower(aten.round.default, aten.round.decimals)
def _round(c: Call, x: Value, *, decimals: int = 0) -> Value:
    return ops.round_to(c.b, x, decimals) if decimals and x.dtype.is_float else ops.round_(c.b, x)


@lower(aten.gelu.default)
def _gelu(c: Call, x: Value, approximate: str = "none") -> Value:
    return ops.gelu(c.b, x, approximate)


@lower(aten.leaky_relu.default)
def _leaky_relu(c: Call, x: Value, negative_slope: Number = 0.01) -> Value:
    return ops.leaky_relu(c.b, x, c.number(negative_slope, x.dtype))


@lower(aten.elu.default)
def _elu(c: Call, x: Value, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Value:
    return ops.elu(c.b, x, *(c.number(v, x.dtype) for v in (alpha, scale, input_scale)))


@lower(aten.celu.default)
def _celu(c: Call, x: Value, alpha: float = 1.0) -> Value:
    return ops.elu(c.b, x, *(c.number(v, x.dtype) for v in (alpha, 1, 1 / alpha)))


@lower(aten.selu.default)
def _selu(c: Call, x: Value) -> Value:
    return ops.elu(c.b, x, *(c.number(v, x.dtype) for v in (1.6732632423543772848, 1.0507009873554804934, 1)))


@lower(aten.softplus.default)
def _softplus(c: Call, x: Value, beta: Number = 1, threshold: Number = 20) -> Value:
    return ops.softplus(c.b, x, c.number(beta, x.dtype), c.number(threshold, x.dtype))


@lower(aten.log_sigmoid_forward.default)
def _log_sigmoid(c: Call, x: Value) -> tuple[Value, Value]:
    if c.sizes_of_results[1] == x.shape:
        return ops.log_sigmoid(c.b, x), ops.decay(c.b, x)
    return ops.log_sigmoid(c.b, x), ops.full(c.b, c.sizes_of_results[1], c.number(0, x.dtype))


@lower(aten.threshold.default)
def _threshold(c: Call, x: Value, threshold: Number, value: Number) -> Value:
    return ops.threshold(c.b, x, c.number(threshold, x.dtype), c.number(value, x.dtype))


@lower(aten.softshrink.default)
def _softshrink(c: Call, x: Value, lambd: Number = 0.5) -> Value:
    return ops.softshrink(c.b, x, c.number(lambd, x.dtype))


@lower(aten.hardshrink.default)
def _hardshrink(c: Call, x: Value, lambd: Number = 0.5) -> Value:
    return ops.hardshrink(c.b, x, c.number(lambd, x.dtype))


@lower(aten.hardtanh.default)
def _hardtanh(c: Call, x: Value, min_val: Number = -1, max_val: Number = 1) -> Value:
    return ops.clamp(c.b, x, c.number(min_val, x.dtype), c.number(max_val, x.dtype))


@lower(aten.relu6.default)
def _relu6(c: Call, x: Value) -> Value:
    return _hardtanh(c, x, 0, 6)


@lower(aten.prelu.default, aten._prelu_kernel.default)
def _prelu(c: Call, x: Value, weight: Value) -> Value:
    if len(weight.shape) == 1 and len(x.shape) > 1 and weight.shape[0] is not dims.ONE:
        raise NoDeclaration
    return ops.prelu(c.b, x, weight)


@lower(aten.clamp.default, aten.clamp.Tensor)
def _clamp(c: Call, x: Value, min: Value | Number | None = None, max: Value | Number | None = None) -> Value:
    given = [v for v in (min, max) if v is not None]
    first, *rest = c.promote(x, *given)
    assert isinstance(first, Value)
    low: Arg | None = rest.pop(0) if min is not None else None
    return ops.clamp(c.b, first, low, rest.pop(0) if max is not None else None)


lower(aten.clamp_min.default, aten.clamp_min.Tensor)(lambda c, x, min: _clamp(c, x, min, None))
lower(aten.clamp_max.default, aten.clamp_max.Tensor)(lambda c, x, max: _clamp(c, x, None, max))


@lower(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def _where(c: Call, condition: Value, yes: Value | Number, no: Value | Number) -> Value:
    return ops.where_(c.b, condition, *c.promote(yes, no))


@lower(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(c: Call, x: Value, mask: Value, value: Value | Number) -> Value:
    filled = c.to(value, x.dtype) if isinstance(value, Value) else c.number(value, x.dtype)
    return ops.where_(c.b, mask, filled, x)


@lower(aten.addcmul.default)
def _addcmul(c: Call, x: Value, first: Value, second: Value, value: Number = 1) -> Value:
    a, p, q = c.promote(x, first, second)
    assert isinstance(a, Value) and isinstance(p, Value) and isinstance(q, Value)
    return ops.addcmul(c.b, a, p, q, c.number(value, c.dtype))


@lower(aten.addcdiv.default)
def _addcdiv(c: Call, x: Value, first: Value, second: Value, value: Number = 1) -> Value:
    a, p, q = c.promote(x, first, second, kind=INT_TO_FLOAT)
    assert isinstance(a, Value) and isinstance(p, Value) and isinstance(q, Value)
    return ops.addcdiv(c.b, a, p, q, c.number(value, c.dtype))


def _fma(c: Call, x: Value | Number, y: Value | Number, z: Value | Number) -> Value:
    """Of halves it is computed in singles: a factor without dims in a wider type is not rounded first."""
    wide = c.dtype.compute
    p, q, r = (c.to(a, wide) if isinstance(a, Value) else c.number(a, wide) for a in (x, y, z))
    return ops.narrow(c.b, ops.fma(c.b, p, q, r), c.dtype)


LATE["prims.fma.default"] = OpEntry(_fma)


@lower(aten.tanh_backward.default)
def _tanh_backward(c: Call, gradient: Value, y: Value) -> Value:
    return ops.tanh_backward(c.b, gradient, y)


@lower(aten.lerp.Scalar, aten.lerp.Tensor)
def _lerp(c: Call, start: Value, end: Value, weight: Value | Number) -> Value:
    return ops.lerp(c.b, start, end, weight if isinstance(weight, Value) else c.number(weight, start.dtype))


@lower(aten._to_copy.default, aten.to.dtype)
def _to_copy(c: Call, x: Value | Number, dtype: torch.dtype | None = None, *_: object,
             device: torch.device | None = None, non_blocking: bool = False, **__: object) -> Value:  # fmt: skip
    """Torch takes a number for a tensor too: the start of Python's `sum` of tangents under `vmap`."""
    if not isinstance(x, Value):
        return ops.full(c.b, (), c.number(x, c.dtype))
    if dtype is None or to_dtype(dtype) == x.dtype:
        return ops.copy(c.b, x)
    return ops.to(c.b, x, to_dtype(dtype))


@lower(torch.ops.prims.convert_element_type.default)
def _convert(c: Call, x: Value, dtype: torch.dtype) -> Value:
    return _to_copy(c, x, dtype)


@lower(aten.clone.default, aten.lift_fresh_copy.default, aten.contiguous.default, view=True)
def _clone(c: Call, x: Value, memory_format: torch.memory_format | None = None) -> Value:
    return ops.copy(c.b, x)


@lower(aten.alias.default, aten.detach.default, aten.lift_fresh.default, view=True)
def _alias(c: Call, x: Value) -> Value:
    return x


@lower(aten.copy.default)
def _copy(c: Call, x: Value, source: Value, non_blocking: bool = False) -> Value:
    source = c.to(source, x.dtype)
    return (
        ops.pointwise(c.b, "copy", lambda _, e: e, x, source)
        if source.shape != x.shape
        else ops.copy(c.b, source)
    )


@lower(aten.full.default)
def _full(c: Call, shape: Sequence[Size], value: Number, **_: object) -> Value:
    return ops.full(c.b, sizes(shape), c.number(value, c.dtype))


@lower(aten.full_like.default)
def _full_like(c: Call, x: Value, value: Number, **_: object) -> Value:
    return ops.full(c.b, x.shape, c.number(value, c.dtype))


@lower(aten.fill.Scalar)
def _fill(c: Call, x: Value, value: Number) -> Value:
    return ops.full(c.b, x.shape, c.number(value, c.dtype))


@lower(
    aten.empty.memory_format, aten.zeros.default, aten.new_zeros.default, aten._efficientzerotensor.default
)
def _empty(c: Call, *args: object, **_: object) -> Value:
    """Contents that the program may not look at: zeros cost nothing and are repeatable. What torch keeps as zeros
    without memory (tangents of derivatives of derivatives) would be none that a kernel can read."""
    return ops.full(c.b, c.sizes_of_results[0], c.number(0, c.dtype))


lower(aten.zeros_like.default, aten.empty_like.default)(_empty)
lower(aten.ones.default, aten.ones_like.default)(
    lambda c, *_, **__: ops.full(c.b, c.sizes_of_results[0], c.number(1, c.dtype))
)


@lower(aten.scalar_tensor.default)
def _scalar_tensor(c: Call, value: Number, **_: object) -> Value:
    return ops.full(c.b, (), c.number(value, c.dtype))


@lower(aten.arange.start_step)
def _arange(c: Call, start: Number, end: Number, step: Number = 1, **_: object) -> Value:
    parts = (start, end, step)
    exact = all(isinstance(v, int) or (isinstance(v, Expr) and v.dtype is i64) for v in parts)
    if exact:
        first, last, by = (size(v) for v in parts if not isinstance(v, float))
        count = _steps(first, last, by)
        return ops.iota(c.b, count, first, by, c.dtype)
    if any(isinstance(v, Expr) for v in parts):
        raise NoDeclaration("symbolic float range")
    first, last, by = (float(v) for v in parts if not isinstance(v, Expr))
    if c.dtype is i64:  # torch counts these in whole numbers, other integers as they are written
        first, last, by = math.trunc(first), math.trunc(last), math.trunc(by)
    if by == 0:
        raise NoDeclaration("a step that is no whole number")
    count = dims.integer(math.ceil((last - first) / by))
    if not c.dtype.is_float:
        return ops.iota(c.b, count, c.number(int(first), i64), c.number(int(by), i64), c.dtype)
    return ops.iota(c.b, count, c.number(start, f64), c.number(step, f64), c.dtype)


def _steps(first: Expr, last: Expr, by: Expr) -> Expr:
    if dims.at_least(by, 1):
        return dims.maximum(dims.ceildiv(dims.sub(last, first), by), dims.ZERO)
    back = dims.mul(by, dims.integer(-1))
    if not dims.at_least(back, 1):
        raise NoDeclaration("symbolic step")
    return dims.maximum(dims.ceildiv(dims.sub(first, last), back), dims.ZERO)
