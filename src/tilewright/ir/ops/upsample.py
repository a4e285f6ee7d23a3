"""Resampling. A scale is a ratio of integers, so places are exact: (a * i + c) // d, with weights from the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from tilewright.ir import reduction
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import DType
from tilewright.ir.expr import Axis, Expr, call, cast, const, narrow, read, where
from tilewright.ir.graph import Value
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes

from .common import position, within
from .pointwise import narrow as narrow_value
from .view import replicated


@dataclass(frozen=True, slots=True)
class Ratio:
    """Source elements per output element: numerator / denominator, both positive index expressions."""

    numerator: Expr
    denominator: Expr


def ratio_of(source: Expr, size: Expr, scale: float | None, align_corners: bool = False) -> Ratio:
    """The ratio for a dim of `source` elements brought to `size`; `scale` is the factor that the caller stated."""
    if align_corners:
        if size is dims.ONE:
            return Ratio(dims.ZERO, dims.ONE)
        return Ratio(dims.sub(source, dims.ONE), dims.sub(size, dims.ONE))
    if scale is not None and scale > 0:
        exact = 1 / Fraction(scale).limit_denominator(1 << 16)
        return Ratio(dims.integer(exact.numerator), dims.integer(exact.denominator))
    growth, shrink = dims.exact_div(size, source), dims.exact_div(source, size)
    if growth is not None and growth is not dims.ZERO:
        return Ratio(dims.ONE, growth)
    return Ratio(source, size) if shrink is None else Ratio(shrink, dims.ONE)


def nearest(
    b: Builder, x: Value, sizes: Sequence[Expr], ratios: Sequence[Ratio], centred: bool = False
) -> Value:
    """The source element at floor(i * ratio), or at floor((i + 1/2) * ratio) if `centred`, over the last dims."""
    lead = len(x.shape) - len(sizes)
    axes = output_axes((*x.shape[:lead], *sizes))
    index = [position(a) for a in axes]
    for k, ratio in enumerate(ratios):
        i, d = index[lead + k], ratio.denominator
        number = dims.mul(i, ratio.numerator)
        if centred:
            number, d = (
                dims.add(dims.mul(number, dims.integer(2)), ratio.numerator),
                dims.mul(d, dims.integer(2)),
            )
        place = dims.floordiv(number, d)
        last = dims.sub(x.shape[lead + k], dims.ONE)
        index[lead + k] = dims.minimum(place, last)
    (out,) = b.emit("nearest", (x,), TensorExpr(axes, (read(0, index, x.dtype),)))
    return out


def nearest_gradient(
    b: Builder, gradient: Value, shape: Sequence[Expr], ratios: Sequence[Ratio], centred: bool = False
) -> Value:
    """The sum, for each element of a tensor of `shape`, of the gradients of the elements that `nearest` makes of it. No
    place of these may have been moved to the last element."""
    lead = len(shape) - len(ratios)
    axes = output_axes(tuple(shape))
    index = [position(a) for a in axes[:lead]]
    reduce: list[Axis] = []
    conditions: list[Expr | None] = []
    for k, ratio in enumerate(ratios):
        here, size = position(axes[lead + k]), gradient.shape[lead + k]
        reduce.append(Axis(f"r{k}", dims.ceildiv(ratio.denominator, ratio.numerator)))
        place = dims.add(_first_of(here, ratio, centred), position(reduce[-1]))
        index.append(place)
        conditions += [
            None if dims.at_least(dims.sub(end, place), 1) else call("lt", place, end)
            for end in (_first_of(dims.add(here, dims.ONE), ratio, centred), size)
        ]
    acc = gradient.dtype.compute
    body, condition = cast(read(0, index, gradient.dtype), acc), within(conditions)
    if condition is not None:
        body = where(condition, body, const(0, acc))
    expr = TensorExpr(axes, (body,), tuple(reduce), reduction.sum_(acc))
    (out,) = b.emit("nearest_gradient", (gradient,), expr)
    return narrow_value(b, out, gradient.dtype)


def _first_of(source: Expr, ratio: Ratio, centred: bool) -> Expr:
    """The first place whose source is at `source` or behind it."""
    number, d = dims.mul(source, ratio.denominator), ratio.numerator
    if centred:
        number = dims.sub(dims.mul(number, dims.integer(2)), d)
        d = dims.mul(d, dims.integer(2))
    return dims.ceildiv(number, d)


def _source(i: Expr, ratio: Ratio, align_corners: bool, clip: bool) -> tuple[Expr, Expr, Expr]:
    """(floor of the source place, rest, denominator of the rest) for output place i; `clip` keeps it at 0 or above."""
    number, d = dims.mul(i, ratio.numerator), ratio.denominator
    if not align_corners:
        number = dims.add(dims.mul(number, dims.integer(2)), ratio.numerator, dims.mul(d, dims.integer(-1)))
        d = dims.mul(d, dims.integer(2))
    if clip:
        number = dims.maximum(number, dims.ZERO)
    return dims.floordiv(number, d), dims.mod(number, d), d


Taps = list[tuple[Expr, Expr]]


def _linear_taps(i: Expr, size: Expr, ratio: Ratio, align_corners: bool, dtype: DType) -> Taps:
    """The two (place, weight) pairs of linear interpolation along one dim."""
    low, rest, d = _source(i, ratio, align_corners, clip=True)
    if rest is dims.ZERO:
        return [(replicated(low, size), const(1, dtype))]
    weight = call("div", cast(rest, dtype), cast(d, dtype))
    last = dims.sub(size, dims.ONE)
    high = dims.minimum(dims.add(low, dims.ONE), last)
    return [(dims.minimum(low, last), call("sub", const(1, dtype), weight)), (high, weight)]


CUBIC = Fraction(-3, 4)
"""The free parameter of the cubic convolution kernel (Keys 1981), as torch sets it."""


def _cubic_taps(i: Expr, size: Expr, ratio: Ratio, align_corners: bool, dtype: DType) -> Taps:
    """The four (place, weight) pairs of cubic convolution along one dim; places outside move to the border."""
    low, rest, d = _source(i, ratio, align_corners, clip=False)
    t = call("div", cast(rest, dtype), cast(d, dtype))
    remaining = call("sub", const(1, dtype), t)
    weights = [_outer(t, remaining), _inner(t), _inner(remaining), _outer(remaining, t)]
    places = [replicated(dims.add(low, dims.integer(k - 1)), size) for k in range(4)]
    return list(zip(places, weights, strict=True))


def _polynomial(x: Expr, *coefficients: Fraction) -> Expr:
    total = const(coefficients[0], x.dtype)
    for c in coefficients[1:]:
        total = call("mul", total, x)
        if c:
            total = call("add", total, const(c, x.dtype))
    return total


def _inner(x: Expr) -> Expr:
    return _polynomial(x, CUBIC + 2, -(CUBIC + 3), Fraction(0), Fraction(1))


def _outer(beyond: Expr, left: Expr) -> Expr:
    """a (x - 1) (x - 2)^2 for x = 1 + `beyond` = 2 - `left`: of a sum of powers little is left between 1 and 2."""
    return call("mul", call("mul", const(CUBIC, left.dtype), beyond), call("mul", left, left))


def interpolate(
    b: Builder,
    x: Value,
    sizes: Sequence[Expr],
    ratios: Sequence[Ratio],
    align_corners: bool,
    cubic: bool = False,
) -> Value:
    """Linear (any number of last dims) or cubic interpolation, separable: a sum over the taps of every dim."""
    lead = len(x.shape) - len(sizes)
    axes = output_axes((*x.shape[:lead], *sizes))
    index = [position(a) for a in axes]
    dtype = x.dtype.compute
    taps_of: Callable[..., Taps] = _cubic_taps if cubic else _linear_taps
    taps = [
        taps_of(index[lead + k], x.shape[lead + k], ratio, align_corners, dtype)
        for k, ratio in enumerate(ratios)
    ]

    def level(k: int, chosen: list[Expr]) -> Expr:
        if k == len(taps):
            return cast(read(0, [*index[:lead], *chosen], x.dtype), dtype)
        terms = [_weighted(level(k + 1, [*chosen, place]), weight) for place, weight in taps[k]]
        total = terms[0]
        for t in terms[1:]:
            total = call("add", total, t)
        return total

    name = "cubic" if cubic else "linear"
    (out,) = b.emit(f"interpolate_{name}", (x,), TensorExpr(axes, (narrow(level(0, []), x.dtype),)))
    return out


def _weighted(e: Expr, weight: Expr) -> Expr:
    return e if weight.op == "const" and weight.value == 1 else call("mul", e, weight)
