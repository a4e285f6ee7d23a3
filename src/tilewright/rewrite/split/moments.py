"""A mean and the squares of the distances from it, of few results over much, in one pass: parts keep both.

    s[i] = sum over r of x(i, r)        d[i] = sum over r of (x(i, r) - s[i] / N)^2
 => s[p, i], d[p, i] the same over the parts p of r, each with a mean of its own
    (N, s, d)[i] = merge of (n[p], s[p, i], d[p, i]) over p           (Chan, Golub, LeVeque 1979)

The second fold would otherwise wait for the first and read everything again. A part has a fixed length, whatever the
sizes are; how many parts there are may depend on them. In real arithmetic the law is an identity; in floats it is more
exact than what it replaces.

A part that lies along memory is held by one block, which takes the mean first. Of columns a thread holds a chunk of
rows, of which it takes the mean first, too, and merges chunk after chunk into what it has; blocks have parts of the
rows, which are merged last. All threads of a block have seen equally many rows, so the divisions are for all of them.
In floats the squares must not see numbers of the size of the mean, so means are counted from the column's first element
(never further from the mean than the root of N d); the mean itself comes from another sum, which does not, where that
is closer (`origins`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.dtype import DType
from tilewright.ir.expr import Axis, Expr, axis, both, call, cast, const, read, slot, substitute, walk, where
from tilewright.ir.graph import Graph, Layout, Op, Value
from tilewright.ir.kernel import Kernel, Price
from tilewright.ir.reduction import Reduction
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.rounding import next_power_of_two
from tilewright.ir.tensor import TensorExpr
from tilewright.rewrite.normal.normalise import drop_dead
from tilewright.tuning.search_limits import CASCADE_PARTS
from tilewright.tuning.thresholds import ROW_CHUNKS, SPLIT_MOMENTS

from .cut import Cut
from .origins import count_from_origin, from_memory, origin
from .policy import fastest, part_counts, seconds_of
from .row_chunks import Rows
from .seen_reads import Inside, as_one, joined_axes

Least = Callable[[Op, tuple[Op, ...]], float]


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """Fold `first` sums `x`, fold `second` the squares of distances from the mean; both over `first`'s axes."""

    first: Op
    second: Op


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """The folds of parts, and what merges them."""

    folds: tuple[Op, ...]
    merge: tuple[Op, ...]
    moved: Value | None = None
    """The sums of the distances from the origins, if there are origins."""

    def kernels(self, pair: _Pair, before: tuple[Op, ...]) -> tuple[Kernel, ...]:
        """One of the folds and the ops `before` them, one of the merge if there is one."""
        wanted = {*pair.first.outputs, *pair.second.outputs, *(v for op in self.merge for v in op.inputs)}
        merge = tuple(op for op in self.merge if op.expr is not None and op.expr.reduction is not None)
        groups = [g for g in ((*before, *self.folds), merge) if g]
        return tuple(Kernel(g, tuple(v for op in g for v in op.outputs if v in wanted)) for g in groups)


def split_moments(
    graph: Graph, price: Price, least: Least, cores: int, hints: SizeHints
) -> tuple[Graph, frozenset[Op]]:
    """The graph with each such pair in parts where that is modelled as faster, and the ops that are parts. `least` is
    the price of a fold behind pointwise ops, split as well as it can be. Rows that keep all `cores` busy stay whole."""
    inside = Inside(graph, hints)
    made: set[Op] = set()
    ops = list(graph.ops)
    for op in graph.ops:
        pair = _pair(inside, op)
        if pair is None or pair.first not in ops:
            continue
        fresh = 1 + max(v.id for o in ops for v in (*o.inputs, *o.outputs))
        tried = _in_parts(pair, inside, fresh, SPLIT_MOMENTS.min_rows_per_core_whole * cores, hints)
        new = _best(pair, tried, inside.before(pair.first), graph.layouts, price, least)
        if new is None:
            continue
        at = ops.index(pair.first)
        ops[at : at + 1] = [*new.folds, *new.merge]
        ops.remove(pair.second)
        first = None if new.moved is None else from_memory(pair.first, inside)
        if first is not None and new.moved is not None:
            ops = count_from_origin(ops, first, new.moved, partial(_divides, first=pair.first))
        made |= set(new.folds)
    return (drop_dead(graph.with_ops(ops)), frozenset(made)) if made else (graph, frozenset())


