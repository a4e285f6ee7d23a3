"""The role *split*, as a rewrite: a reduction over much with few results becomes two, so that its parts run side by
side (`parts` has the law).

Where many threads share a grid point, neighbouring axes that are one in memory are reduced as one. How many parts
there are follows from the sizes alone, and they are merged in index order, so the result does not depend on threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.expr import Expr, axis, substitute
from tilewright.ir.graph import Graph, Op
from tilewright.ir.kernel import Kernel, Price
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.target import Target

from .cascades import split_cascades, waiting_reductions
from .merge_laws import IN_WIDE_PARTS, MergeLaw, has_neutral, law_of, may_cancel
from .moments import split_moments
from .parts import Cut, ReductionParts, split_reduction
from .policy import SplitPolicy, fastest_split, part_counts, seconds_of
from .seen_reads import Inside, joined_axes


def split_reductions(
    graph: Graph, price: Price, target: Target, policy: SplitPolicy, hints: SizeHints
) -> Graph:
    """Split each reduction whose two kernels are modelled as faster than one; before them, if the policy says so, a
    mean and the squares of the distances from it together, and reductions that wait for each other."""

    def halves(op: Op, times: float = 1) -> tuple[Op, Op] | None:
        """The fastest halves, None if none are `times` as fast as the whole."""
        ways = list_splits(op, fresh, target, policy, hints, inside)
        before = inside.before_in_other_order(op) if ways else ()
        priced = [((a, b), _alone((*before, a), (b,))) for a, b in ways]
        unsplit = Kernel((*before, op), op.outputs)
        return fastest_split(unsplit, priced, graph.layouts, price, times) if ways else None

    def least(op: Op, before: tuple[Op, ...]) -> float:
        first, *merge = halves(op) or (op,)
        return seconds_of(_alone((*before, first), *((op,) for op in merge)), graph.layouts, price)

    fresh, inside = graph.fresh_id(), Inside(graph, hints)
    parts: frozenset[Op] = frozenset()
    if policy.together:
        graph, parts = split_moments(graph, price, least, target.cores, hints)
        graph, more = split_cascades(graph, price, target.cores, hints)
        parts |= more
    fresh, inside = graph.fresh_id(), Inside(graph, hints)
    waiting = waiting_reductions(graph)
    ops: list[Op] = []
    for op in graph.ops:
        times = policy.limits.min_gain_of_waiting_ratio if op in waiting else 1
        made = (op,) if op in parts else halves(op, times) or (op,)
        fresh += len(made[0].outputs) if len(made) > 1 else 0
        ops += made
    return graph.with_ops(ops)


def _alone(*groups: Sequence[Op]) -> list[Kernel]:
    """A kernel of each group, which stores what its last op makes."""
    return [Kernel(tuple(ops), ops[-1].outputs) for ops in groups]


def list_splits(
    op: Op, fresh: int, target: Target, policy: SplitPolicy, hints: SizeHints, inside: Inside | None = None
) -> list[tuple[Op, Op]]:
    """The halves of a reduction (their partial results numbered from `fresh`) for each number of parts worth a try;
    none if it is too small, ordered, or has no neutral element. `inside` says how its elements lie in memory."""
    expr = op.expr
    if expr is None or expr.reduction is None or expr.scan is not None or op.kernel >= 0:
        return []
    if not has_neutral(expr.reduction):
        return []
    term = expr.body[0]
    summed = (lambda: term) if inside is None else (lambda: inside.inlined(inside.body(op)))
    law = IN_WIDE_PARTS if target.wide_sums and may_cancel(expr, summed) else law_of(expr.reduction)
    if inside is not None and policy.together and len(expr.reduce) > 1 and len(expr.body) == 1:
        expr = _joined(expr, inside.wide_offsets(op))
    return [_halves(op, expr, cut, law, fresh) for cut in _cuts(expr, policy, hints)]


def _joined(expr: TensorExpr, offsets: Sequence[Expr]) -> TensorExpr:
    """The same reduction over fewer axes, if elements lie so in all that it reads."""
    table, reduce = joined_axes(expr.reduce, offsets)
    if len(reduce) == len(expr.reduce):
        return expr
    return replace(expr, body=tuple(substitute(b, table) for b in expr.body), reduce=reduce)


def _cuts(expr: TensorExpr, policy: SplitPolicy, hints: SizeHints) -> Iterator[Cut]:
    """The ways to cut the first long axis, or the longest one."""
    limits, elements = policy.limits, hints.estimate(dims.prod(a.extent for a in expr.reduce))
    if hints.estimate(dims.prod(expr.shape)) > limits.max_results:
        return
    long = [a for a in expr.reduce if hints.estimate(a.extent) >= limits.min_axis_extent]
    r = long[0] if long else max(expr.reduce, key=lambda a: hints.estimate(a.extent))
    counts = part_counts(policy.counts, elements, limits.min_part_elements)
    counts = part_counts(counts, hints.estimate(r.extent), limits.min_part_extent)
    multiple = limits.part_multiple if dims.static(r.extent) is None else 1
    for count in counts if policy.tries_all else counts[-1:]:
        yield Cut.into(r, count, multiple)


def _halves(op: Op, expr: TensorExpr, cut: Cut, law: MergeLaw, fresh: int) -> tuple[Op, Op]:
    assert cut.part is not None and cut.element is not None
    elements = tuple(cut.element if a == cut.whole else a for a in expr.reduce)
    parts = ReductionParts(expr.axes, (cut.part,), elements, cut.inside)
    body = [substitute(b, {axis(cut.whole): cut.place}) for b in expr.body]
    partial, merge = split_reduction(body, parts, law)
    values = parts.values(fresh, partial.dtypes)
    first = Op(f"{op.name}_part", op.inputs, values, expr=partial, origin=op.origin)
    return first, Op(op.name, values, op.outputs, expr=merge, origin=op.origin)
