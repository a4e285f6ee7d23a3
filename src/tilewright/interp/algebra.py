"""The arithmetic an interpreter runs over: floats as torch computes them, or another element type.

Integers and bools are always numpy arrays; only floating elements differ between algebras.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tilewright.ir.dtype import DType, Kind
from tilewright.ir.expr import Const

from .fused import fma

Array = NDArray[Any]
"""Elements of any type, also structured ones, with numpy's indexing and reshaping. Never changed in place."""

STORAGE: dict[str, np.dtype[np.generic]] = {
    "bool": np.dtype(np.bool_), "u8": np.dtype(np.uint8), "i8": np.dtype(np.int8), "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32), "i64": np.dtype(np.int64), "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64),
}  # fmt: skip
"""Element type name -> the numpy type that holds it."""


class Algebra(Protocol):
    """Scalar arithmetic on whole arrays, with numpy's broadcasting."""

    def load(self, data: object, dtype: DType) -> Array:
        """A tensor of the program: a numpy array, torch tensor, number, or an array of this algebra."""
        ...

    def constant(self, value: Const, dtype: DType) -> Array:
        """A constant, as an array of rank 0."""
        ...

    def apply(self, op: str, args: Sequence[Array], dtype: DType, result: DType) -> Array:
        """Scalar operation `op` of `ir.expr.SCALARS`: from arguments (the first of type `dtype`) to type
        `result`."""
        ...

    def join(self, parts: Sequence[Array], axis: int) -> Array:
        """Concatenation along `axis`."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Storage to be overwritten."""
        ...

    def reduce(self, op: str, x: Array, axes: tuple[int, ...], start: Array) -> Array | None:
        """Reduce `axes` with scalar operation `op` from the identity `start`, in an order of its own.

        None = there is no such shortcut."""
        ...

    def contract(self, x: Array, y: Array, axes: tuple[int, ...]) -> Array | None:
        """Sum of x*y (of equal rank, broadcast) over `axes`; None = no such shortcut."""
        ...