def _best(
    pair: _Pair,
    tried: Sequence[_Parts],
    before: tuple[Op, ...],
    layouts: Mapping[Value, Layout],
    price: Price,
    least: Least,
) -> _Parts | None:
    """The fastest way of those `tried`, None if two folds are faster; each with the pointwise ops `before` them."""
    ways = [(new, seconds_of(new.kernels(pair, before), layouts, price)) for new in tried]
    best = fastest(ways, math.inf)
    if best is None:
        return None
    after = min(seconds for _, seconds in ways)
    if after >= least(pair.first, before) + least(pair.second, before):
        return None
    together = Kernel((*before, pair.first, pair.second), (*pair.first.outputs, *pair.second.outputs))
    return best if after < seconds_of([together], layouts, price) else None


def _pair(inside: Inside, second: Op) -> _Pair | None:
    """The pair that ends in `second`, whose body is then brought to the axes of the first."""
    if not _is_sum(second):
        return None
    square = inside.until(inside.body(second), "mul")
    if square.op != "mul" or square.args[0] is not square.args[1]:
        return None
    distance = inside.until(square.args[0], "sub")
    if distance.op != "sub":
        return None
    mean = inside.until(distance.args[1], "div", "mul")
    total = inside.until(mean.args[0], "read") if mean.op in ("div", "mul") else mean
    first = inside.producer.get(total.value) if total.op == "read" and isinstance(total.value, int) else None
    if first is None or not _is_sum(first) or first.output.dtype is not second.output.dtype:
        return None
    table = _same_axes(first, second, total)
    if table is None or not _divides(mean, first):
        return None
    moved = substitute(distance.args[0], {axis(a): b for a, b in table.items()})
    return _Pair(first, second) if inside.whole(moved) is inside.whole(inside.body(first)) else None


def _is_sum(op: Op) -> bool:
    """Whether an op is a plain sum of floats, each of which is read once."""
    e = op.expr
    if e is None or e.reduction is None or e.scan is not None or op.kernel >= 0 or len(op.outputs) != 1:
        return False
    dtype = op.output.dtype
    plain = e.reduction.combiner == "add" and e.reduction.lift[0].op == e.reduction.finish[0].op == "slot"
    return plain and dtype.is_float and not dtype.is_half and e.body[0].dtype is dtype


def _same_axes(first: Op, second: Op, total: Expr) -> dict[Axis, Expr] | None:
    """The axes of `second` as those of `first`, whose result it reads as `total`; None if they do not correspond."""
    a, b = first.expr, second.expr
    assert a is not None and b is not None
    if tuple(r.extent for r in a.reduce) != tuple(r.extent for r in b.reduce):
        return None
    table = {s: axis(r) for r, s in zip(a.reduce, b.reduce, strict=True)}
    long = [(x, i) for x, i in zip(a.axes, total.args, strict=True) if x.extent is not dims.ONE]
    kept = [s for s in b.axes if s.extent is not dims.ONE]
    if [i for _, i in long] != [axis(s) for s in kept]:
        return None
    return table | {s: axis(x) for s, (x, _) in zip(kept, long, strict=True)}


def _divides(mean: Expr, first: Op) -> bool:
    """Whether `mean` is something over the number of elements of `first`, or times its inverse."""
    assert first.expr is not None
    size = dims.prod(a.extent for a in first.expr.reduce)
    count = dims.static(size)
    if mean.op not in ("div", "mul"):
        return count == 1
    by = mean.args[1]
    if by.op == "cast":
        return mean.op == "div" and dims.equal(by.args[0], size)
    if by.op != "const" or count is None or not isinstance(by.value, (int, float)):
        return False
    share = float(by.value) / max(1, count) if mean.op == "div" else float(by.value) * count
    return abs(share - 1) < 1e-6


