"""A mean and the squares of the distances from it, of few results over much, in one pass: parts keep both.

    s[i] = sum over r of x(i, r)        d[i] = sum over r of (x(i, r) - s[i] / N)^2
 => s[p, i], d[p, i] the same over the parts p of r, each with a mean of its own
    (N, s, d)[i] = merge of (n[p], s[p, i], d[p, i]) over p           (Chan, Golub, LeVeque 1979)

The second reduction would otherwise wait for the first and read everything again. A part has a fixed length, whatever
the sizes are; how many parts there are may depend on them. In real arithmetic the law is an identity; in floats it is
more exact than what it replaces.

A part that lies along memory is held by one block, which takes the mean first. Of columns a thread holds a chunk of
rows, of which it takes the mean first, too, and merges chunk after chunk into what it has; blocks have parts of the
rows, which are merged last. All threads of a block have seen equally many rows, so the divisions are for all of them.
In floats the squares must not see numbers of the size of the mean, so means are counted from the column's first element
(never further from the mean than the root of N d); the mean itself comes from another sum, which does not, where that
is closer (`origins`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tilewright.analysis.moments import is_sum
from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.expr import Axis, Expr, axis, call, cast, read, substitute, walk
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.kernel import Kernel, Price
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.rounding import next_power_of_two
from tilewright.ir.tensor import TensorExpr
from tilewright.rewrite.normal.normalise import drop_dead
from tilewright.tuning.search_limits import CASCADE_PARTS
from tilewright.tuning.thresholds import ROW_CHUNKS, SPLIT_MOMENTS

from .merge_laws import chunk_law, keeping_state, moments_of_parts, with_number
from .origins import count_from_origin, from_memory, origin
from .parts import Cut, ReductionParts, split_reduction
from .policy import fastest, part_counts, seconds_of
from .row_chunks import Rows, chunk_moments
from .seen_reads import Inside, joined_axes

Least = Callable[[Op, tuple[Op, ...]], float]


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """`first` sums `x`, `second` the squares of distances from the mean; both over `first`'s axes."""

    first: Op
    second: Op


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """What reduces the parts, and what merges them."""

    partial: tuple[Op, ...]
    merge: tuple[Op, ...]
    moved: Value | None = None
    """The sums of the distances from the origins, if there are origins."""

    def kernels(self, pair: _Pair, before: tuple[Op, ...]) -> tuple[Kernel, ...]:
        """One of the parts and the ops `before` them, one of the merge if there is one."""
        wanted = {*pair.first.outputs, *pair.second.outputs, *(v for op in self.merge for v in op.inputs)}
        merge = tuple(op for op in self.merge if op.expr is not None and op.expr.reduction is not None)
        groups = [g for g in ((*before, *self.partial), merge) if g]
        return tuple(Kernel(g, tuple(v for op in g for v in op.outputs if v in wanted)) for g in groups)


def split_moments(
    graph: Graph, price: Price, least: Least, cores: int, hints: SizeHints
) -> tuple[Graph, frozenset[Op]]:
    """The graph with each such pair in parts where that is modelled as faster, and the ops that are parts. `least` is
    the price of a reduction behind pointwise ops, split as well as it can be. Rows that keep all `cores` busy stay
    whole."""
    inside = Inside(graph, hints)
    made: set[Op] = set()
    ops = list(graph.ops)
    for op in graph.ops:
        pair = _pair(inside, op)
        if pair is None or pair.first not in ops:
            continue
        fresh = graph.with_ops(ops).fresh_id()
        tried = _in_parts(pair, inside, fresh, SPLIT_MOMENTS.min_unsplit_rows_per_core * cores, hints)
        new = _best(pair, tried, inside, price, least)
        if new is None:
            continue
        at = ops.index(pair.first)
        ops[at : at + 1] = [*new.partial, *new.merge]
        ops.remove(pair.second)
        first = None if new.moved is None else from_memory(pair.first, inside)
        if first is not None and new.moved is not None:
            ops = count_from_origin(ops, first, new.moved, partial(_divides, first=pair.first))
        made |= set(new.partial)
    return (drop_dead(graph.with_ops(ops)), frozenset(made)) if made else (graph, frozenset())