class Floats:
    """Elements as torch has them: integers wrap, maximum and minimum propagate NaN, every operation rounds.

    16-bit floats are computed in fp32 and rounded. With `wide` all floats are held in fp64 and never
    rounded: the reference value of the fp64 rule."""

    def __init__(self, wide: bool = False) -> None:
        self.wide = wide

    def storage(self, dtype: DType) -> np.dtype[np.generic]:
        """The numpy type in which elements of `dtype` are held."""
        return STORAGE["f64" if self.wide and dtype.is_float else dtype.name]

    def load(self, data: object, dtype: DType) -> Array:
        """See `Algebra`. Elements of opaque types are kept as they come; only library calls read them."""
        plain = to_numpy(data)
        return plain if dtype.kind is Kind.OPAQUE else convert(plain, self.storage(dtype))

    def constant(self, value: Const, dtype: DType) -> Array:
        """See `Algebra`."""
        plain = float(value) if dtype.is_float else value
        if not dtype.is_float and dtype.kind is not Kind.BOOL:
            return _wrapped_integer(int(value), self.storage(dtype))
        return convert(np.asarray(plain), self.storage(dtype))

    def apply(self, op: str, args: Sequence[Array], dtype: DType, result: DType) -> Array:
        """See `Algebra`. Raises KeyError for an operation that `SCALARS` lacks."""
        arrays = [np.asarray(a) for a in args]
        if op == "where":
            return np.asarray(np.where(arrays[0], arrays[1], arrays[2]))
        target = self.storage(result)
        if op in _SILENT and not dtype.is_float:
            table = _BOOL if dtype.kind is Kind.BOOL else _INTEGER
            return convert(np.asarray(table[op](*arrays)), target)
        with np.errstate(all="ignore"):
            if op in ("cast", "narrow"):
                return convert(arrays[0], target)
            if dtype.is_half and not self.wide:
                arrays = [a.astype(np.float32) for a in arrays]
            table = OF_FLOATS if dtype.is_float else _BOOL if dtype.kind is Kind.BOOL else _INTEGER
            return convert(np.asarray(table[op](*arrays)), target)

    def join(self, parts: Sequence[Array], axis: int) -> Array:
        """See `Algebra`."""
        return np.concatenate([np.asarray(p) for p in parts], axis)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """See `Algebra`."""
        return np.zeros(shape, self.storage(dtype))

    def reduce(self, op: str, x: Array, axes: tuple[int, ...], start: Array) -> Array | None:
        """See `Algebra`; numpy's order (pairwise for sums)."""
        ufunc = _UFUNCS.get(op)
        if ufunc is None:
            return None
        data = np.asarray(x)
        held = data.dtype
        if held.itemsize == 2 and held.kind not in "iu":
            data = data.astype(np.float32)
        with np.errstate(all="ignore"):
            out = ufunc.reduce(
                data, axis=axes, initial=np.asarray(start).astype(data.dtype).item(), dtype=data.dtype
            )
        return np.asarray(out).astype(held)

    def contract(self, x: Array, y: Array, axes: tuple[int, ...]) -> Array | None:
        """See `Algebra`; the order of the sum is that of numpy's einsum."""
        a, b = np.asarray(x), np.asarray(y)
        if a.dtype.kind != "f" or a.dtype.itemsize < 4:
            return None
        rank = a.ndim
        left, right = ([k for k in range(rank) if t.shape[k] != 1] for t in (a, b))
        if any(k not in left or k not in right for k in axes):
            return None
        kept = [k for k in range(rank) if k not in axes and (k in left or k in right)]
        with np.errstate(all="ignore"):
            out = np.einsum(a.squeeze(), left, b.squeeze(), right, kept, optimize=True)
        wide = np.broadcast_shapes(a.shape, b.shape)
        return np.asarray(out).reshape([wide[k] for k in range(rank) if k not in axes])


@lru_cache(1 << 10)
def _wrapped_integer(value: int, storage: np.dtype[np.generic]) -> Array:
    """A whole number, wrapped to its type, which nobody may change: places are made of few numbers."""
    made = np.asarray(np.asarray(value & ((1 << 64) - 1), np.uint64).astype(np.int64).astype(storage))
    made.flags.writeable = False
    return made


def to_numpy(data: object) -> Array:
    """A numpy array of a number, an array, or a torch tensor (bf16 included; copied only if needed)."""
    if isinstance(data, np.ndarray):
        return data
    if isinstance(data, (bool, int, float, np.generic, Fraction)):
        return np.asarray(float(data) if isinstance(data, Fraction) else data)
    import torch

    if not isinstance(data, torch.Tensor):
        raise TypeError(f"not a tensor: {type(data).__name__}")
    plain = data.detach().cpu().contiguous()
    if plain.dtype is torch.bfloat16:
        return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return plain.numpy()


def convert(x: Array, target: np.dtype[np.generic]) -> Array:
    """torch's conversion: floats to integers truncate, to bool compare with 0, fp64 to 16 bits go through
    fp32."""
    if x.dtype == target:
        return x
    with np.errstate(all="ignore"):
        if target == np.bool_:
            return np.asarray(x != 0)
        from_float = x.dtype.kind not in "iub"
        if from_float and target.kind in "iu":
            return np.asarray(np.trunc(x.astype(np.float64)).astype(np.int64).astype(target))
        if target.itemsize == 2 and target.kind not in "iu":
            return np.asarray(x.astype(np.float32).astype(target))
        return np.asarray(x.astype(target))


def _real(function: Callable[[float], float]) -> Callable[[Array], Array]:
    """A function of Python floats on arrays, computed in fp64."""
    mapped = np.frompyfunc(function, 1, 1)
    return lambda x: np.asarray(mapped(x.astype(np.float64))).astype(np.float64)


