"""Reductions over some dims. Halves accumulate in f32 and come back to their type; integers accumulate in i64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tilewright.ir import reduction
from tilewright.ir.builder import Builder, broadcast
from tilewright.ir.dtype import DType, bool_
from tilewright.ir.expr import Axis, Expr, call, cast, const, read, where
from tilewright.ir.expr import narrow as narrow_expr
from tilewright.ir.graph import Value
from tilewright.ir.reduction import Reduction
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes

from .common import accumulator, is_true, number, pointwise, position, reduced, shared, wide, wrap_all
from .pointwise import narrow, to
from .view import squeeze


def count(x: Value, over: Sequence[int]) -> Expr:
    """Number of elements that one result of a reduction over these dims folds."""
    return dims.prod(x.shape[d] for d in over)


def sum_(
    b: Builder, x: Value, over: Sequence[int] | None = None, keepdim: bool = False, dtype: DType | None = None
) -> Value:
    """The sum over dims `over` (None or empty: all), as `dtype` (default: x's type, i64 for integers and bools)."""
    return narrow(b, accumulated(b, x, over, keepdim, dtype), dtype or _summed(x.dtype))


def accumulated(
    b: Builder, x: Value, over: Sequence[int] | None, keepdim: bool, dtype: DType | None = None
) -> Value:
    """The sum in its accumulation type."""
    acc = accumulator(dtype or x.dtype)
    dims_ = wrap_all(over, len(x.shape))
    (out,) = reduced(b, "sum", x, dims_, keepdim, reduction.sum_(acc), lambda e, _: (cast(e, acc),))
    return out


def _summed(dtype: DType) -> DType:
    return dtype if dtype.is_float else accumulator(dtype)


def prod(
    b: Builder, x: Value, over: Sequence[int] | None = None, keepdim: bool = False, dtype: DType | None = None
) -> Value:
    """The product over dims `over`, typed as `sum_`."""
    acc = accumulator(dtype or x.dtype)
    dims_ = wrap_all(over, len(x.shape))
    (out,) = reduced(b, "prod", x, dims_, keepdim, reduction.product(acc), lambda e, _: (cast(e, acc),))
    return narrow(b, out, dtype or _summed(x.dtype))


def mean(
    b: Builder, x: Value, over: Sequence[int] | None = None, keepdim: bool = False, dtype: DType | None = None
) -> Value:
    """The sum divided by the number of elements (0/0 = NaN for none)."""
    return narrow(b, wide_mean(b, x, over, keepdim), dtype or x.dtype)


def wide_mean(b: Builder, x: Value, over: Sequence[int] | None, keepdim: bool) -> Value:
    """The mean in its accumulation type."""
    n = count(x, wrap_all(over, len(x.shape)))
    total = accumulated(b, x, over, keepdim)
    return pointwise(b, "mean", lambda s: reduction.scaled(s, n), total)


def amax(b: Builder, x: Value, over: Sequence[int] | None = None, keepdim: bool = False) -> Value:
    """The maximum over dims `over`; NaN wins."""
    return _extremum(b, "max", x, over, keepdim)


def amin(b: Builder, x: Value, over: Sequence[int] | None = None, keepdim: bool = False) -> Value:
    """The minimum over dims `over`; NaN wins."""
    return _extremum(b, "min", x, over, keepdim)


def _extremum(b: Builder, name: str, x: Value, over: Sequence[int] | None, keepdim: bool) -> Value:
    dims_ = wrap_all(over, len(x.shape))
    if x.dtype is bool_:
        reducer = reduction.any_() if name == "max" else reduction.all_()
    else:
        reducer = reduction.maximum(x.dtype) if name == "max" else reduction.minimum(x.dtype)
    (out,) = reduced(b, name, x, dims_, keepdim, reducer, lambda e, _: (e,))
    return out


def with_index(b: Builder, name: str, x: Value, over: int | None, keepdim: bool) -> tuple[Value, Value]:
    """(extremum, index of its first occurrence) along dim `over`; None: over all, the index counted row-major.
    `name` is "argmax" or "argmin"; NaN wins; halves stay halves (order is exact)."""
    rank = len(x.shape)
    dims_ = wrap_all(None if over is None else [over], rank)
    reducer = reduction.argmax(x.dtype) if name == "argmax" else reduction.argmin(x.dtype)
    strides = dims.dense_strides(x.shape)

    def body(e: Expr, index: list[Expr]) -> tuple[Expr, ...]:
        place = dims.ZERO
        if over is None:
            place = dims.add(place, *[dims.mul(i, s) for i, s in zip(index, strides, strict=True)])
        elif rank:
            place = index[dims_[0]]
        return e, place

    value, index = reduced(b, name, x, dims_, keepdim, reducer, body)
    return value, index


def argmax(b: Builder, x: Value, over: int | None = None, keepdim: bool = False) -> Value:
    """Index of the first maximum along `over` (None: of the flattened tensor)."""
    return with_index(b, "argmax", x, over, keepdim)[1]


def argmin(b: Builder, x: Value, over: int | None = None, keepdim: bool = False) -> Value:
    """Index of the first minimum along `over` (None: of the flattened tensor)."""
    return with_index(b, "argmin", x, over, keepdim)[1]


def any_(b: Builder, x: Value, over: Sequence[int] | None = None, keepdim: bool = False) -> Value:
    """Whether some element is not zero."""
    dims_ = wrap_all(over, len(x.shape))
    (out,) = reduced(b, "any", x, dims_, keepdim, reduction.any_(), lambda e, _: (is_true(e),))
    return out


def all_(b: Builder, x: Value, over: Sequence[int] | None = None, keepdim: bool = False) -> Value:
    """Whether no element is zero."""
    dims_ = wrap_all(over, len(x.shape))
    (out,) = reduced(b, "all", x, dims_, keepdim, reduction.all_(), lambda e, _: (is_true(e),))
    return out


def centred(b: Builder, x: Value, over: Sequence[int]) -> tuple[Value, Value]:
    """(mean, sum of squared deviations from it) over dims `over` with the dims kept, in the accumulation type.
    Two passes: E[x^2] - E[x]^2 would lose all digits when the mean is large."""
    m = wide_mean(b, x, over, True)
    squares = pointwise(b, "deviation", lambda e, c: _square(call("sub", wide(e), c)), x, m)
    return m, accumulated(b, squares, over, True)


def _square(e: Expr) -> Expr:
    return call("mul", e, e)


def drop(b: Builder, x: Value, over: Sequence[int]) -> Value:
    """`x` without its size-1 dims `over`."""
    return squeeze(b, x, over)


def var_mean(
    b: Builder, x: Value, over: Sequence[int] | None = None, correction: float = 1, keepdim: bool = False
) -> tuple[Value, Value]:
    """(variance with n - correction in the denominator, mean), in x's type."""
    dims_ = wrap_all(over, len(x.shape))
    m, squares = centred(b, x, dims_)
    n = count(x, dims_)

    def compute(s: Expr) -> Expr:
        left = call("sub", cast(n, s.dtype), number(correction, s))
        return narrow_expr(call("div", s, call("maximum", left, number(0, s))), x.dtype)

    variance, average = pointwise(b, "var", compute, squares), narrow(b, m, x.dtype)
    if keepdim:
        return variance, average
    return drop(b, variance, dims_), drop(b, average, dims_)


def var(
    b: Builder, x: Value, over: Sequence[int] | None = None, correction: float = 1, keepdim: bool = False
) -> Value:
    """The variance, as in `var_mean`."""
    return var_mean(b, x, over, correction, keepdim)[0]


def logsumexp(b: Builder, x: Value, over: Sequence[int], keepdim: bool = False) -> Value:
    """log(sum(exp(x))), shifted by the maximum where that is finite."""
    dims_ = wrap_all(over, len(x.shape))
    wide_type = x.dtype.compute
    top = amax(b, x, dims_, True)

    def shift(m: Expr) -> Expr:
        e = wide(m)
        return where(call("eq", call("abs", e), const(math.inf, wide_type)), const(0, wide_type), e)

    base = pointwise(b, "shift", shift, top)
    powers = pointwise(b, "exp", lambda e, m: call("exp", call("sub", wide(e), m)), x, base)
    total = accumulated(b, powers, dims_, True)
    out = pointwise(
        b, "logsumexp", lambda s, m: narrow_expr(call("add", call("log", s), m), x.dtype), total, base
    )
    return out if keepdim else drop(b, out, dims_)


def count_nonzero(b: Builder, x: Value, over: Sequence[int] | None = None) -> Value:
    """Number of elements that are not zero, as i64."""
    return sum_(b, to(b, pointwise(b, "is_true", is_true, x), bool_), over)


Step = Callable[[Expr], Expr]


def _norm_steps(order: float, acc: DType) -> tuple[Reduction, Step, Step]:
    """How |x| is folded for the norm of an order: the reduction, what is done before it and after it."""
    if math.isinf(order):
        return (reduction.maximum if order > 0 else reduction.minimum)(acc), _same, _same
    total = reduction.sum_(acc)
    if order == 0:
        return total, lambda e: cast(is_true(e), e.dtype), _same
    if order == 1:
        return total, _same, _same
    if order == 2:
        return total, _square, lambda e: call("sqrt", e)
    return total, lambda e: call("pow", e, number(order, e)), lambda e: call("pow", e, number(1 / order, e))


def _same(e: Expr) -> Expr:
    return e


def vector_norm(
    b: Builder, x: Value, order: float, over: Sequence[int] | None, keepdim: bool, dtype: DType
) -> Value:
    """(sum |x|^order)^(1/order) over dims `over`, as `dtype`, with the limits for inf, -inf and 0. Of one element it is
    the absolute value, whose powers may be no numbers of the type."""
    acc = dtype.compute
    dims_ = wrap_all(over, len(x.shape))
    if order != 0 and all(x.shape[d] is dims.ONE for d in dims_):
        alone = pointwise(b, "norm", lambda e: narrow_expr(call("abs", cast(e, acc)), dtype), x)
        return alone if keepdim else drop(b, alone, dims_)
    reducer, term, root = _norm_steps(order, acc)
    (total,) = reduced(b, "norm", x, dims_, keepdim, reducer, lambda e, _: (term(call("abs", cast(e, acc))),))
    return narrow(b, pointwise(b, "root", root, total), dtype)


def distances(b: Builder, x: Value, y: Value, order: float) -> Value:
    """The `order`-norm of x[.., i, :] - y[.., j, :] for all i and j; leading dims broadcast."""
    axes = output_axes((*broadcast(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-2]))
    r = Axis("r0", x.shape[-1])
    i = [position(a) for a in axes]
    left = read(0, [*shared(x, i[:-2]), i[-2], position(r)], x.dtype)
    right = read(1, [*shared(y, i[:-2]), i[-1], position(r)], y.dtype)
    gap = call("abs", call("sub", wide(left), wide(right)))
    reducer, term, root = _norm_steps(order, gap.dtype)
    (total,) = b.emit("distance", (x, y), TensorExpr(axes, (term(gap),), (r,), reducer))
    return narrow(b, pointwise(b, "root", root, total), x.dtype)
