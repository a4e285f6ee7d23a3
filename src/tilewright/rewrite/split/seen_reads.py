"""What reductions read, seen through the pointwise ops before them, and neighbouring axes as one.

A sum of [n, h, w, c] over n, h and w, of elements that lie one behind the other in all memory that is read, is a sum
over one long axis: it has as many parts as a machine wants, whatever n is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.expr import Axis, Expr, axis, substitute, walk
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.sizes import dims
from tilewright.rewrite.algebra.region import renumber_reads
from tilewright.tuning.rewrite_limits import MASK_SEARCH
from tilewright.tuning.thresholds import SIZES


class Inside:
    """What is computed from what, seen through pointwise ops. Reads name values by their ids."""

    def __init__(self, graph: Graph, hints: SizeHints) -> None:
        self.values = {v.id: v for op in graph.ops for v in (*op.inputs, *op.outputs)}
        self.producer = {v.id: op for op in graph.ops for v in op.outputs if op.expr is not None}
        self.layouts = graph.layouts
        self.hints = hints

    def body(self, op: Op) -> Expr:
        """The one element that `op` computes."""
        assert op.expr is not None
        return renumber_reads(op.expr, lambda k: op.inputs[k].id).body[0]

    def opened(self, e: Expr) -> Expr:
        """A read of a pointwise result as the expression of that."""
        op = self.producer.get(e.value) if e.op == "read" and isinstance(e.value, int) else None
        if op is None or op.expr is None or not _is_pointwise(op):
            return e
        table = {axis(a): i for a, i in zip(op.expr.axes, e.args, strict=True)}
        return substitute(self.body(op), table)

    def until(self, e: Expr, *wanted: str) -> Expr:
        """`e`, opened until its operation is one of `wanted`."""
        for _ in range(MASK_SEARCH.max_pointwise_ops):
            opened = self.opened(e)
            if e.op in wanted and (e.op != "read" or opened is e):
                return e
            e = opened
        return e

    def inlined(self, e: Expr) -> Expr:
        """`e` with everything pointwise put in."""
        for _ in range(MASK_SEARCH.max_pointwise_ops):
            table = {x: y for x in walk(e) if x.op == "read" and (y := self.opened(x)) is not x}
            if not table:
                break
            e = substitute(e, table)
        return e

    def before(self, op: Op) -> tuple[Op, ...]:
        """The pointwise ops that `op` is computed from, in order."""
        found: dict[Op, None] = {}
        todo = [(op, False)]
        while todo:
            at, done = todo.pop()
            if done:
                found[at] = None
                continue
            makers = (self.producer.get(v.id) for v in reversed(at.inputs))
            fresh = [o for o in makers if o is not None and o not in found and _is_pointwise(o)]
            todo += ([(at, True)] if at is not op else []) + [(o, False) for o in fresh]
        return tuple(found)

    def before_in_other_order(self, op: Op) -> tuple[Op, ...]:
        """The pointwise ops that `op` is computed from, if memory that they read lies in another order than densely:
        what the reduction costs then shows with them only, since their own results would lie densely."""
        return self.before(op) if any(not self._is_dense(v) for v in self._read_behind(op)) else ()

    def _is_dense(self, v: Value) -> bool:
        layout = self.layouts.get(v)
        return layout is None or all(map(dims.equal, layout.strides, dims.dense_strides(v.shape)))

    def _read_behind(self, op: Op) -> Iterator[Value]:
        """The values in memory that `op` reads, through the pointwise ops before it."""
        for at in (op, *self.before(op)):
            for v in at.inputs:
                p = self.producer.get(v.id)
                if p is None or not _is_pointwise(p):
                    yield v

    def are_halves(self, op: Op) -> bool:
        """Whether the elements of `op` are numbers in half precision."""
        x = self.inlined(self.body(op))
        return x.op == "cast" and x.args[0].op == "read" and x.args[0].dtype.is_half

    def offsets(self, op: Op) -> list[Expr]:
        """Where `op` reads memory, in elements."""
        return [offset for _, offset in self._accesses(op)]

    def wide_offsets(self, op: Op) -> list[Expr]:
        """The same of those values only that decide what reading costs: the largest, and all that are not many times
        smaller."""
        found = self._accesses(op)
        most = max((size for size, _ in found), default=0)
        return [offset for size, offset in found if size * SIZES.min_negligible_ratio >= most]

    def _accesses(self, op: Op) -> list[tuple[int, Expr]]:
        """The elements of each value that is read, and the place of the one that is read."""
        found: list[tuple[int, Expr]] = []
        for x in walk(self.inlined(self.body(op))):
            if x.op == "read" and isinstance(x.value, int):
                v = self.values[x.value]
                layout = self.layouts.get(v)
                strides = layout.strides if layout is not None else dims.dense_strides(v.shape)
                offset = dims.add(*(dims.mul(i, s) for i, s in zip(x.args, strides, strict=True)))
                found.append((self.hints.estimate(v.numel), offset))
        return found


def _is_pointwise(op: Op) -> bool:
    return op.expr is not None and op.expr.is_pointwise and op.kernel < 0


def joined_axes(reduce: Sequence[Axis], offsets: Sequence[Expr]) -> tuple[dict[Expr, Expr], tuple[Axis, ...]]:
    """Each axis as an index expression over fewer axes, and these: neighbours that lie one behind the other in all
    memory that is read are one axis."""
    groups: list[list[Axis]] = []
    for a in reduce:
        if groups and _follows(groups[-1][-1], a, offsets):
            groups[-1].append(a)
        else:
            groups.append([a])
    table: dict[Expr, Expr] = {}
    return table, tuple(as_one(group, f"m{len(table)}", table) for group in groups)


def as_one(group: Sequence[Axis], name: str, table: dict[Expr, Expr]) -> Axis:
    """One axis for several, whose indices, as digits of its own, go into `table`."""
    joined = Axis(name, dims.prod(a.extent for a in group))
    rest: Expr = axis(joined)
    for a in reversed(group[1:]):
        table[axis(a)] = dims.mod(rest, a.extent)
        rest = dims.floordiv(rest, a.extent)
    table[axis(group[0])] = rest
    return joined


def _follows(a: Axis, b: Axis, offsets: Sequence[Expr]) -> bool:
    """Whether a step along `a` is as long as all of `b`."""
    for o in offsets:
        outer, inner = (dims.coefficient(o, axis(x)) for x in (a, b))
        if outer is None or inner is None or not dims.equal(outer, dims.mul(inner, b.extent)):
            return False
    return True