def _trunc_division(a: Array, b: Array) -> Array:
    quotient = np.floor_divide(a, b)
    return quotient + ((np.fmod(a, b) != 0) & ((a < 0) != (b < 0))).astype(quotient.dtype)


def _remainder(a: Array, b: Array) -> Array:
    rest = np.fmod(a, b)
    return np.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)


def _integer_power(a: Array, b: Array) -> Array:
    sign = np.where(b % 2 == 0, 1, a)
    inverse = (
        np.where(a == 1, 1, np.where(a == -1, sign, 0)) if a.dtype.kind == "i" else np.where(a == 1, 1, 0)
    )
    return np.where(b < 0, inverse, np.power(a, np.maximum(b, 0))).astype(a.dtype)


def _shift_left(a: Array, b: Array) -> Array:
    width = 8 * a.dtype.itemsize
    inside = (b >= 0) & (b < width)
    return np.where(inside, np.left_shift(a, np.where(inside, b, 0).astype(a.dtype)), 0).astype(a.dtype)


def _shift_right(a: Array, b: Array) -> Array:
    width = 8 * a.dtype.itemsize
    inside = (b >= 0) & (b < width)
    gone = np.where(a < 0, -1, 0) if a.dtype.kind == "i" else np.zeros_like(a)
    return np.where(inside, np.right_shift(a, np.where(inside, b, 0).astype(a.dtype)), gone).astype(a.dtype)


def _sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small)).astype(x.dtype)


_COMPARE: dict[str, Callable[..., object]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
    "maximum": np.maximum, "minimum": np.minimum,
}  # fmt: skip

OF_FLOATS: dict[str, Callable[..., object]] = _COMPARE | {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "floordiv": np.floor_divide,
    "fma": fma, "mod": _remainder, "truncdiv": lambda a, b: np.trunc(a / b), "fmod": np.fmod, "pow": np.power,
    "atan2": np.arctan2,
    "neg": np.negative, "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc,
    "round": np.rint,
    "sign": lambda x: (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype), "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "reciprocal": lambda x: 1 / x, "isnan": np.isnan, "isinf": np.isinf,
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10,
    "log1p": np.log1p, "tanh": np.tanh, "coarse_tanh": np.tanh, "sigmoid": _sigmoid,
    "close_exp": np.exp, "close_div": np.divide,
    "quick_exp2": np.exp2, "quick_log2": np.log2, "quick_erfc": _real(math.erfc), "quick_tanh": np.tanh,
    "coarse_erfc": _real(math.erfc),
    "erf": _real(math.erf), "erfc": _real(math.erfc),
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
}  # fmt: skip

_INTEGER: dict[str, Callable[..., object]] = _COMPARE | {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "shl": _shift_left, "shr": _shift_right, "floordiv": np.floor_divide,
    "mod": np.remainder,
    "truncdiv": _trunc_division, "fmod": np.fmod, "pow": _integer_power, "neg": np.negative, "abs": np.abs,
    "not": np.invert, "sign": np.sign, "floor": lambda x: x, "ceil": lambda x: x, "trunc": lambda x: x,
    "round": lambda x: x, "isnan": lambda x: np.zeros(x.shape, np.bool_),
    "isinf": lambda x: np.zeros(x.shape, np.bool_),
}  # fmt: skip

_BOOL: dict[str, Callable[..., object]] = _COMPARE | {
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not,
    "add": np.logical_or, "mul": np.logical_and,
}  # fmt: skip

_SILENT = {*_COMPARE, "add", "sub", "mul", "and", "or", "xor", "not"}
"""What makes numpy warn of nothing where it is done to integers and bools: most of what places are made of."""

_UFUNCS: dict[str, np.ufunc] = {
    "add": np.add, "mul": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip

FLOATS = Floats()
"""Elements as torch computes them."""

REALS = Floats(wide=True)
"""All floats in fp64 without rounding."""
