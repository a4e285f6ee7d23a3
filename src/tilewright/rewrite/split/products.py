"""A kernel around one sum of products as two (split-K), where few blocks would have long sums: parts of the sum side by
side, and what merges them, in index order, with all that stands behind the sum.

A part is a batch of the product, so that its tiles are chosen as those of any other one. What parts leave lies part by
part, each as the result lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import NamedTuple

from tilewright.ir.expr import Axis, axis, substitute
from tilewright.ir.graph import Layout, Op, Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.sizes import dims

from .merge_laws import law_of
from .parts import Cut, ReductionParts, split_reduction


class SplitProduct(NamedTuple):
    """The kernel that sums parts, the one that merges them, and what lies between them in memory."""

    parts: Kernel
    merge: Kernel
    between: Value
    layout: Layout


def split_product(
    kernel: Kernel, layouts: Mapping[Value, Layout], count: int, fresh: int
) -> SplitProduct | None:
    """`kernel` with its one sum in `count` even parts, whose results are the value number `fresh`; None if it has
    another number of sums, or these have no so many even parts."""
    op = only_sum(kernel)
    cuts = [] if op is None or count < 2 else _cuts(op, count)
    if op is None or not cuts:
        return None
    partial, merge = _part_and_merge(op, cuts, fresh)
    (between,) = partial.outputs
    first = Kernel((*_needed(kernel.ops, op.inputs), partial), (between,), kernel.reason)
    others = [merge if other is op else other for other in kernel.ops]
    second = Kernel(_needed(others, kernel.outputs), kernel.outputs, kernel.reason)
    return SplitProduct(first, second, between, _layout(kernel, op, layouts))


def even_part_counts(kernel: Kernel, most: int) -> list[int]:
    """Numbers of even parts, powers of two up to `most`, that the sum of a kernel has."""
    op = only_sum(kernel)
    counts = [1 << n for n in range(1, most.bit_length())]
    return [] if op is None else [n for n in counts if _cuts(op, n)]


def only_sum(kernel: Kernel) -> Op | None:
    """The reduction of a kernel that has one."""
    found = [op for op in kernel.ops if op.expr is not None and op.expr.reduction is not None]
    return found[0] if len(found) == 1 else None


def _cuts(op: Op, count: int) -> list[Cut]:
    """How `count` even parts of more than one element cut the axes of a sum, the longest as often as it goes: channels,
    then the taps of a window. Nothing where there are none."""
    expr = op.expr
    if expr is None or expr.reduction is None or expr.reduction.combiner != "add" or expr.scan is not None:
        return []
    extents = {a: dims.static(a.extent) or 0 for a in expr.reduce}
    if len(expr.body) != 1 or prod(extents.values()) < 2 * count:
        return []
    shares: dict[Axis, int] = {}
    left = count
    for a in sorted(extents, key=lambda a: -extents[a]):
        share = gcd(extents[a], left)
        left //= share
        if share > 1:
            shares[a] = share
    if left > 1:
        return []
    if len(shares) == 1:
        return [Cut.into(*pair) for pair in shares.items()]
    return [Cut.of_length(a, extents[a] // share, n) for n, (a, share) in enumerate(shares.items())]


def _part_and_merge(op: Op, cuts: Sequence[Cut], fresh: int) -> tuple[Op, Op]:
    """The op that sums parts into the value number `fresh`, and the one that merges them."""
    expr = op.expr
    assert expr is not None and expr.reduction is not None
    found, cuts = ReductionParts.of(expr.axes, cuts)
    of_axis = {c.whole: (c.element,) if c.element is not None else () for c in cuts}
    elements = tuple(e for a in expr.reduce for e in of_axis.get(a, (a,)))
    parts = replace(found, elements=elements, last=False)
    body = [substitute(b, {axis(c.whole): c.place for c in cuts}) for b in expr.body]
    partial, merge = split_reduction(body, parts, law_of(expr.reduction))
    values = parts.values(fresh, partial.dtypes)
    first = Op(f"{op.name}_part", op.inputs, values, expr=partial, origin=op.origin)
    return first, Op(op.name, values, op.outputs, expr=merge, origin=op.origin)


def _needed(ops: Sequence[Op], wanted: Iterable[Value]) -> tuple[Op, ...]:
    """Those ops on which some values depend, in order."""
    values, found = set(wanted), list[Op]()
    for op in reversed(ops):
        if values & set(op.outputs):
            found.append(op)
            values |= set(op.inputs)
    return tuple(reversed(found))


def _layout(kernel: Kernel, op: Op, layouts: Mapping[Value, Layout]) -> Layout:
    """Part by part, each as the result of the sum lies, or as a result of the kernel of this shape."""
    (made,) = op.outputs
    alike = [v for v in (made, *kernel.outputs) if v.shape == made.shape and v in layouts]
    inner = layouts[alike[0]].strides if alike else dims.dense_strides(made.shape)
    return Layout((made.numel, *inner))
