"""A convolution over few channels as one over a few more that lie side by side, so that operands are copied by runs of
them and not number by number.

    y[n, o, p, q] = sum of x[n, c, s p + i - a, s q + j - b] * w[o, c, i, j]   over c, i, j, with zeros around x
                  = sum of x'[n, s p + i, s q + j, c] * w'[o, i, j, c]         over i, j, c

Three channels become four: x' and w' are zero where c is no channel of theirs, and 0 * 0 adds nothing to any sum. x'
has the border in it, of zeros, so that no load asks where an image ends; each is multiplied as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tilewright.ir.expr import (
    Axis,
    Expr,
    axes_of,
    axis,
    conjuncts,
    const,
    is_const,
    read,
    transform,
    walk,
    where,
)
from tilewright.ir.graph import Layout, Op, Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.ops.common import inside, within
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.tuning.rewrite_limits import PADDED_CHANNELS

from .prepared_product import PreparedProduct
from .split.products import only_sum


@dataclass(frozen=True, slots=True)
class _Operand:
    """Operand number `number` of the sum: its one read, the dim that the channel alone walks, and, for each dim, how
    many places a window begins in front of it, and how many there are then."""

    number: int
    read: Expr
    channel: int
    before: tuple[Expr, ...]
    sizes: tuple[Expr, ...]


def pad_channels(kernel: Kernel, fresh: int) -> PreparedProduct | None:
    """`kernel` with its one sum over padded operands, which are the values number `fresh` and the next; None if it is
    no sum of products over few channels, or makes an operand itself. Counts of channels are meant for halves."""
    op = only_sum(kernel)
    made = {v for other in kernel.ops for v in other.outputs}
    if op is None or set(op.inputs) & made or len(op.inputs) != 2:
        return None
    found = _operands(op)
    if found is None:
        return None
    channel, operands = found
    wide = Axis(f"{channel.name}w", dims.integer(_padded(channel)))
    pads = [_pad(op, x, wide, fresh + k) for k, x in enumerate(operands)]
    product = _over_pads(op, channel, wide, operands, [pad.output for pad in pads])
    changed = tuple(product if other is op else other for other in kernel.ops)
    layouts = {pad.output: Layout(dims.dense_strides(pad.output.shape)) for pad in pads}
    return PreparedProduct(tuple(pads), Kernel(changed, kernel.outputs, kernel.reason), layouts)


def _padded(channel: Axis) -> int:
    """The least number of channels, of those that are copied together, that holds all."""
    count = dims.static(channel.extent)
    assert count is not None
    return next(n for n in PADDED_CHANNELS.counts if n >= count)


def _operands(op: Op) -> tuple[Axis, Sequence[_Operand]] | None:
    """The axis of channels of a sum of products of two reads, and these."""
    expr = op.expr
    assert expr is not None and expr.reduction is not None
    if expr.reduction.combiner != "add" or expr.scan is not None or len(expr.body) != 1:
        return None
    reads = expr.reads()
    if sorted(x.value for x in reads if isinstance(x.value, int)) != [0, 1] or expr.body[0].op != "mul":
        return None
    for channel in expr.reduce:
        count = dims.static(channel.extent)
        if count is None or count >= max(PADDED_CHANNELS.counts) or count in PADDED_CHANNELS.counts:
            continue
        found = [_operand(op, x, channel) for x in reads]
        both = [x for x in found if x is not None]
        if len(both) == 2 and any(any(e is not dims.ZERO for e in x.before) or _has_windows(x) for x in both):
            return channel, both
    return None


def _has_windows(x: _Operand) -> bool:
    """Whether a place in a window walks a dim together with the window."""
    return any(len(axes_of(i)) > 1 for i in x.read.args)


def _operand(op: Op, x: Expr, channel: Axis) -> _Operand | None:
    """The read of an operand whose one dim the channel walks, if nothing but the ends of its dims decides about it."""
    assert isinstance(x.value, int) and op.expr is not None
    value = op.inputs[x.value]
    walked = [d for d, i in enumerate(x.args) if axis(channel) in axes_of(i)]
    if len(walked) != 1 or x.args[walked[0]] is not axis(channel):
        return None
    before, sizes = list[Expr](), list[Expr]()
    for d, (i, size) in enumerate(zip(x.args, value.shape, strict=True)):
        low, high = dims.bounds(i)
        if low is None or high is None or axes_of(low) or axes_of(high):
            return None
        before.append(dims.ZERO if d == walked[0] else dims.maximum(dims.ZERO, dims.sub(dims.ZERO, low)))
        sizes.append(size if d == walked[0] else dims.add(high, before[-1], dims.ONE))
    chosen = [e for e in walk(op.expr.body[0]) if e.op == "where" and x in walk(e)]
    ends = set(_ends(x, value))
    if not all(set(conjuncts(e.args[0])) <= ends and _is_bordered(e, x) for e in chosen):
        return None
    return _Operand(x.value, x, walked[0], tuple(before), tuple(sizes))


def _is_bordered(e: Expr, x: Expr) -> bool:
    """Whether a choice is between a read, of whatever type, and zero."""
    inner = e.args[1]
    while inner.op == "cast":
        (inner,) = inner.args
    return inner is x and is_const(e.args[2], 0)


def _ends(x: Expr, value: Value) -> Iterator[Expr]:
    """The conditions that a read lies inside."""
    for i, size in zip(x.args, value.shape, strict=True):
        yield from conjuncts(inside(i, size))


def _pad(op: Op, x: _Operand, wide: Axis, fresh: int) -> Op:
    """The op that makes a padded operand: dims in order, channels innermost."""
    value = op.inputs[x.number]
    rest = [d for d in range(len(value.shape)) if d != x.channel]
    axes = {d: Axis(f"i{k}", x.sizes[d]) for k, d in enumerate(rest)}
    axes[x.channel] = Axis(f"i{len(rest)}", wide.extent)
    index = [dims.sub(axis(axes[d]), x.before[d]) for d in range(len(value.shape))]
    condition = within([inside(i, size) for i, size in zip(index, value.shape, strict=True)])
    assert condition is not None, "channels are added"
    body = where(condition, read(0, index, value.dtype), const(0.0, value.dtype))
    made = TensorExpr(tuple(axes[d] for d in (*rest, x.channel)), (body,))
    return Op("pad_channels", (value,), (Value(fresh, made.shape, value.dtype),), expr=made, origin=op.origin)


def _over_pads(
    op: Op, channel: Axis, wide: Axis, operands: Sequence[_Operand], padded: Sequence[Value]
) -> Op:
    """The sum over padded operands, windows outside and channels inside."""
    expr = op.expr
    assert expr is not None
    of = {x.read: x for x in operands}

    def change(e: Expr) -> Expr | None:
        if e.op == "where" and any(x in walk(e) for x in of):
            return transform(e.args[1], change)
        if e not in of:
            return None
        x = of[e]
        rest = [d for d in range(len(e.args)) if d != x.channel]
        index = [dims.add(e.args[d], x.before[d]) for d in rest]
        return read(x.number, (*index, axis(wide)), e.dtype)

    body = tuple(transform(b, change) for b in expr.body)
    reduce = (*(a for a in expr.reduce if a is not channel), wide)
    inputs = {x.number: v for x, v in zip(operands, padded, strict=True)}
    return replace(
        op, inputs=tuple(inputs[k] for k in range(2)), expr=replace(expr, body=body, reduce=reduce)
    )
