"""Indices taken from data: an access map that contains a read. Bounds are checked where the read is performed."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir import reduction
from tilewright.ir.builder import Builder, broadcast, element
from tilewright.ir.dtype import DType, i64
from tilewright.ir.expr import Axis, Expr, call, cast, checked, read, where
from tilewright.ir.graph import Value
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes

from .common import Scalar, position, wrap
from .pointwise import narrow
from .view import replicated, reshape_index


def _wrapped(place: Expr, size: Expr) -> Expr:
    """A place counted from the end if it is negative."""
    return where(call("lt", place, dims.ZERO), dims.add(place, size), place)


def embedding(b: Builder, table: Value, index: Value) -> Value:
    """Rows of `table` [rows, ..] at every element of `index`."""
    axes = output_axes((*index.shape, *table.shape[1:]))
    i = [position(a) for a in axes]
    rank = len(index.shape)
    row = cast(read(1, i[:rank], index.dtype), i64)
    (out,) = b.emit("embedding", (table, index), TensorExpr(axes, (read(0, [row, *i[rank:]], table.dtype),)))
    return out


def index_select(b: Builder, x: Value, dim: int, index: Value) -> Value:
    """x with dim `dim` replaced by its elements at the places of the vector `index`."""
    if not x.shape:
        (out,) = b.emit("index_select", (x,), TensorExpr((), (read(0, (), x.dtype),)))
        return out
    at = wrap(dim, len(x.shape))
    count = index.shape[0] if index.shape else dims.ONE
    axes = output_axes((*x.shape[:at], count, *x.shape[at + 1 :]))
    i = [position(a) for a in axes]
    place = cast(read(1, [i[at]] if index.shape else [], index.dtype), i64)
    body = read(0, [*i[:at], place, *i[at + 1 :]], x.dtype)
    (out,) = b.emit("index_select", (x, index), TensorExpr(axes, (body,)))
    return out


def gather(b: Builder, x: Value, dim: int, index: Value) -> Value:
    """out[i] = x[i with dim `dim` replaced by index[i]]; a scalar counts as one element."""
    axes = output_axes(index.shape)
    i = [position(a) for a in axes]
    place = cast(read(1, i, index.dtype), i64)
    if not x.shape:
        body = read(0, (), x.dtype)
    elif len(index.shape) != len(x.shape):
        body = read(0, [place], x.dtype)
    else:
        at = wrap(dim, len(x.shape))
        body = read(0, [*i[:at], place, *i[at + 1 :]], x.dtype)
    (out,) = b.emit("gather", (x, index), TensorExpr(axes, (body,)))
    return out


def scatter_one(
    b: Builder, x: Value, dim: int, index: Value, source: Value | Scalar, add: bool = False
) -> Value:
    """x with one element of each line along `dim` replaced by `source` (or the sum of both, with `add`): the one at the
    place that `index`, of size 1 along `dim`, holds for the line. A tensor is read at the places of `index`."""
    axes = output_axes(x.shape)
    i, at = [position(a) for a in axes], wrap(dim, len(x.shape))
    line = [*i[:at], dims.ZERO, *i[at + 1 :]]
    place = cast(read(1, line, index.dtype), i64)
    place = checked(place, call("and", call("ge", place, dims.ZERO), call("lt", place, x.shape[at])))
    old = read(0, i, x.dtype)
    new = read(2, line, x.dtype) if isinstance(source, Value) else source
    body = where(call("eq", i[at], place), call("add", old, new) if add else new, old)
    inputs = (x, index, source) if isinstance(source, Value) else (x, index)
    (out,) = b.emit("scatter", inputs, TensorExpr(axes, (body,)))
    return out


def take(b: Builder, x: Value, index: Value) -> Value:
    """Elements of the flattened x at the places `index`, negative ones counted from the end."""
    axes = output_axes(index.shape)
    place = cast(read(1, [position(a) for a in axes], index.dtype), i64)
    flat = _wrapped(place, dims.prod(x.shape))
    body = read(0, reshape_index(x.shape, (dims.prod(x.shape),), (flat,)), x.dtype)
    (out,) = b.emit("take", (x, index), TensorExpr(axes, (body,)))
    return out


def _layout(indices: Sequence[Value | None]) -> tuple[list[int], bool]:
    """Indexed dims, and whether they stand side by side (else the indexed part of the result comes first)."""
    taken = [d for d, index in enumerate(indices) if index is not None]
    return taken, taken[-1] - taken[0] == len(taken) - 1


def index(
    b: Builder,
    x: Value,
    indices: Sequence[Value | None],
    checked: Value | None = None,
    fill: Scalar | None = None,
) -> Value:
    """x[indices] as numpy does: integer tensors broadcast together, None keeps a dim, negative places count from the
    end. With the mask `checked` (of the broadcast shape's rank) elements outside it are `fill`, and places are moved
    inside x."""
    taken, together = _layout(indices)
    given = [v for v in indices if v is not None]
    common = broadcast(*[v.shape for v in given])
    kept = [d for d in range(len(x.shape)) if d not in taken]
    front = [d for d in kept if together and d < taken[0]]
    back = [d for d in kept if d not in front]
    shape = (*[x.shape[d] for d in front], *common, *[x.shape[d] for d in back])
    axes = output_axes(shape)
    i = [position(a) for a in axes]
    middle = axes[len(front) : len(front) + len(common)]
    place: dict[int, Expr] = {}
    for k, d in enumerate(taken):
        raw = cast(element(k + 1, given[k], middle), i64)
        place[d] = replicated(raw, x.shape[d]) if checked is not None else _wrapped(raw, x.shape[d])
    place |= {d: i[k] for k, d in enumerate(front)}
    place |= {d: i[len(front) + len(common) + k] for k, d in enumerate(back)}
    body = read(0, [place[d] for d in range(len(x.shape))], x.dtype)
    inputs = [x, *given]
    if checked is not None and fill is not None:
        body = where(element(len(inputs), checked, axes), body, fill)
        inputs.append(checked)
    (out,) = b.emit("index", inputs, TensorExpr(axes, (body,)))
    return out


def bucketize(b: Builder, x: Value | Scalar, edges: Value, right: bool, dtype: DType) -> Value:
    """The number of sorted `edges` below x (not above it if `right`), as `dtype`."""
    shape = x.shape if isinstance(x, Value) else ()
    axes, r = output_axes(shape), Axis("r0", edges.shape[0])
    inputs = [edges, x] if isinstance(x, Value) else [edges]
    value = read(1, [position(a) for a in axes], x.dtype) if isinstance(x, Value) else x
    below = call("not", call("gt" if right else "ge", read(0, [position(r)], edges.dtype), value))
    expr = TensorExpr(axes, (cast(below, i64),), (r,), reduction.sum_(i64))
    (count,) = b.emit("bucketize", inputs, expr)
    return narrow(b, count, dtype)