def _best(
    pair: _Pair,
    tried: Sequence[_Split],
    inside: Inside,
    price: Price,
    least: Least,
) -> _Split | None:
    """The fastest way of those `tried`, None if two reductions are faster; each with the pointwise ops before."""
    if not tried:
        return None
    layouts, before = inside.layouts, inside.before(pair.first)
    ways = [(new, seconds_of(new.kernels(pair, before), layouts, price)) for new in tried]
    together = Kernel((*before, pair.first, pair.second), (*pair.first.outputs, *pair.second.outputs))
    second = inside.before_in_other_order(pair.second)
    apart = least(pair.first, before) + least(pair.second, second or before)
    return fastest(ways, min(apart, seconds_of([together], layouts, price)))


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
    return _Pair(first, second) if inside.inlined(moved) is inside.inlined(inside.body(first)) else None


def _is_sum(op: Op) -> bool:
    """Whether an op is a plain sum of floats, each of which is read once."""
    if op.expr is None or op.kernel >= 0 or not is_sum(op):
        return False
    dtype = op.output.dtype
    return dtype.is_float and not dtype.is_half and op.expr.body[0].dtype is dtype


def _same_axes(first: Op, second: Op, total: Expr) -> dict[Axis, Expr] | None:
    """The axes of `second` as those of `first`, whose result it reads as `total`; None if they do not correspond."""
    a, b = first.expr, second.expr
    assert a is not None and b is not None
    if tuple(r.extent for r in a.reduce) != tuple(r.extent for r in b.reduce):
        return None
    table = {s: axis(r) for r, s in zip(a.reduce, b.reduce, strict=True)}
    long = [(x, i) for x, i in zip(a.axes, total.args, strict=True) if x.extent is not dims.ONE]
    index_axes = [s for s in b.axes if s.extent is not dims.ONE]
    if [i for _, i in long] != [axis(s) for s in index_axes]:
        return None
    return table | {s: axis(x) for s, (x, _) in zip(index_axes, long, strict=True)}


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


def _in_parts(pair: _Pair, inside: Inside, fresh: int, most: int, hints: SizeHints) -> list[_Split]:
    """Ways to have both over parts, and the merge of these; for rows that lie along memory, in long runs, none if there
    are `most` or if there is one part only."""
    expr = pair.first.expr
    assert expr is not None
    offsets = inside.offsets(pair.first)
    joined, reduce = joined_axes(expr.reduce, offsets)
    x = substitute(expr.body[0], joined)
    moved = [substitute(o, joined) for o in offsets]
    along = next((a for a in reduce for o in moved if dims.coefficient(o, axis(a)) is dims.ONE), None)
    if along is None or hints.estimate(along.extent) < SPLIT_MOMENTS.min_run_elements:
        near = max(reduce, key=lambda a: hints.estimate(a.extent))
        rest = tuple(a for a in reduce if a != near)
        rows = hints.estimate(near.extent)
        counts = part_counts(CASCADE_PARTS.of_columns, rows, SPLIT_MOMENTS.min_column_part_rows)
        halves = inside.are_halves(pair.first)
        return [_column_parts(pair, x, Rows.of(near, n), rest, fresh, halves=halves) for n in counts]
    if hints.estimate(dims.prod(expr.shape)) >= most:
        return []
    cuts = _cuts(reduce, along, hints)
    return [_row_parts(pair, x, cuts, fresh)] if any(c.part for c in cuts) else []


