"""Running reductions along one dim."""

from __future__ import annotations

from tilewright.ir import reduction
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import DType, i64
from tilewright.ir.expr import call, cast, const, read, slot, where
from tilewright.ir.graph import Value
from tilewright.ir.reduction import Reduction
from tilewright.ir.tensor import TensorExpr, output_axes

from .common import accumulator, pointwise, position, wrap
from .pointwise import narrow


def _scan(b: Builder, name: str, x: Value, dim: int, reducer: Reduction, acc: DType) -> Value:
    if not x.shape:
        return pointwise(b, name, lambda e: reducer.finished(reducer.lifted((cast(e, acc),)))[0], x)
    axes = output_axes(x.shape)
    body = cast(read(0, [position(a) for a in axes], x.dtype), acc)
    (out,) = b.emit(name, (x,), TensorExpr(axes, (body,), reduction=reducer, scan=axes[wrap(dim, len(axes))]))
    return out


def cumsum(b: Builder, x: Value, dim: int, dtype: DType) -> Value:
    """The running sum along `dim`, as `dtype`."""
    acc = accumulator(dtype)
    return narrow(b, _scan(b, "cumsum", x, dim, reduction.sum_(acc), acc), dtype)


def cumprod(b: Builder, x: Value, dim: int, dtype: DType) -> Value:
    """The running product along `dim`, as `dtype`."""
    acc = accumulator(dtype)
    return narrow(b, _scan(b, "cumprod", x, dim, reduction.product(acc), acc), dtype)


def logcumsumexp(b: Builder, x: Value, dim: int) -> Value:
    """The running log(sum(exp(x))) along `dim`."""
    acc = x.dtype.compute
    return narrow(b, _scan(b, "logcumsumexp", x, dim, reduction.logsumexp(acc), acc), x.dtype)


def latest(dtype: DType, better: str) -> Reduction:
    """State (value, index): the last of equals wins, the last NaN wins over all. Index -1 = no element yet."""
    av, bv, ai, bi = slot("a", 0, dtype), slot("b", 0, dtype), slot("a", 1, i64), slot("b", 1, i64)
    wins = call(better, bv, av)
    if dtype.is_float:
        wins = call("or", call("isnan", bv), call("and", wins, call("not", call("isnan", av))))
    none = const(0, i64)
    take = call("and", call("ge", bi, none), call("or", call("lt", ai, none), wins))
    worst = reduction.lowest(dtype) if better == "ge" else reduction.highest(dtype)
    state = (dtype, i64)
    return Reduction(
        "latest", state, state, (const(worst, dtype), const(-1, i64)), (slot("e", 0, dtype), slot("e", 1, i64)),
        (where(take, bv, av), where(take, bi, ai)), (av, ai),
    )  # fmt: skip


def extremum(b: Builder, x: Value, dim: int, smallest: bool) -> tuple[Value, Value]:
    """(running maximum or minimum along `dim`, index of its last occurrence so far)."""
    name, reducer = ("cummin", latest(x.dtype, "le")) if smallest else ("cummax", latest(x.dtype, "ge"))
    if not x.shape:
        return pointwise(b, name, lambda e: e, x), pointwise(b, name, lambda _: const(0, i64), x)
    axes = output_axes(x.shape)
    index = [position(a) for a in axes]
    along = wrap(dim, len(axes))
    body = (read(0, index, x.dtype), index[along])
    values, places = b.emit(name, (x,), TensorExpr(axes, body, reduction=reducer, scan=axes[along]))
    return values, places
