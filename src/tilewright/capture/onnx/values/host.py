"""The meaning of operators over host values: shape arithmetic on python and symbolic integers."""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)

from tilewright.capture.onnx.registry import host_op
from tilewright.tuning.input_limits import MODEL_FILES

from .ratio import Ratio
from .run import Host, Number, host, is_symbolic, plain, scalar, surely, to_int, torch_dtype


def _strides(shape: Sequence[int]) -> list[int]:
    result = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        result[i] = result[i + 1] * shape[i + 1]
    return result


def _indices(shape: Sequence[int]) -> itertools.product[tuple[int, ...]]:
    return itertools.product(*[range(n) for n in shape])


def _pick(x: Host, shape: Sequence[int], source: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Host:
    """A host value of `shape` whose element at i is x's at source(i)."""
    strides = _strides(x.shape)
    values = tuple(
        x.values[sum(a * s for a, s in zip(source(i), strides, strict=True))] for i in _indices(shape)
    )
    return Host(values, tuple(shape), x.dtype)


def _broadcast(xs: Sequence[Host]) -> tuple[list[Host], tuple[int, ...]]:
    shape = torch.broadcast_shapes(*[x.shape for x in xs])
    if all(x.shape == shape for x in xs):
        return list(xs), tuple(shape)

    def spread(x: Host) -> Host:
        lead = len(shape) - x.rank
        return _pick(
            x, shape, lambda i: tuple(0 if n == 1 else a for a, n in zip(i[lead:], x.shape, strict=True))
        )

    return [spread(x) for x in xs], tuple(shape)


_SINGLE_OR_DOUBLE = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
"""These round as the types do, without a tensor."""


def _round(value: Number, dtype: torch.dtype) -> Number:
    """A number as a dtype keeps it; symbolic numbers only change between integer and float."""
    if dtype == torch.bool:
        return bool(value)
    if dtype.is_floating_point:
        if isinstance(value, torch.SymInt):
            return Ratio(value, 1)  # type: ignore[return-value]
        if is_symbolic(value):
            return value
        if dtype in _SINGLE_OR_DOUBLE:
            return _SINGLE_OR_DOUBLE[dtype](float(value)).value
        with _disable_current_modes():  # a tensor that is traced would become nodes of the graph
            return torch.tensor(value, dtype=torch.float64).to(dtype).item()
    return _wrapped(to_int(value), dtype)


def _wrapped(value: int, dtype: torch.dtype) -> int:
    """An integer as its type keeps it: modulo 2^bits. Raises OverflowError for a symbolic one that does not fit at the
    sizes at hand: as tensors, it wraps."""
    limits = torch.iinfo(dtype)
    if isinstance(value, torch.SymInt):
        if value.node.has_hint() and not limits.min <= value.node.hint <= limits.max:
            raise OverflowError(f"a size that is no {dtype}")
        return value
    return (
        value if limits.min <= value <= limits.max else (value - limits.min) % (1 << limits.bits) + limits.min
    )


def _divide(a: Number, b: Number) -> Number:
    if isinstance(a, (float, torch.SymFloat, Ratio)) or isinstance(b, (float, torch.SymFloat, Ratio)):
        return a / b
    if surely(a >= 0) and surely(b > 0):
        return a // b
    if surely(a <= 0) and surely(b > 0):
        return -((-a) // b)
    return to_int(math.copysign(1, a * b) * (abs(a) // abs(b)))  # type: ignore[arg-type]


def _mod(a: Number, b: Number) -> Number:
    return a % b


def _power(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int) and b >= 0:
        return pow(a, b, 1 << 64)  # the integer types keep no more
    return a**b


def _binary(
    function: Callable[[Number, Number], Number], boolean: bool = False
) -> Callable[..., Host | None]:
    def run(a: Host, b: Host, **attributes: object) -> Host | None:
        if attributes.get("fmod"):
            return None
        (x, y), shape = _broadcast([a, b])
        dtype = torch.bool if boolean else a.dtype
        try:
            values = tuple(_round(function(p, q), dtype) for p, q in zip(x.values, y.values, strict=True))
        except OverflowError:
            return None
        return Host(values, shape, dtype)

    return run


for _name, _function in {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": _divide,
    "Mod": _mod,
    "Pow": _power,
}.items():
    host_op(_name)(_binary(_function))

for _name, _function in {
    "Equal": operator.eq,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "And": lambda a, b: bool(a) and bool(b),
    "Or": lambda a, b: bool(a) or bool(b),
    "Xor": lambda a, b: bool(a) != bool(b),
}.items():
    host_op(_name)(_binary(_function, True))


def _fold(function: Callable[[Number, Number], Number]) -> Callable[..., Host]:
    def run(*xs: Host) -> Host:
        spread, shape = _broadcast(xs)
        result = list(spread[0].values)
        for x in spread[1:]:
            result = [_round(function(p, q), xs[0].dtype) for p, q in zip(result, x.values, strict=True)]
        return Host(tuple(result), shape, xs[0].dtype)

    return run


host_op("Max")(_fold(lambda a, b: torch.sym_max(plain(a), plain(b))))
host_op("Min")(_fold(lambda a, b: torch.sym_min(plain(a), plain(b))))
host_op("Sum")(_fold(operator.add))


def _unary(function: Callable[[Number], Number]) -> Callable[[Host], Host]:
    def run(x: Host) -> Host:
        return Host(tuple(_round(function(v), x.dtype) for v in x.values), x.shape, x.dtype)

    return run


def _floor(value: Number) -> Number:
    return value.floor() if isinstance(value, Ratio) else math.floor(value)  # type: ignore[arg-type]


def _ceil(value: Number) -> Number:
    return value.ceil() if isinstance(value, Ratio) else math.ceil(value)  # type: ignore[arg-type]


host_op("Neg")(_unary(operator.neg))
host_op("Abs")(_unary(lambda v: v if surely(v >= 0) else abs(v)))
host_op("Floor")(_unary(_floor))
host_op("Ceil")(_unary(_ceil))
host_op("Sqrt")(_unary(lambda v: torch.sym_sqrt(plain(v)) if is_symbolic(v) else math.sqrt(v)))  # type: ignore[arg-type]
host_op("Not")(_unary(lambda v: not v))
host_op("Identity")(lambda x: x)


@host_op("Cast")
def cast(x: Host, *, to: int, **rest: object) -> Host | None:
    """Another element type."""
    del rest
    dtype = torch_dtype(to)
    if dtype.itemsize < 4 and dtype != torch.bool:
        return None
    return Host(tuple(_round(v, dtype) for v in x.values), x.shape, dtype)


@host_op("Where")
def where(condition: Host, a: Host, b: Host) -> Host:
    """Choose element by element."""
    (c, x, y), shape = _broadcast([condition, a, b])
    values = tuple(p if q else r for q, p, r in zip(c.values, x.values, y.values, strict=True))
    return Host(values, shape, a.dtype)


@host_op("Shape")
def shape(x: Host, *, start: int = 0, end: int | None = None, **rest: object) -> Host:
    """The static shape of a host value."""
    del rest
    return host(x.shape[slice(start, end)])


@host_op("Size")
def size(x: Host) -> Host:
    """Number of elements."""
    return scalar(len(x.values))


@host_op("Concat")
def concat(*xs: Host, axis: int) -> Host | None:
    """Join along an axis."""
    if xs[0].rank == 1:
        values = tuple(itertools.chain.from_iterable(x.values for x in xs))
        return (
            None if len(values) > MODEL_FILES.max_host_elements else Host(values, (len(values),), xs[0].dtype)
        )
    axis = axis % xs[0].rank
    outer = math.prod(xs[0].shape[:axis])
    parts: list[Number] = []
    for o in range(outer):
        for x in xs:
            block = math.prod(x.shape[axis:])
            parts += x.values[o * block : (o + 1) * block]
    joined = list(xs[0].shape)
    joined[axis] = sum(x.shape[axis] for x in xs)
    return Host(tuple(parts), tuple(joined), xs[0].dtype)


@host_op("Gather")
def gather(x: Host, index: Host, *, axis: int = 0) -> Host | None:
    """Pick along an axis."""
    if any(is_symbolic(i) for i in index.values):
        return None
    axis = axis % x.rank
    n = x.shape[axis]
    out = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    steps = _strides(index.shape)

    def source(i: tuple[int, ...]) -> tuple[int, ...]:
        inner = i[axis : axis + index.rank]
        at = index.ints()[sum(a * s for a, s in zip(inner, steps, strict=True))]
        if not -n <= at < n:
            raise IndexError(f"index {at} is out of range for {n} elements")
        return (*i[:axis], at % n, *i[axis + index.rank :])

    return _pick(x, out, source)


@host_op("Slice")
def slice_box(
    x: Host,
    starts: Host | None = None,
    ends: Host | None = None,
    axes: Host | None = None,
    steps: Host | None = None,
    **old: Sequence[int],
) -> Host | None:
    """Cut a box with steps."""
    if starts is None or ends is None:
        starts, ends = host(old["starts"]), host(old["ends"])
        axes = host(old["axes"]) if old.get("axes") else None
    given = (*starts.values, *ends.values, *(steps.values if steps else ()), *(axes.values if axes else ()))
    if any(is_symbolic(v) for v in given):
        return None
    ranges = [range(n) for n in x.shape]
    places = list(range(len(starts.values))) if axes is None else axes.ints()
    strides = [1] * len(places) if steps is None else steps.ints()
    for start, end, axis, step in zip(starts.ints(), ends.ints(), places, strides, strict=True):
        ranges[axis] = range(x.shape[axis])[max(start, -x.shape[axis]) : end : step]
    return _pick(x, [len(r) for r in ranges], lambda i: tuple(r[a] for r, a in zip(ranges, i, strict=True)))


@host_op("Squeeze")
def squeeze(x: Host, axes: Host | Sequence[int] | None = None) -> Host:
    """Drop dims of size 1."""
    listed = axes.ints() if isinstance(axes, Host) else axes
    chosen = {i for i, n in enumerate(x.shape) if n == 1} if listed is None else {a % x.rank for a in listed}
    return Host(x.values, tuple(n for i, n in enumerate(x.shape) if i not in chosen), x.dtype)


@host_op("Unsqueeze")
def unsqueeze(x: Host, axes: Host | Sequence[int]) -> Host:
    """Insert dims of size 1."""
    listed = axes.ints() if isinstance(axes, Host) else list(axes)
    out = list(x.shape)
    rank = x.rank + len(listed)
    for a in sorted(a % rank for a in listed):
        out.insert(a, 1)
    return Host(x.values, tuple(out), x.dtype)


@host_op("Reshape")
def reshape(x: Host, target: Host, *, allowzero: int = 0) -> Host | None:
    """Another static shape."""
    dims = target.ints()
    if any(is_symbolic(d) for d in dims):
        return None
    dims = [x.shape[i] if d == 0 and not allowzero else d for i, d in enumerate(dims)]
    if -1 in dims:
        rest = math.prod(d for d in dims if d != -1)
        dims[dims.index(-1)] = len(x.values) // rest if rest else 0
    return None if math.prod(dims) != len(x.values) else Host(x.values, tuple(dims), x.dtype)


@host_op("Flatten")
def flatten(x: Host, *, axis: int = 1) -> Host:
    """A matrix."""
    axis = axis % x.rank if axis < 0 else axis
    return Host(x.values, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])), x.dtype)


@host_op("Transpose")
def transpose(x: Host, *, perm: Sequence[int] | None = None) -> Host:
    """Permute the dims."""
    order = tuple(perm) if perm is not None else tuple(range(x.rank - 1, -1, -1))
    back = [order.index(d) for d in range(x.rank)]
    return _pick(x, [x.shape[d] for d in order], lambda i: tuple(i[b] for b in back))


@host_op("Expand")
def expand(x: Host, target: Host) -> Host | None:
    """Broadcast to a small static shape."""
    dims = target.ints()
    if (
        any(is_symbolic(d) for d in dims)
        or math.prod(dims) * max(len(x.values), 1) > MODEL_FILES.max_host_elements
    ):
        return None
    mark = Host((0,) * math.prod(dims), tuple(dims), x.dtype)
    return _broadcast([x, mark])[0][0]


@host_op("Tile")
def tile(x: Host, repeats: Host) -> Host | None:
    """Repeat along each axis."""
    counts = repeats.ints()
    if (
        any(is_symbolic(c) for c in counts)
        or math.prod(counts) * len(x.values) > MODEL_FILES.max_host_elements
    ):
        return None
    out = [n * c for n, c in zip(x.shape, counts, strict=True)]
    return _pick(x, out, lambda i: tuple(a % n for a, n in zip(i, x.shape, strict=True)))


@host_op("Range")
def arange(start: Host, limit: Host, delta: Host, **rest: object) -> Host | None:
    """A short static range of integers."""
    del rest
    first, last, step = start.item(), limit.item(), delta.item()
    if not (isinstance(first, int) and isinstance(last, int) and isinstance(step, int)) or step == 0:
        return None
    items = range(first, last, step)
    return None if len(items) > MODEL_FILES.max_host_elements else host(items, start.dtype)


@host_op("ConstantOfShape")
def constant_of_shape(dims: Host, *, value: Host | None = None, **rest: object) -> Host | None:
    """A small static tensor of one value."""
    del rest
    sizes = dims.ints()
    if any(is_symbolic(d) for d in sizes) or math.prod(sizes) > MODEL_FILES.max_host_elements:
        return None
    dtype = torch.float32 if value is None else value.dtype
    fill = 0.0 if value is None else value.item()
    return Host((fill,) * math.prod(sizes), tuple(sizes), dtype)


@host_op("Split")
def split(
    x: Host,
    sizes: Host | None = None,
    *,
    axis: int = 0,
    split: Sequence[int] | None = None,
    num_outputs: int | None = None,
    outputs: int,
) -> tuple[Host, ...] | None:
    """Cut a vector."""
    if x.rank != 1 or (sizes is not None and any(is_symbolic(s) for s in sizes.values)):
        return None
    del axis
    counts = sizes.ints() if sizes is not None else list(split) if split else None
    total = len(x.values)
    if counts is None:
        pieces = num_outputs or outputs
        part = -(-total // pieces)
        counts = [part] * (pieces - 1) + [total - part * (pieces - 1)]
    result: list[Host] = []
    at = 0
    for c in counts:
        result.append(host(x.values[at : at + c], x.dtype))
        at += c
    return tuple(result)


def _reduce(function: Callable[[Sequence[Number]], Number]) -> Callable[..., Host | None]:
    def run(
        x: Host,
        axes: Host | Sequence[int] | None = None,
        *,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Host | None:
        listed = axes.ints() if isinstance(axes, Host) else list(axes) if axes else []
        if x.rank != 1 or not x.values or (not listed and noop_with_empty_axes):
            return None
        return Host((_round(function(x.values), x.dtype),), (1,) if keepdims else (), x.dtype)

    return run


def _product(values: Sequence[Number]) -> Number:
    result: Number = 1
    for v in values:
        result = result * v
    return result


def _running(function: Callable[[Number, Number], Number]) -> Callable[[Sequence[Number]], Number]:
    def run(values: Sequence[Number]) -> Number:
        result = values[0]
        for v in values[1:]:
            result = function(result, v)  # type: ignore[arg-type]
        return result

    return run


host_op("ReduceProd")(_reduce(_product))
host_op("ReduceSum")(_reduce(_running(operator.add)))
host_op("ReduceMax")(_reduce(_running(lambda a, b: torch.sym_max(plain(a), plain(b)))))
host_op("ReduceMin")(_reduce(_running(lambda a, b: torch.sym_min(plain(a), plain(b)))))


@host_op("CumSum")
def cum_sum(x: Host, axis: Host, *, exclusive: int = 0, reverse: int = 0) -> Host | None:
    """Running sum of a vector."""
    del axis
    if x.rank != 1 or exclusive or reverse:
        return None
    return Host(tuple(itertools.accumulate(x.values, operator.add)), x.shape, x.dtype)  # type: ignore[arg-type]


@host_op("ScatterElements", "Scatter", "ScatterND")
def scatter(x: Host, index: Host, updates: Host, *, axis: int = 0, reduction: str = "none") -> Host | None:
    """Replace elements of a vector."""
    del axis
    if x.rank != 1 or reduction != "none" or any(is_symbolic(i) for i in index.values):
        return None
    values = list(x.values)
    for i, u in zip(index.ints(), updates.values, strict=True):
        values[i] = u
    return Host(tuple(values), x.shape, x.dtype)


@host_op("NonZero")
def non_zero(x: Host) -> Host | None:
    """Indices of non-zero elements, [rank, count]."""
    if any(is_symbolic(v) for v in x.values):
        return None
    hits = [i for i, v in zip(_indices(x.shape), x.values, strict=True) if v]
    return Host(tuple(i[d] for d in range(x.rank) for i in hits), (x.rank, len(hits)), torch.int64)
