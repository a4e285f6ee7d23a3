"""Elementwise arithmetic, comparison, logic and bit operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilewright.capture.onnx.registry import op
from tilewright.capture.onnx.values.run import WIDE, Host, Number

Operand = Tensor | Number


def _dtype(a: Operand, b: Operand) -> torch.dtype:
    return a.dtype if isinstance(a, Tensor) else b.dtype  # type: ignore[union-attr]


def widen(x: Operand) -> Operand:
    """Unsigned types that torch has no arithmetic for as int64 (same bits for uint64)."""
    return x.to(torch.int64) if isinstance(x, Tensor) and x.dtype in WIDE else x


def _unary(name: str, function: Callable[[Tensor], Tensor], floats_only: bool = True) -> None:
    @op(name)
    def call(x: Tensor) -> Tensor:
        if not floats_only and x.dtype in WIDE:
            return function(x.to(torch.int64)).to(x.dtype)
        return function(x)


for _name, _function in {
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Reciprocal": torch.reciprocal,
    "Round": torch.round,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}.items():
    _unary(_name, _function)


def _sign(x: Tensor) -> Tensor:
    """NaN has no sign, and stays NaN as in the standard's reference; torch gives 0."""
    return torch.where(x.isnan(), x, torch.sign(x)) if x.is_floating_point() else torch.sign(x)


for _name, _function in {"Abs": torch.abs, "Neg": torch.neg, "Sign": _sign}.items():
    _unary(_name, _function, floats_only=False)


@op("Not")
def logical_not(x: Tensor) -> Tensor:
    """Logical negation of bools."""
    return torch.logical_not(x)


@op("BitwiseNot", since=18)
def bitwise_not(x: Tensor) -> Tensor:
    """Complement of the bits."""
    return torch.bitwise_not(x) if x.dtype not in WIDE else torch.bitwise_not(x.to(torch.int64)).to(x.dtype)


@op("IsInf", since=10)
def is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """Where x is infinite, of the wanted signs."""
    if detect_negative and detect_positive:
        return torch.isinf(x)
    if detect_negative:
        return torch.isneginf(x)
    return torch.isposinf(x) if detect_positive else torch.zeros_like(x, dtype=torch.bool)


def _narrow(result: Tensor, a: Operand, b: Operand) -> Tensor:
    dtype = _dtype(a, b)
    return result.to(dtype) if dtype in WIDE else result


@op("Add", since=7, scalar=(0, 1))
def add(a: Operand, b: Operand) -> Tensor:
    """a + b."""
    if _dtype(a, b) in WIDE:
        return _narrow(widen(a) + widen(b), a, b)  # type: ignore[arg-type]
    return a + b  # type: ignore[return-value]


@op("Sub", since=7, scalar=(0, 1))
def sub(a: Operand, b: Operand) -> Tensor:
    """a - b."""
    if _dtype(a, b) in WIDE:
        return _narrow(widen(a) - widen(b), a, b)  # type: ignore[arg-type]
    return a - b  # type: ignore[return-value]


@op("Mul", since=7, scalar=(0, 1))
def mul(a: Operand, b: Operand) -> Tensor:
    """a * b."""
    if _dtype(a, b) in WIDE:
        return _narrow(widen(a) * widen(b), a, b)  # type: ignore[arg-type]
    return a * b  # type: ignore[return-value]


@op("Div", since=7, scalar=(1,))
def div(a: Tensor, b: Operand) -> Tensor:
    """a / b; integers truncate towards zero."""
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return a / b
    if a.dtype == torch.uint64:
        return _divide_uint64(a, b)
    return _narrow(torch.div(widen(a), widen(b), rounding_mode="trunc"), a, b)  # type: ignore[arg-type]


def _divide_uint64(a: Tensor, b: Operand) -> Tensor:
    """Exact unsigned division in two's complement: halve, divide, correct by at most one."""
    x, y = a.view(torch.int64), torch.as_tensor(b, dtype=torch.uint64).view(torch.int64)
    divisor = torch.where(y < 0, 1, y)
    q = torch.div((x >> 1) & 0x7FFFFFFFFFFFFFFF, divisor, rounding_mode="trunc") * 2
    rest = x - q * divisor
    q = q + ((rest < 0) | (rest >= divisor)).to(torch.int64)
    large = unsigned_order(x) >= unsigned_order(y)
    return torch.where(y < 0, large.to(torch.int64), q).view(torch.uint64)


def unsigned_order(x: Tensor) -> Tensor:
    """uint64 bits as int64 that compare like the unsigned numbers."""
    return x ^ torch.iinfo(torch.int64).min


@op("Pow", since=7, scalar=(1,))
def power(a: Tensor, b: Operand) -> Tensor:
    """a ** b in the type of a; the exponent may have another type."""
    if isinstance(b, Tensor):
        if a.dtype == b.dtype and a.dtype not in WIDE:
            return torch.pow(a, b)
        if a.dtype.is_floating_point:
            return torch.pow(a, b.to(a.dtype))
        if b.dtype.is_floating_point:
            return torch.pow(a.to(torch.float64), b.to(torch.float64)).to(a.dtype)
        return torch.pow(a.to(torch.int64), b.to(torch.int64)).to(a.dtype)
    if not a.dtype.is_floating_point and isinstance(b, float):
        return torch.pow(a.to(torch.float64), b).to(a.dtype)
    return _narrow(torch.pow(widen(a), b), a, b)  # type: ignore[arg-type]


