"""What the declarations share: pointwise ops with scalar operands, reductions over some dims, exact numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from tilewright.ir.builder import Builder, broadcast, element
from tilewright.ir.dtype import DType, bool_, i64
from tilewright.ir.expr import Axis, Expr, axis, call, cast, const, read
from tilewright.ir.graph import Value
from tilewright.ir.reduction import Reduction
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes

Number = bool | int | float | Fraction
Scalar = Expr
"""A scalar operand: a constant, or a host scalar over size symbols, of the type in which the op computes."""

Arg = Value | Scalar
"""An operand of a pointwise op."""

Unary = Callable[[Builder, Value], Value]
Binary = Callable[[Builder, Arg, Arg], Value]


def arith(op: str, *args: Expr) -> Expr:
    """Scalar operation `op`; i64 ring arithmetic goes to the normal form of index arithmetic, as the program's."""
    in_ring = op in ("add", "sub", "mul") and args[0].dtype is i64
    return dims.of_program(op, *args) if in_ring else call(op, *args)


def number(value: Number, like: Expr | Value) -> Expr:
    """The constant `value` in the type of `like`."""
    return const(value, like.dtype)


def wide(e: Expr) -> Expr:
    """`e` in the type that a kernel computes its type in: f32 for halves, else unchanged."""
    return cast(e, e.dtype.compute)


def pointwise(b: Builder, name: str, compute: Callable[..., Expr], *args: Arg) -> Value:
    """An elementwise op over tensors (broadcast as torch does) and scalars; `compute` gets one Expr per operand."""
    values = tuple(a for a in args if isinstance(a, Value))
    axes = output_axes(broadcast(*[v.shape for v in values]))
    elements: list[Expr] = []
    position = 0
    for a in args:
        if isinstance(a, Value):
            elements.append(element(position, a, axes))
            position += 1
        else:
            elements.append(a)
    (out,) = b.emit(name, values, TensorExpr(axes, (compute(*elements),)))
    return out


def unary(name: str, compute: Callable[[Expr], Expr]) -> Unary:
    """The declaration of an elementwise op of one tensor."""

    def declare(b: Builder, x: Value) -> Value:
        return pointwise(b, name, compute, x)

    declare.__name__ = name
    return declare


def binary(name: str, compute: Callable[[Expr, Expr], Expr]) -> Binary:
    """The declaration of an elementwise op of two operands, at least one a tensor, of equal type."""

    def declare(b: Builder, x: Arg, y: Arg) -> Value:
        return pointwise(b, name, compute, x, y)

    declare.__name__ = name
    return declare


def access(
    b: Builder, name: str, x: Value, shape: Sequence[Expr], index: Callable[[list[Expr]], Sequence[Expr]]
) -> Value:
    """A view: out[i] = x[index(i)] over an output of `shape`."""
    axes = output_axes(tuple(shape))
    body = read(0, index([position(a) for a in axes]), x.dtype)
    (out,) = b.emit(name, (x,), TensorExpr(axes, (body,)))
    return out


def position(a: Axis) -> Expr:
    """The index expression of axis `a`; an axis of extent 1 only takes the value 0."""
    return dims.ZERO if a.extent is dims.ONE else axis(a)


def shared(v: Value, lead: Sequence[Expr]) -> list[Expr]:
    """Index of the leading dims of a matrix operand that broadcasts to leading places `lead`."""
    rank = len(v.shape) - 2
    return [
        dims.ZERO if s is dims.ONE else i for s, i in zip(v.shape[:-2], lead[len(lead) - rank :], strict=True)
    ]


def wrap(dim: int, rank: int) -> int:
    """`dim` counted from the front; a scalar counts as one dim."""
    rank = max(rank, 1)
    if not -rank <= dim < rank:
        raise ValueError(f"dim {dim} of a tensor of rank {rank}")
    return dim % rank


def wrap_all(over: Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Dims to reduce, counted from the front and sorted; none or empty means all."""
    if rank == 0:
        return ()
    return tuple(sorted({wrap(d, rank) for d in over})) if over else tuple(range(rank))


def reduced(
    b: Builder,
    name: str,
    x: Value,
    over: Sequence[int],
    keepdim: bool,
    reduction: Reduction,
    body: Callable[[Expr, list[Expr]], tuple[Expr, ...]],
    others: Sequence[Value] = (),
) -> tuple[Value, ...]:
    """Reduce dims `over` (from the front) of `x`. `body(element of x, full index)` gives the reduction's elements;
    further operands follow x. Without dims to reduce the result is the finished state of each element on its own."""
    kept: list[Axis] = []
    reduce: list[Axis] = []
    index: list[Expr] = []
    for d, extent in enumerate(x.shape):
        if d in over:
            reduce.append(Axis(f"r{len(reduce)}", extent))
            index.append(position(reduce[-1]))
            if keepdim:
                kept.append(Axis(f"i{len(kept)}", dims.ONE))
        else:
            kept.append(Axis(f"i{len(kept)}", extent))
            index.append(position(kept[-1]))
    elements = body(read(0, index, x.dtype), index)
    inputs = (x, *others)
    if reduce:
        return b.emit(name, inputs, TensorExpr(tuple(kept), elements, tuple(reduce), reduction))
    finished = reduction.finished(reduction.lifted(elements))
    return tuple(b.emit(name, inputs, TensorExpr(tuple(kept), (e,)))[0] for e in finished)


def accumulator(dtype: DType) -> DType:
    """The type in which sums and products of `dtype` accumulate: f32 for halves, i64 for integers and bools."""
    if dtype.is_float:
        return dtype.compute
    return i64


def is_true(e: Expr) -> Expr:
    """Whether `e` is not zero (NaN is true)."""
    return e if e.dtype is bool_ else call("ne", e, const(0, e.dtype))


def inside(index: Expr, size: Expr) -> Expr | None:
    """The condition 0 <= index < size, without the halves that are proved; None if it always holds."""
    low = None if dims.at_least(index, 0) else call("ge", index, dims.ZERO)
    high = None if dims.at_least(dims.sub(size, index), 1) else call("lt", index, size)
    if low is None or high is None:
        return high if low is None else low
    return call("and", low, high)


def within(conditions: Sequence[Expr | None]) -> Expr | None:
    """The conjunction of conditions, None if none is left."""
    total: Expr | None = None
    for c in conditions:
        if c is not None:
            total = c if total is None else call("and", total, c)
    return total