def _in_parts(pair: _Pair, inside: Inside, fresh: int, most: int, hints: SizeHints) -> list[_Parts]:
    """Ways to have both folds over parts, and the merge of these; for rows that lie along memory none if there are
    `most` or if there is one part only."""
    expr = pair.first.expr
    assert expr is not None
    offsets = inside.offsets(pair.first)
    joined = joined_axes(expr.reduce, offsets)
    moved = [substitute(o, joined) for o in offsets]
    reduce = tuple(dict.fromkeys(a for e in joined.values() for a in _axes(e)))
    along = next((a for a in reduce for o in moved if dims.coefficient(o, axis(a)) is dims.ONE), None)
    if along is None:
        near = max(reduce, key=lambda a: hints.estimate(a.extent))
        rows = hints.estimate(near.extent)
        parts = part_counts(CASCADE_PARTS.of_columns, rows, SPLIT_MOMENTS.min_column_part_rows)
        halves = inside.are_halves(pair.first)
        return [_column_parts(pair, joined, near, n, halves, fresh) for n in parts]
    if hints.estimate(dims.prod(expr.shape)) >= most:
        return []
    cuts = _cuts(reduce, along, hints)
    return [_row_parts(pair, joined, cuts, fresh)] if any(c.part for c in cuts) else []


def _row_parts(pair: _Pair, joined: Mapping[Expr, Expr], cuts: Sequence[Cut], fresh: int) -> _Parts:
    assert pair.first.expr is not None
    part, cuts = _numbered(cuts)
    x = _placed(pair.first.expr.body[0], joined, cuts)
    return _ops(pair, (*pair.first.expr.axes, part), part, x, cuts, fresh)


def _numbered(cuts: Sequence[Cut]) -> tuple[Axis, list[Cut]]:
    """One axis for all parts, and the cuts with the numbers of their parts as digits of its index."""
    digits: dict[Expr, Expr] = {}
    part = as_one([c.part for c in cuts if c.part is not None], "p", digits)
    return part, [replace(c, number=digits[axis(c.part)]) if c.part is not None else c for c in cuts]


def _placed(x: Expr, joined: Mapping[Expr, Expr], cuts: Sequence[Cut]) -> Expr:
    """An element of the whole as one of its part."""
    return substitute(substitute(x, joined), {axis(c.whole): c.place for c in cuts})


def _axes(e: Expr) -> list[Axis]:
    return [x.value for x in walk(e) if isinstance(x.value, Axis)]


