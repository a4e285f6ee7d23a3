"""Views: pure access maps. Nothing is computed; a phase that can compose maps makes them vanish."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.builder import Builder, broadcast
from tilewright.ir.expr import Expr, call, checked, read, where
from tilewright.ir.graph import Value
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes
from tilewright.tuning.thresholds import TENSORS

from .common import Scalar, access, inside, position, within, wrap

Sizes = Sequence[Expr]


def permute(b: Builder, x: Value, order: Sequence[int]) -> Value:
    """Dim k of the result is dim order[k] of x."""
    rank = len(x.shape)
    order = [wrap(d, rank) for d in order]
    if not rank:
        return access(b, "permute", x, (), lambda _: ())
    place = [order.index(d) for d in range(rank)]
    return access(b, "permute", x, [x.shape[d] for d in order], lambda i: [i[p] for p in place])


def transpose(b: Builder, x: Value, first: int, second: int) -> Value:
    """Two dims exchanged."""
    order = list(range(len(x.shape)))
    if order:
        first, second = wrap(first, len(order)), wrap(second, len(order))
        order[first], order[second] = order[second], order[first]
    return permute(b, x, order)


def inferred(shape: Sizes, sizes: Sizes) -> tuple[Expr, ...]:
    """`sizes` with a -1 replaced by what keeps the number of elements of `shape`."""
    known = [s for s in sizes if dims.static(s) != -1]
    if len(known) == len(sizes):
        return tuple(sizes)
    rest = dims.floordiv(dims.prod(shape), dims.prod(known))
    return tuple(rest if dims.static(s) == -1 else s for s in sizes)


def reshape(b: Builder, x: Value, sizes: Sizes) -> Value:
    """The elements of x in row-major order under another shape; one size may be -1."""
    shape = inferred(x.shape, sizes)
    return access(b, "reshape", x, shape, lambda i: reshape_index(x.shape, shape, i))


def reshape_index(source: Sizes, shape: Sizes, index: Sequence[Expr]) -> list[Expr]:
    """Where a reshape from `source` to `shape` reads for output `index`. Dims are matched in groups of equal product,
    so that `//` and `%` only appear where a dim really is split or merged."""
    if any(dims.static(s) == 0 for s in (*source, *shape)):
        return [dims.ZERO] * len(source)
    out: list[Expr] = [dims.ZERO] * len(source)
    for taken, given in groups(source, shape):
        flat = _flatten([index[k] for k in given], [shape[k] for k in given])
        if len(taken) == 1:
            out[taken[0]] = flat
            continue
        for k, stride in zip(taken, _strides([source[k] for k in taken]), strict=True):
            part = dims.floordiv(flat, stride)
            out[k] = part if k == taken[0] else dims.mod(part, source[k])
    return out


def groups(source: Sizes, shape: Sizes) -> list[tuple[list[int], list[int]]]:
    """Dims of `source` and `shape` (without those of size 1), matched greedily into groups of equal product."""
    left = [k for k, s in enumerate(source) if s is not dims.ONE]
    right = [k for k, s in enumerate(shape) if s is not dims.ONE]
    out: list[tuple[list[int], list[int]]] = []
    while left and right:
        taken, given = [left.pop(0)], [right.pop(0)]
        p, q = source[taken[0]], shape[given[0]]
        while not dims.equal(p, q):
            grow = _smaller(p, q)
            if grow == "left" and left:
                taken.append(left.pop(0))
                p = dims.mul(p, source[taken[-1]])
            elif grow == "right" and right:
                given.append(right.pop(0))
                q = dims.mul(q, shape[given[-1]])
            else:
                taken, given, left, right = taken + left, given + right, [], []
                break
        out.append((taken, given))
    if (left or right) and out:
        out[-1] = (out[-1][0] + left, out[-1][1] + right)
    return out


def _smaller(p: Expr, q: Expr) -> str:
    """Which of two products to extend: the one proved smaller or dividing the other; "" if neither is."""
    if dims.exact_div(q, p) is not None:
        return "left"
    if dims.exact_div(p, q) is not None:
        return "right"
    if dims.at_least(dims.sub(q, p), 1):
        return "left"
    return "right" if dims.at_least(dims.sub(p, q), 1) else ""


def _strides(sizes: Sizes) -> list[Expr]:
    out, step = [], dims.ONE
    for s in reversed(sizes):
        out.append(step)
        step = dims.mul(step, s)
    return out[::-1]


def _flatten(index: Sequence[Expr], sizes: Sizes) -> Expr:
    return dims.add(*[dims.mul(i, s) for i, s in zip(index, _strides(sizes), strict=True)])


def expand(b: Builder, x: Value, sizes: Sizes) -> Value:
    """x broadcast to `sizes` (-1 keeps a dim); new dims come in front."""
    shift = len(sizes) - len(x.shape)
    shape = [x.shape[k - shift] if dims.static(s) == -1 else s for k, s in enumerate(sizes)]
    return access(b, "expand", x, shape, lambda i: _aligned(x, i, shape))


def _aligned(x: Value, index: Sequence[Expr], shape: Sizes) -> list[Expr]:
    shift = len(shape) - len(x.shape)
    broadcast(x.shape, shape)  # raises where one of them may be stretched that is not known to be 1
    return [
        dims.ZERO if s is dims.ONE and shape[k + shift] is not dims.ONE else index[k + shift]
        for k, s in enumerate(x.shape)
    ]


def unsqueeze(b: Builder, x: Value, dim: int) -> Value:
    """A size-1 dim put in at `dim`."""
    at = wrap(dim, len(x.shape) + 1)
    return access(b, "unsqueeze", x, (*x.shape[:at], dims.ONE, *x.shape[at:]), lambda i: i[:at] + i[at + 1 :])


def squeeze(b: Builder, x: Value, over: Sequence[int]) -> Value:
    """x without those of the dims `over` whose size is 1."""
    rank = len(x.shape)
    gone = {wrap(d, rank) for d in over if rank and x.shape[wrap(d, rank)] is dims.ONE}
    kept = [d for d in range(rank) if d not in gone]

    def index(i: list[Expr]) -> list[Expr]:
        return [dims.ZERO if d in gone else i[kept.index(d)] for d in range(rank)]

    return access(b, "squeeze", x, [x.shape[d] for d in kept], index)


def _clamped(place: Expr, size: Expr) -> Expr:
    """A slice border, counted from the end if negative, inside [0, size]."""
    if not dims.at_least(place, 0) and dims.at_least(dims.mul(place, dims.integer(-1)), 1):
        place = dims.add(place, size)
    return dims.minimum(dims.maximum(place, dims.ZERO), size)


def slice_borders(size: Expr, start: Expr | None, stop: Expr | None, step: int) -> tuple[Expr, Expr]:
    """(first index, number of elements) of a slice along a dim of `size`."""
    first = dims.ZERO if start is None else _clamped(start, size)
    end = size if stop is None else _clamped(stop, size)
    length = dims.maximum(dims.sub(end, first), dims.ZERO)
    return first, dims.ceildiv(length, dims.integer(step))


def slice_(b: Builder, x: Value, dim: int, start: Expr | None, stop: Expr | None, step: int = 1) -> Value:
    """Every `step`-th element from start to stop along `dim` (None: from the first, to the last)."""
    at = wrap(dim, len(x.shape))
    first, length = slice_borders(x.shape[at], start, stop, step)
    shape = [*x.shape[:at], length, *x.shape[at + 1 :]]

    def index(i: list[Expr]) -> list[Expr]:
        return [*i[:at], dims.add(first, dims.mul(i[at], dims.integer(step))), *i[at + 1 :]]

    return access(b, "slice", x, shape, index)


def narrow_dim(b: Builder, x: Value, dim: int, first: Expr, length: Expr) -> Value:
    """`length` elements from `first` along `dim`, both known to lie inside."""
    at = wrap(dim, len(x.shape))
    shape = [*x.shape[:at], length, *x.shape[at + 1 :]]
    return access(b, "slice", x, shape, lambda i: [*i[:at], dims.add(first, i[at]), *i[at + 1 :]])


def select(b: Builder, x: Value, dim: int, place: Expr) -> Value:
    """The sub-tensor at `place` of `dim`, which goes away; a constant negative place counts from the end."""
    at = wrap(dim, len(x.shape))
    spot = _from_end(place, x.shape[at])
    return access(b, "select", x, (*x.shape[:at], *x.shape[at + 1 :]), lambda i: [*i[:at], spot, *i[at:]])


def _from_end(place: Expr, size: Expr) -> Expr:
    if dims.at_least(place, 0):
        return place
    if dims.at_least(dims.mul(place, dims.integer(-1)), 1):
        return dims.add(place, size)
    return where(call("lt", place, dims.ZERO), dims.add(place, size), place)


def split(b: Builder, x: Value, sizes: Sizes, dim: int) -> tuple[Value, ...]:
    """Consecutive pieces of the given sizes along `dim`."""
    first, out = dims.ZERO, []
    for s in sizes:
        out.append(narrow_dim(b, x, dim, first, s))
        first = dims.add(first, s)
    return tuple(out)


def flip(b: Builder, x: Value, over: Sequence[int]) -> Value:
    """The order of elements reversed along dims `over`."""
    rank = len(x.shape)
    turned = {wrap(d, rank) for d in over}

    def index(i: list[Expr]) -> list[Expr]:
        return [dims.sub(dims.sub(x.shape[d], dims.ONE), e) if d in turned else e for d, e in enumerate(i)]

    return access(b, "flip", x, x.shape, index)


def roll(b: Builder, x: Value, shifts: Sequence[Expr], over: Sequence[int]) -> Value:
    """Elements moved by `shifts` along dims `over`, round the end; without dims along the flattened tensor."""
    if not over:
        flat = reshape(b, x, (dims.prod(x.shape),))
        return reshape(b, roll(b, flat, shifts, (0,)), x.shape)
    rank = len(x.shape)

    def index(i: list[Expr]) -> list[Expr]:
        out = list(i)
        for shift, d in zip(shifts, over, strict=True):
            at = wrap(d, rank)
            out[at] = dims.mod(dims.sub(out[at], shift), x.shape[at])
        return out

    return access(b, "roll", x, x.shape, index) if rank else x


def repeat(b: Builder, x: Value, times: Sizes) -> Value:
    """x laid side by side times[k] times along dim k; new dims come in front."""
    shift = len(times) - len(x.shape)
    padded = [dims.ONE] * shift + list(x.shape)
    shape = [dims.mul(s, t) for s, t in zip(padded, times, strict=True)]
    return access(b, "repeat", x, shape, lambda i: [dims.mod(i[k + shift], s) for k, s in enumerate(x.shape)])


def diagonal(b: Builder, x: Value, offset: int, first: int, second: int) -> Value:
    """Elements x[.., k, .., k + offset, ..] of two dims, as a new last dim."""
    rank = len(x.shape)
    shape = diagonal_shape(x.shape, offset, first, second)
    first, second = wrap(first, rank), wrap(second, rank)
    down, right = dims.integer(max(-offset, 0)), dims.integer(max(offset, 0))
    kept = [d for d in range(rank) if d not in (first, second)]

    def index(i: list[Expr]) -> list[Expr]:
        special = {first: dims.add(i[-1], down), second: dims.add(i[-1], right)}
        return [special[d] if d in special else i[kept.index(d)] for d in range(rank)]

    return access(b, "diagonal", x, shape, index)


def diagonal_shape(shape: Sequence[Expr], offset: int, first: int, second: int) -> list[Expr]:
    """The sizes of a diagonal of two dims."""
    first, second = wrap(first, len(shape)), wrap(second, len(shape))
    down, right = dims.integer(max(-offset, 0)), dims.integer(max(offset, 0))
    length = dims.minimum(dims.sub(shape[first], down), dims.sub(shape[second], right))
    return [*[n for d, n in enumerate(shape) if d not in (first, second)], dims.maximum(length, dims.ZERO)]


def unfold(b: Builder, x: Value, dim: int, size: int, step: int) -> Value:
    """Sliding windows of `size` every `step` elements along `dim`, the window as a new last dim."""
    if not x.shape:
        return reshape(b, x, (dims.ONE,))
    at = wrap(dim, len(x.shape))
    length = dims.add(dims.floordiv(dims.sub(x.shape[at], dims.integer(size)), dims.integer(step)), dims.ONE)
    shape = [*x.shape[:at], length, *x.shape[at + 1 :], dims.integer(size)]

    def index(i: list[Expr]) -> list[Expr]:
        return [*i[:at], dims.add(dims.mul(i[at], dims.integer(step)), i[-1]), *i[at + 1 : -1]]

    return access(b, "unfold", x, shape, index)


def concat(b: Builder, pieces: Sequence[Value], dim: int) -> Value:
    """Pieces one after the other along `dim`."""
    at = wrap(dim, len(pieces[0].shape))
    total = dims.add(*[p.shape[at] for p in pieces])
    first = pieces[0].shape
    shape = (*first[:at], total, *first[at + 1 :])
    axes = output_axes(shape)
    index = [position(a) for a in axes]
    ends: list[Expr] = []
    for p in pieces:
        ends.append(dims.add(ends[-1] if ends else dims.ZERO, p.shape[at]))

    def piece(k: int) -> Expr:
        start = ends[k - 1] if k else dims.ZERO
        return read(k, [*index[:at], dims.sub(index[at], start), *index[at + 1 :]], pieces[k].dtype)

    body = _piece_at(index[at], ends, [piece(k) for k in range(len(pieces))])
    (out,) = b.emit("concat", tuple(pieces), TensorExpr(axes, (body,)))
    return out


def _piece_at(place: Expr, ends: Sequence[Expr], pieces: Sequence[Expr]) -> Expr:
    """The element at `place`, of the first piece that ends behind it."""
    if len(pieces) > TENSORS.max_pieces_in_a_row:
        half = len(pieces) // 2
        first, second = (
            _piece_at(place, ends[part], pieces[part]) for part in (slice(half), slice(half, None))
        )
        return where(call("lt", place, ends[half - 1]), first, second)
    body = pieces[-1]
    for end, piece in zip(reversed(ends[:-1]), reversed(pieces[:-1]), strict=True):
        body = where(call("lt", place, end), piece, body)
    return body


def stack(b: Builder, pieces: Sequence[Value], dim: int) -> Value:
    """Tensors of one shape along a new dim."""
    at = wrap(dim, len(pieces[0].shape) + 1)
    shape = (*pieces[0].shape[:at], dims.integer(len(pieces)), *pieces[0].shape[at:])
    axes = output_axes(shape)
    index = [position(a) for a in axes]
    ends = [dims.integer(k + 1) for k in range(len(pieces))]
    parts = [read(k, index[:at] + index[at + 1 :], p.dtype) for k, p in enumerate(pieces)]
    body = _piece_at(index[at], ends, parts)
    (out,) = b.emit("stack", tuple(pieces), TensorExpr(axes, (body,)))
    return out


def pad(b: Builder, x: Value, before: Sizes, after: Sizes, value: Scalar) -> Value:
    """x with `before[k]` and `after[k]` elements of `value` around dim k; negative numbers cut."""
    shape = tuple(dims.add(s, p, q) for s, p, q in zip(x.shape, before, after, strict=True))
    axes = output_axes(shape)
    index = [dims.sub(position(a), p) for a, p in zip(axes, before, strict=True)]
    condition = within([inside(i, s) for i, s in zip(index, x.shape, strict=True)])
    body = read(0, index, x.dtype)
    if condition is not None:
        body = where(condition, body, value)
    (out,) = b.emit("pad", (x,), TensorExpr(axes, (body,)))
    return out


def _absolute(e: Expr) -> Expr:
    return dims.maximum(e, dims.mul(e, dims.integer(-1)))


def reflected(index: Expr, size: Expr) -> Expr:
    """`index` mirrored at 0 and at size - 1."""
    last = dims.sub(size, dims.ONE)
    return dims.sub(last, _absolute(dims.sub(last, _absolute(index))))


def replicated(index: Expr, size: Expr) -> Expr:
    """`index` moved to the nearest of 0 and size - 1."""
    return dims.minimum(dims.maximum(index, dims.ZERO), dims.sub(size, dims.ONE))


def border_pad(b: Builder, mode: str, x: Value, before: Sizes, after: Sizes) -> Value:
    """x extended along its last dims by "reflect", "replicate" or "circular"; before and after as in `pad`."""
    move = {"reflect": reflected, "replicate": replicated, "circular": dims.mod}[mode]
    shape = [dims.add(s, p, q) for s, p, q in zip(x.shape, before, after, strict=True)]

    def index(i: list[Expr]) -> list[Expr]:
        out: list[Expr] = []
        for e, p, q, s in zip(i, before, after, x.shape, strict=True):
            plain = p is dims.ZERO and q is dims.ZERO
            out.append(e if plain else move(dims.sub(e, p), s))
        return out

    return access(b, f"pad_{mode}", x, shape, index)


def slice_scatter(
    b: Builder, x: Value, source: Value, dim: int, start: Expr | None, stop: Expr | None, step: int = 1
) -> Value:
    """x with `source` in place of a slice along `dim`."""
    at = wrap(dim, len(x.shape))
    first, length = slice_borders(x.shape[at], start, stop, step)
    axes = output_axes(x.shape)
    index = [position(a) for a in axes]
    shifted, stride = dims.sub(index[at], first), dims.integer(step)
    place = dims.floordiv(shifted, stride)
    conditions = [
        inside(place, length),
        None if step == 1 else call("eq", dims.mod(shifted, stride), dims.ZERO),
    ]
    condition = within(conditions)
    body = read(1, [*index[:at], place, *index[at + 1 :]], source.dtype)
    if condition is not None:
        body = where(condition, body, read(0, index, x.dtype))
    (out,) = b.emit("slice_scatter", (x, source), TensorExpr(axes, (body,)))
    return out


def select_scatter(b: Builder, x: Value, source: Value, dim: int, place: Expr) -> Value:
    """x with `source` in place of the sub-tensor at `place` of `dim`."""
    at = wrap(dim, len(x.shape))
    axes = output_axes(x.shape)
    index = [position(a) for a in axes]
    place = _from_end(place, x.shape[at])
    inside = call("and", call("ge", place, dims.ZERO), call("lt", place, x.shape[at]))
    here = call("eq", index[at], checked(place, inside))
    body = where(here, read(1, index[:at] + index[at + 1 :], source.dtype), read(0, index, x.dtype))
    (out,) = b.emit("select_scatter", (x, source), TensorExpr(axes, (body,)))
    return out


def diagonal_scatter(b: Builder, x: Value, source: Value, offset: int, first: int, second: int) -> Value:
    """x with `source` on a diagonal of two dims, as `diagonal` reads it."""
    rank = len(x.shape)
    first, second = wrap(first, rank), wrap(second, rank)
    axes = output_axes(x.shape)
    index = [position(a) for a in axes]
    row = dims.sub(index[first], dims.integer(max(-offset, 0)))
    column = dims.sub(index[second], dims.integer(max(offset, 0)))
    rest = [e for d, e in enumerate(index) if d not in (first, second)]
    here = call("and", call("eq", row, column), call("ge", row, dims.ZERO))
    body = where(here, read(1, [*rest, row], source.dtype), read(0, index, x.dtype))
    (out,) = b.emit("diagonal_scatter", (x, source), TensorExpr(axes, (body,)))
    return out


def pixel_shuffle(b: Builder, x: Value, factor: int) -> Value:
    """[.., C r^2, H, W] to [.., C, H r, W r]."""
    r = dims.integer(factor)
    *lead, c, h, w = x.shape
    shape = [*lead, dims.floordiv(c, dims.integer(factor * factor)), dims.mul(h, r), dims.mul(w, r)]

    def index(i: list[Expr]) -> list[Expr]:
        *front, k, y, z = i
        channel = dims.add(
            dims.mul(k, dims.integer(factor * factor)), dims.mul(dims.mod(y, r), r), dims.mod(z, r)
        )
        return [*front, channel, dims.floordiv(y, r), dims.floordiv(z, r)]

    return access(b, "pixel_shuffle", x, shape, index)


def pixel_unshuffle(b: Builder, x: Value, factor: int) -> Value:
    """[.., C, H r, W r] to [.., C r^2, H, W]."""
    r = dims.integer(factor)
    *lead, c, h, w = x.shape
    shape = [*lead, dims.mul(c, dims.integer(factor * factor)), dims.floordiv(h, r), dims.floordiv(w, r)]

    def index(i: list[Expr]) -> list[Expr]:
        *front, k, y, z = i
        row, column = dims.mod(dims.floordiv(k, r), r), dims.mod(k, r)
        channel = dims.floordiv(k, dims.integer(factor * factor))
        return [*front, channel, dims.add(dims.mul(y, r), row), dims.add(dims.mul(z, r), column)]

    return access(b, "pixel_unshuffle", x, shape, index)