@op("Mod", since=10)
def mod(a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    """Remainder with the sign of b, or of a if `fmod` is set."""
    x, y = widen(a), widen(b)
    return (torch.fmod(x, y) if fmod else torch.remainder(x, y)).to(a.dtype)  # type: ignore[arg-type]


def _comparison(name: str, since: int, function: Callable[..., Tensor]) -> None:
    @op(name, since=since, scalar=(1,))
    def call(a: Tensor, b: Operand) -> Tensor:
        if a.dtype == torch.uint64:
            y = torch.as_tensor(b, dtype=torch.uint64)
            return function(unsigned_order(a.view(torch.int64)), unsigned_order(y.view(torch.int64)))
        return function(widen(a), widen(b))  # type: ignore[arg-type]


_comparison("Equal", 7, torch.eq)
_comparison("Greater", 7, torch.gt)
_comparison("Less", 7, torch.lt)
_comparison("GreaterOrEqual", 12, torch.ge)
_comparison("LessOrEqual", 12, torch.le)


def _binary(name: str, since: int, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    @op(name, since=since)
    def call(a: Tensor, b: Tensor) -> Tensor:
        if a.dtype in WIDE:
            return function(a.to(torch.int64), b.to(torch.int64)).to(a.dtype)
        return function(a, b)


_binary("And", 7, torch.logical_and)
_binary("Or", 7, torch.logical_or)
_binary("Xor", 7, torch.logical_xor)
_binary("BitwiseAnd", 18, torch.bitwise_and)
_binary("BitwiseOr", 18, torch.bitwise_or)
_binary("BitwiseXor", 18, torch.bitwise_xor)


@op("BitShift", since=11)
def bit_shift(a: Tensor, b: Tensor, *, direction: str) -> Tensor:
    """Shift (arithmetic for signed types); a shift by the width or more leaves only the sign."""
    bits = a.dtype.itemsize * 8
    x, n = a.to(torch.int64), b.to(torch.int64)
    if direction == "LEFT":
        shifted = x << n.clamp(max=63)
    else:
        right = x >> n.clamp(max=63)
        keep = torch.where(n > 0, (torch.ones_like(n) << (64 - n).clamp(0, 63)) - 1, -1)
        shifted = right & keep if a.dtype == torch.uint64 else right
    past = 0 if direction == "LEFT" or not a.dtype.is_signed else torch.where(x < 0, -1, 0)
    return torch.where(n < bits, shifted, past).to(a.dtype)


def _variadic(name: str, since: int, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    @op(name, since=since)
    def call(*xs: Tensor) -> Tensor:
        first = xs[0].dtype
        wide = [unsigned_order(x.view(torch.int64)) if first == torch.uint64 else widen(x) for x in xs]
        result = wide[0]
        for x in wide[1:]:
            result = function(result, x)  # type: ignore[arg-type]
        if first == torch.uint64:
            return unsigned_order(result).view(first)  # type: ignore[arg-type]
        return result.to(first)  # type: ignore[union-attr]


_variadic("Max", 6, torch.maximum)
_variadic("Min", 6, torch.minimum)


@op("Sum", since=6)
def sum_all(*xs: Tensor) -> Tensor:
    """Elementwise sum of all inputs."""
    result = xs[0]
    for x in xs[1:]:
        result = result + x
    return result


@op("Mean", since=6)
def mean_all(*xs: Tensor) -> Tensor:
    """Elementwise mean of all inputs."""
    return sum_all(*xs) / len(xs)


@op("Where", since=9)
def where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a where the condition holds, else b."""
    return torch.where(condition, a, b)


@op("Clip", since=6)
def clip_attributes(x: Tensor, *, min: float | None = None, max: float | None = None) -> Tensor:
    """Clamp to the bounds given as attributes."""
    return x if min is None and max is None else torch.clamp(x, min, max)


@op("Clip", since=11, small=(1, 2))
def clip_inputs(x: Tensor, low: Tensor | Host | None = None, high: Tensor | Host | None = None) -> Tensor:
    """Clamp to scalar bounds; if they cross, the upper one wins. A NaN stays."""
    bounds = [b.item() if isinstance(b, Host) else b for b in (low, high)]
    if bounds[0] is None and bounds[1] is None:
        return x
    if any(isinstance(b, Tensor) for b in bounds):  # torch wants both as tensors then
        bounds = [torch.full_like(x, b) if isinstance(b, (int, float)) else b for b in bounds]
    if x.dtype in WIDE:
        wide = [b.to(torch.int64) if isinstance(b, Tensor) else b for b in bounds]
        return torch.clamp(x.to(torch.int64), *wide).to(x.dtype)  # type: ignore[arg-type]
    return torch.clamp(x, *bounds)  # type: ignore[arg-type]
