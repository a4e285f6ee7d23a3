"""Running reductions along one dim."""

from __future__ import annotations

from .. import reduction
from ..dtype import DType
from ..expr import cast, read
from ..graph import Builder, Value
from ..reduction import Reduction
from ..tensor import TensorExpr, output_axes
from .common import accumulator, pointwise, position, wrap
from .pointwise import narrow


def _scan(b: Builder, name: str, x: Value, dim: int, fold: Reduction, acc: DType) -> Value:
    if not x.shape:
        return pointwise(b, name, lambda e: fold.finished(fold.lifted((cast(e, acc),)))[0], x)
    axes = output_axes(x.shape)
    body = cast(read(0, [position(a) for a in axes], x.dtype), acc)
    (out,) = b.emit(name, (x,), TensorExpr(axes, (body,), reduction=fold, scan=axes[wrap(dim, len(axes))]))
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