def _cuts(reduce: Sequence[Axis], along: Axis, hints: SizeHints) -> list[Cut]:
    """How each axis is cut: the one that lies along memory first, then the others into what room is left, the innermost
    first."""
    room, order = SPLIT_MOMENTS.max_row_part_elements, [along, *(a for a in reversed(reduce) if a != along)]
    found: dict[Axis, Cut] = {}
    for a in order:
        length = _length(a, room, hints)
        found[a] = _cut(a, length, len(found))
        room = max(1, room // next_power_of_two(length))
    return [found[a] for a in reduce]


def _length(a: Axis, room: int, hints: SizeHints) -> int:
    """Elements of a part of `a`: as many as there is room for, of equal parts if the extent is known."""
    extent = dims.static(a.extent)
    if extent is None:
        return min(room, next_power_of_two(max(1, hints.estimate(a.extent))))
    if next_power_of_two(extent) <= room:
        return max(1, extent)
    count = -(-extent // room)
    even = SPLIT_MOMENTS.part_multiple if room > SPLIT_MOMENTS.part_multiple else 1
    return min(room, -(-extent // (count * even)) * even)


def _cut(a: Axis, length: int, number: int) -> Cut:
    one = (dims.static(a.extent) or length + 1) <= length
    part = None if one else Axis(f"p{number}", dims.ceildiv(a.extent, dims.integer(length)))
    element = Axis(f"q{number}", dims.integer(length)) if length > 1 else None
    return Cut(a, part, element, dims.integer(length))


def _column_parts(
    pair: _Pair, joined: Mapping[Expr, Expr], near: Axis, count: int, halves: bool, fresh: int
) -> _Parts:
    """A fold over the chunks of rows of `near` in each of `count` parts, and the merge of these; with one part there is
    nothing to merge. `halves`: elements are numbers in half precision as they stand."""
    first, second = pair.first, pair.second
    assert first.expr is not None
    expr, dtype = first.expr, first.output.dtype
    rest = tuple(a for a in dict.fromkeys(x for e in joined.values() for x in _axes(e)) if a != near)
    rows = Rows.of(near.extent, count)
    x = substitute(expr.body[0], joined)
    elements = [substitute(x, {axis(near): rows.place(k)}) for k in range(ROW_CHUNKS.rows)]
    chunk = _chunk(elements, origin(expr), rows, halves)
    kept, name = (*rows.parts, *expr.axes), f"{second.name}_part"
    whole = TensorExpr(kept, chunk, (rows.chunk, *rest), moments_of_chunks(dtype))
    same = second.output.shape == first.output.shape
    result = second.output if same else Value(fresh, first.output.shape, dtype)
    moved = Value(fresh + 4, first.output.shape, dtype)
    final, merge = (first.output, result, moved), () if same else (_reshaped(result, second),)
    if not rows.parts:
        finish = tuple(slot("a", k, dtype) for k in (3, 2, 1))
        alone = replace(whole, reduction=replace(moments_of_chunks(dtype), finish=finish))
        return _Parts((replace(first, name=name, outputs=final, expr=alone),), merge, moved)
    made = tuple(Value(fresh + 1 + k, tuple(a.extent for a in kept), dtype) for k in range(3))
    size = cast(dims.prod((rows.of_part, *(a.extent for a in rest))), dtype)
    index = tuple(dims.ZERO if a.extent is dims.ONE else axis(a) for a in kept)
    states = (size, *(read(k, index, dtype) for k in range(3)))
    merged = TensorExpr(expr.axes, states, rows.parts, _with_total(_moments(dtype)))
    return _Parts(
        (replace(first, name=name, outputs=made, expr=whole),),
        (Op(second.name, made, final, expr=merged, origin=second.origin), *merge),
        moved,
    )


def _chunk(elements: Sequence[Expr], start: Expr, rows: Rows, halves: bool) -> tuple[Expr, ...]:
    """A chunk of `elements` as one element of `moments_of_chunks`. The sum of a few halves is exact; else each element
    counts from the origin."""
    dtype = start.dtype
    one, zero, weight = const(1, dtype), const(0, dtype), rows.weight(dtype)
    inside = [rows.inside(k) for k in range(len(elements))]
    xs = [x if i is None else where(i, x, zero) for i, x in zip(inside, elements, strict=True)]

    def distances(place: Expr) -> list[Expr]:
        """From what is the same for all elements; 0 for one that is none, without reading it under another mask."""
        places = [place if i is None else call("mul", place, where(i, one, zero)) for i in inside]
        return [call("sub", x, p) for x, p in zip(xs, places, strict=True)]

    whole = _total(xs)
    mean = call("mul", whole, call("div", one, call("maximum", weight, one)))
    squares = _total([call("mul", d, d) for d in distances(mean)])
    moved = call("sub", whole, call("mul", weight, start)) if halves else _total(distances(start))
    found = (weight, moved, squares, whole)
    return found if rows.some is None else tuple(where(rows.some, e, zero) for e in found)


def _total(values: Sequence[Expr]) -> Expr:
    """The sum of a power of two of values, as a tree."""
    found = list(values)
    while len(found) > 1:
        found = [call("add", x, y) for x, y in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def _ops(pair: _Pair, axes: tuple[Axis, ...], part: Axis, x: Expr, cuts: Sequence[Cut], fresh: int) -> _Parts:
    first, second = pair.first, pair.second
    assert first.expr is not None and first.expr.reduction is not None
    dtype, plain = first.output.dtype, first.expr.reduction
    guard: Expr | None = None
    for c in cuts:
        guard = both(guard, c.inside)
    inner = tuple(c.element for c in cuts if c.element is not None)

    def over(of: Reduction, *body: Expr) -> TensorExpr:
        masked = tuple(b if guard is None else where(guard, b, const(0, dtype)) for b in body)
        return TensorExpr(axes, masked, inner, of)

    shape = tuple(a.extent for a in axes)
    made = [Value(fresh + k, shape, dtype) for k in range(3)]
    index = tuple(dims.ZERO if a.extent is dims.ONE else axis(a) for a in axes)
    results = [read(k, index, dtype) for k in range(3)]
    count = cast(dims.prod(c.count for c in cuts), dtype)
    near = call("div", read(len(first.inputs), index, dtype), count)
    distance = call("sub", x, near)
    sums = over(plain, x)
    if any(
        y.op in ("mod", "floordiv") for y in walk(count)
    ):  # digits would keep the merge from being one loop
        sums = replace(sums, body=(*sums.body, count), reduction=_with_count(plain))
        count = results[2]
    else:
        del made[2]
    folds = (
        replace(first, name=f"{first.name}_part", outputs=(made[0], *made[2:]), expr=sums),
        Op(f"{second.name}_part", (*first.inputs, made[0]), (made[1],),
           expr=over(plain, call("mul", distance, distance)), origin=second.origin),
    )  # fmt: skip
    whole = TensorExpr(first.expr.axes, (count, *results[:2]), (part,), _moments(dtype))
    same = second.output.shape == first.output.shape
    result = second.output if same else Value(fresh + 3, first.output.shape, dtype)
    merge = Op(second.name, tuple(made), (first.output, result), expr=whole, origin=second.origin)
    return _Parts(folds, (merge,) if same else (merge, _reshaped(result, second)))


def _reshaped(made: Value, second: Op) -> Op:
    """The result under the shape that it had, which has other dims of one element."""
    assert second.expr is not None
    long = [axis(a) for a in second.expr.axes if a.extent is not dims.ONE]
    index = [dims.ZERO if e is dims.ONE else long.pop(0) for e in made.shape]
    view = TensorExpr(second.expr.axes, (read(0, index, made.dtype),))
    return Op("view", (made,), second.outputs, expr=view, origin=second.origin)


def _with_count(plain: Reduction) -> Reduction:
    """A sum beside a number that is the same for all elements."""
    dtype = plain.state[0]
    (a, m), (b, n), (e, k) = ([slot(side, j, dtype) for j in range(2)] for side in "abe")
    merge = (call("add", a, b), call("maximum", m, n))
    return Reduction("sum and number", (dtype,) * 2, (dtype,) * 2, plain.identity * 2, (e, k), merge, (a, m))


def _moments(dtype: DType) -> Reduction:
    """(number, sum, sum of squared distances from the mean) of parts; results: the last two. Nothing overflows where
    there were no elements."""
    (na, sa, da), (nb, sb, db) = ([slot(side, k, dtype) for k in range(3)] for side in "ab")
    one, zero = const(1, dtype), const(0, dtype)
    n = call("add", na, nb)
    means = [call("div", s, call("maximum", k, one)) for s, k in ((sa, na), (sb, nb))]
    apart = call("sub", means[1], means[0])
    share = call("div", call("mul", na, nb), call("maximum", n, one))
    squares = call("add", call("add", da, db), call("mul", call("mul", apart, share), apart))
    inverse = [call("div", one, call("maximum", k, one)) for k in (na, nb)]
    off = call("sub", call("mul", sa, inverse[0]), call("mul", sb, inverse[1]))
    return Reduction(
        "moments", (dtype,) * 3, (dtype,) * 3, (zero,) * 3, tuple(slot("e", k, dtype) for k in range(3)),
        (n, call("add", sa, sb), squares), (sa, da),
        pooled=(na, sa, call("add", da, call("mul", call("mul", off, na), off))),
    )  # fmt: skip


def _with_total(of: Reduction) -> Reduction:
    """With one more sum in the state; results: this one, the squared distances, and the sum that these go with."""
    dtype = of.state[0]
    a, b, e = (slot(side, 3, dtype) for side in "abe")
    return Reduction(
        f"{of.name} and sum", (dtype,) * 4, (dtype,) * 4, (*of.identity, of.identity[0]), (*of.lift, e),
        (*of.merge, call("add", a, b)), (a, slot("a", 2, dtype), slot("a", 1, dtype)), pooled=(*of.pooled, a),
    )  # fmt: skip


def moments_of_chunks(dtype: DType) -> Reduction:
    """The same, where a lane takes one chunk (number, sum from an origin, squares, sum) after the other; results: all
    sums. All lanes have seen as many elements, so a division is one for all of them."""
    whole = _with_total(_moments(dtype))
    na, sa, da, ta = (slot("a", k, dtype) for k in range(4))
    nb, sb, db, tb = (slot("e", k, dtype) for k in range(4))
    one = const(1, dtype)
    seen = call("add", na, nb)
    means = [call("mul", s, call("div", one, call("maximum", n, one))) for s, n in ((sa, na), (sb, nb))]
    apart = call("sub", means[1], means[0])
    share = call("div", call("mul", na, nb), call("maximum", seen, one))
    squares = call("add", call("add", da, db), call("mul", call("mul", apart, share), apart))
    return replace(
        whole, name="moments of chunks", finish=(sa, da, ta),
        step=(seen, call("add", sa, sb), squares, call("add", ta, tb)),
    )  # fmt: skip
