"""The role *split*, as a rewrite: a fold over much with few results becomes two, so that its parts run side by side.

    s[i] = sum over r < N of f(i, r)
 => t[p, i] = sum over q < Q of (f(i, p*Q + q) where p*Q + q < N)        Q = ceil(N / P)
    s[i] = sum over p < P of t[p, i]

Where many threads share a grid point, neighbouring axes that are one in memory are folded as one: r above. The parts
are merged in index order, and P follows from the sizes alone, so the result does not depend on threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.expr import Axis, Expr, axis, read, slot, substitute, walk, where
from tilewright.ir.graph import Graph, Layout, Op, Value
from tilewright.ir.kernel import Kernel, Price
from tilewright.ir.reduction import Reduction
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.rounding import last_power_of_two
from tilewright.ir.tensor import TensorExpr
from tilewright.target import Target
from tilewright.tuning.search_limits import CASCADE_PARTS
from tilewright.tuning.thresholds import SPLIT_REDUCTIONS

from .cascades import extents, split_cascades
from .cut import Cut
from .moments import split_moments
from .policy import fastest, part_counts, seconds_of
from .seen_reads import Inside, joined_axes
from .wide_parts import may_cancel, with_wide_parts


def split_reductions(graph: Graph, price: Price, target: Target, hints: SizeHints) -> Graph:
    """Split each fold whose two kernels are modelled as faster than one; where many threads share a grid point, a mean
    and the squares of the distances from it together."""

    fresh, inside = _fresh(graph), Inside(graph, hints)

    def least(op: Op, before: tuple[Op, ...]) -> float:
        first, *merge = _best(
            op, split_reduction(op, fresh, target, hints, inside), graph.layouts, price
        ) or (op,)
        kernels = [Kernel((*before, first), first.outputs), *(Kernel((h,), h.outputs) for h in merge)]
        return sum(price(k, graph.layouts) for k in kernels)

    parts: frozenset[Op] = frozenset()
    if target.lanes > 1:
        graph, parts = split_moments(graph, price, least, target.cores, hints)
        graph, more = split_cascades(graph, price, target.cores, hints)
        parts |= more
    fresh, inside = _fresh(graph), Inside(graph, hints)
    waiting = find_cascaded(graph) if target.lanes > 1 else frozenset[Op]()
    ops: list[Op] = []
    for op in graph.ops:
        times = SPLIT_REDUCTIONS.min_gain_of_waiting_ratio if op in waiting else 1
        splits = [] if op in parts else split_reduction(op, fresh, target, hints, inside)
        halves = _best(op, splits, graph.layouts, price, times)
        if halves is not None:
            fresh += len(halves[0].outputs)
            ops += halves
        else:
            ops.append(op)
    return graph.with_ops(ops)


def find_cascaded(graph: Graph) -> frozenset[Op]:
    """The folds that wait for a fold over as many elements with as many results, through pointwise ops, and those that
    are waited for."""
    before: dict[Value, frozenset[Op]] = {}
    found: set[Op] = set()
    for op in graph.ops:
        if op.expr is None:
            continue
        folds = frozenset[Op]().union(*(before.get(v, frozenset()) for v in op.inputs))
        if op.expr.reduction is not None:
            same = {f for f in folds if extents(f) == extents(op)}
            found |= same | ({op} if same else set())
            folds = frozenset({op})
        before |= dict.fromkeys(op.outputs, folds)
    return frozenset(found)


def _fresh(graph: Graph) -> int:
    return 1 + max((v.id for op in graph.ops for v in op.outputs), default=0)


def _best(
    op: Op, splits: Sequence[tuple[Op, Op]], layouts: Mapping[Value, Layout], price: Price, times: float = 1
) -> tuple[Op, Op] | None:
    """The fastest of `splits`, None if none is `times` as fast as the whole."""
    if not splits:
        return None
    whole = seconds_of([Kernel((op,), op.outputs)], layouts, price)
    if whole == math.inf:
        return None
    ways = ((h, seconds_of([Kernel((x,), x.outputs) for x in h], layouts, price)) for h in splits)
    return fastest(ways, whole / times)


def split_reduction(
    op: Op, fresh: int, target: Target, hints: SizeHints, inside: Inside | None = None
) -> list[tuple[Op, Op]]:
    """The halves of a fold (their partial results numbered from `fresh`) for each number of parts worth a try; none if
    it is too small, ordered, or its reduction has no neutral element. `inside` says how its elements lie in memory."""
    expr = op.expr
    if expr is None or expr.reduction is None or expr.scan is not None or op.kernel >= 0:
        return []
    neutral = _neutral(expr.reduction)
    if neutral is None:
        return []
    term = expr.body[0]
    summed = (lambda: term) if inside is None else (lambda: inside.whole(inside.body(op)))
    wide = target.wide_sums and may_cancel(expr, summed)
    if inside is not None and target.lanes > 1 and len(expr.reduce) > 1 and len(expr.body) == 1:
        expr = _joined(expr, inside.wide_offsets(op))
    long = [a for a in expr.reduce if hints.estimate(a.extent) >= SPLIT_REDUCTIONS.min_axis_extent]
    r = long[0] if long else max(expr.reduce, key=lambda a: hints.estimate(a.extent))
    even = SPLIT_REDUCTIONS.part_multiple if target.lanes > 1 and dims.static(r.extent) is None else 1
    cuts = (Cut.into(r, count, even) for count in _parts(expr, r, target, hints))
    return [_halves(op, expr, cut, neutral, fresh, wide=wide) for cut in cuts]


def _joined(expr: TensorExpr, offsets: Sequence[Expr]) -> TensorExpr:
    """The same fold over fewer axes, if elements lie so in all that it reads."""
    table = joined_axes(expr.reduce, offsets)
    reduce = dict.fromkeys(x.value for e in table.values() for x in walk(e) if isinstance(x.value, Axis))
    if len(reduce) == len(expr.reduce):
        return expr
    return replace(expr, body=tuple(substitute(b, table) for b in expr.body), reduce=tuple(reduce))


def _parts(expr: TensorExpr, r: Axis, target: Target, hints: SizeHints) -> list[int]:
    whole = hints.estimate(dims.prod(a.extent for a in expr.reduce))
    kept = hints.estimate(dims.prod(expr.shape))
    if target.lanes > 1:
        counts = part_counts(CASCADE_PARTS.of_reductions, whole, SPLIT_REDUCTIONS.min_part_elements)
        return part_counts(counts, hints.estimate(r.extent), 2)
    if (
        whole < SPLIT_REDUCTIONS.few_cores_min_reduced_elements
        or kept >= SPLIT_REDUCTIONS.few_cores_max_parts
    ):
        return []
    most = min(
        SPLIT_REDUCTIONS.few_cores_max_parts,
        hints.estimate(r.extent),
        whole // (SPLIT_REDUCTIONS.few_cores_min_reduced_elements // 4),
    )
    return [last_power_of_two(most)]


def _neutral(reduction: Reduction) -> tuple[Expr, ...] | None:
    """Elements whose state is the identity, where such elements exist."""
    return reduction.identity if reduction.lifted(reduction.identity) == reduction.identity else None


def _halves(
    op: Op, expr: TensorExpr, cut: Cut, neutral: tuple[Expr, ...], fresh: int, *, wide: bool
) -> tuple[Op, Op]:
    assert expr.reduction is not None
    r = cut.whole
    p, q, inside = cut.part, cut.element, cut.inside
    assert p is not None and q is not None
    body = [substitute(b, {axis(r): cut.place}) for b in expr.body]
    if inside is not None:
        body = [where(inside, b, n) for b, n in zip(body, neutral, strict=True)]
    state = replace(expr.reduction, finish=_slots(expr.reduction))
    reduce = tuple(q if a == r else a for a in expr.reduce)
    partial = TensorExpr((p, *expr.axes), tuple(body), reduce, state)
    index = [dims.ZERO if a.extent is dims.ONE else axis(a) for a in expr.axes]
    parts_read = tuple(read(k, (axis(p), *index), t) for k, t in enumerate(state.results))
    merge = TensorExpr(expr.axes, parts_read, (p,), expr.reduction)
    if wide:
        partial, merge = with_wide_parts(partial, merge)
    assert partial.reduction is not None
    kinds = partial.reduction.results
    values = tuple(Value(fresh + k, partial.shape, t) for k, t in enumerate(kinds))
    first = Op(f"{op.name}_part", op.inputs, values, expr=partial, origin=op.origin)
    return first, Op(op.name, values, op.outputs, expr=merge, origin=op.origin)


def _slots(reduction: Reduction) -> tuple[Expr, ...]:
    return tuple(slot("a", k, t) for k, t in enumerate(reduction.state))