def _row_parts(pair: _Pair, x: Expr, cuts: Sequence[Cut], fresh: int) -> _Split:
    """The sum of the `x` of each part, then of the squares of the distances from its mean, and the merge of both."""
    first, second = pair.first, pair.second
    assert first.expr is not None and first.expr.reduction is not None
    parts, cuts = ReductionParts.of(first.expr.axes, cuts)
    x = substitute(x, {axis(c.whole): c.place for c in cuts})
    dtype, sum_of = first.output.dtype, keeping_state(first.expr.reduction)
    count = cast(dims.prod(c.count for c in cuts), dtype)
    sums, states_left = parts.reduce((x,), sum_of), 2
    # a number with digits would keep the merge from being one loop
    if any(y.op in ("mod", "floordiv") for y in walk(count)):
        sums, states_left = replace(sums, body=(*sums.body, count), reduction=with_number(sum_of)), 3
    (total,) = parts.read((dtype,), len(first.inputs))
    distance = call("sub", x, call("div", total, count))
    squares = parts.reduce((call("mul", distance, distance),), sum_of)
    made, states = parts.values(fresh, (dtype,) * states_left), parts.read((dtype,) * states_left)
    merged = parts.merge((*(states[2:] or (count,)), *states[:2]), moments_of_parts(dtype))
    result, view = _result(pair, fresh + 3)
    inputs, name = (*first.inputs, made[0]), f"{second.name}_part"
    partial = (
        replace(first, name=f"{first.name}_part", outputs=(made[0], *made[2:]), expr=sums),
        Op(name, inputs, (made[1],), expr=squares, origin=second.origin),
    )
    merge = Op(second.name, made, (first.output, result), expr=merged, origin=second.origin)
    return _Split(partial, (merge, *view))


def _cuts(reduce: Sequence[Axis], along: Axis, hints: SizeHints) -> list[Cut]:
    """How each axis is cut: the one that lies along memory first, then the others into what room is left, the innermost
    first."""
    room, order = SPLIT_MOMENTS.max_row_part_elements, [along, *(a for a in reversed(reduce) if a != along)]
    found: dict[Axis, Cut] = {}
    for a in order:
        length = _length(a, room, hints)
        found[a] = Cut.of_length(a, length, len(found))
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


def _column_parts(
    pair: _Pair, x: Expr, rows: Rows, rest: tuple[Axis, ...], fresh: int, *, halves: bool
) -> _Split:
    """The chunks of the `rows` of each part, and of all of the `rest`, and the merge of these; with one part there is
    nothing to merge. `halves`: elements are numbers in half precision as they stand."""
    first, second = pair.first, pair.second
    assert first.expr is not None
    expr, dtype = first.expr, first.output.dtype
    parts = ReductionParts(expr.axes, rows.parts, (rows.chunk, *rest))
    elements = [substitute(x, {axis(rows.whole): rows.place(k)}) for k in range(ROW_CHUNKS.rows)]
    law, chunk = chunk_law(dtype), chunk_moments(elements, origin(expr), rows, halves)
    result, view = _result(pair, fresh)
    moved = Value(fresh + 4, first.output.shape, dtype)
    final, name = (first.output, result, moved), f"{second.name}_part"
    if not rows.parts:
        alone = parts.reduce(chunk, replace(law.part, finish=law.part.finish[::-1]))
        return _Split((replace(first, name=name, outputs=final, expr=alone),), view, moved)
    size = cast(dims.prod((rows.of_part, *(a.extent for a in rest))), dtype)
    sums, merged = split_reduction(chunk, parts, law, lambda sums: (size, *sums))
    made = parts.values(fresh + 1, sums.dtypes)
    merge = Op(second.name, made, final, expr=merged, origin=second.origin)
    return _Split((replace(first, name=name, outputs=made, expr=sums),), (merge, *view), moved)


def _result(pair: _Pair, fresh: int) -> tuple[Value, tuple[Op, ...]]:
    """What holds the squared distances under the shape of `first`, and the view of it that has the shape of `second`'s
    result, whose dims of one element may be others."""
    first, second = pair.first, pair.second
    if second.output.shape == first.output.shape:
        return second.output, ()
    assert second.expr is not None
    made = Value(fresh, first.output.shape, first.output.dtype)
    long = [axis(a) for a in second.expr.axes if a.extent is not dims.ONE]
    index = [dims.ZERO if e is dims.ONE else long.pop(0) for e in made.shape]
    view = TensorExpr(second.expr.axes, (read(0, index, made.dtype),))
    return made, (Op("view", (made,), second.outputs, expr=view, origin=second.origin),)
