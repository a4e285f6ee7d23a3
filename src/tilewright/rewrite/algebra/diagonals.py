"""What repeats along diagonals is computed once for each.

    v[.., i, j] = f(j - i)   =>   d[.., t] = f(t - (I - 1)) over t < I + J - 1,   v[.., i, j] = d[.., j - i + I - 1]

The bias of a relative position is such a value: a bucket of the distance (with a logarithm in it), looked up in a
table. Inside attention it would be computed for each pair of a query and a key; along diagonals there are as few of
them as there are rows and columns. That a value depends on the difference alone is proved: with i = j - t + I - 1 put
in, j is gone. What is computed by a few instructions, masks of distances say, stays as it is: who skips tiles reads
these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.expr import Axis, Expr, axes_of, axis, read, substitute, walk
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.rewrite.normal.normalise import drop_dead, map_reads
from tilewright.tuning.rewrite_limits import DIAGONALS

from .region import renumber_reads

_AFFINE = frozenset({"add", "sub", "mul", "neg", "const", "axis", "symbol"})


def share_diagonals(graph: Graph, hints: SizeHints) -> Graph:
    """The graph with each such value as a view of its diagonals, where these are few beside it and dear to compute."""
    seen = _Seen(graph)
    needed, fresh = set(graph.kept()), graph.fresh_id()
    kernel = 1 + max((op.kernel for op in graph.ops), default=-1)
    ops: list[Op] = []
    changed = False
    for op in reversed(graph.ops):
        live = op.call is not None or not needed.isdisjoint(op.outputs)
        found = _diagonals(op, seen, hints, (fresh, kernel)) if live else None
        made = (op,) if found is None else found
        if found is not None:
            fresh, kernel, changed = fresh + 1, kernel + 1, True
        needed.update(*(o.inputs for o in made))
        ops += reversed(made)
    return drop_dead(graph.with_ops(ops[::-1])) if changed else graph


class _Seen:
    """What pointwise ops compute of values in memory, with the pointwise ops before them put in, as far as expressions
    stay short. Reads name values by their ids."""

    def __init__(self, graph: Graph) -> None:
        self.values = {v.id: v for op in graph.ops for v in (*op.inputs, *op.outputs)}
        self.bodies: dict[int, Expr] = {}
        self.axes: dict[int, tuple[Axis, ...]] = {}
        for op in graph.ops:
            e = op.expr
            if e is not None and e.is_pointwise and op.kernel < 0 and len(op.outputs) == 1:
                body = map_reads(renumber_reads(e, lambda k, op=op: op.inputs[k].id).body[0], self._opened)
                if len(walk(body)) <= DIAGONALS.max_nodes:
                    self.bodies[op.output.id], self.axes[op.output.id] = body, e.axes

    def _opened(self, r: Expr) -> Expr:
        assert isinstance(r.value, int)
        index = [map_reads(a, self._opened) for a in r.args]
        body = self.bodies.get(r.value)
        if body is None:
            return read(r.value, index, r.dtype)
        return substitute(body, dict(zip(map(axis, self.axes[r.value]), index, strict=True)))


def _diagonals(op: Op, seen: _Seen, hints: SizeHints, numbers: tuple[int, int]) -> tuple[Op, Op] | None:
    """The op that computes the diagonals, as a value and a kernel of these numbers, and the view of them; None if there
    are none."""
    e = op.expr
    body = seen.bodies.get(op.outputs[0].id) if e is not None and len(op.outputs) == 1 else None
    if e is None or body is None or e.is_view() or not _is_dear(body):
        return None
    for i, j in _pairs(e, body, hints):
        t = Axis(f"{j.name}d", dims.sub(dims.add(i.extent, j.extent), dims.ONE))
        last = dims.sub(i.extent, dims.ONE)
        along = substitute(body, {axis(i): dims.sub(dims.add(axis(j), last), axis(t))})
        if axis(j) in axes_of(along):
            continue
        axes = (*(a for a in e.axes if a not in (i, j)), t)
        line = Value(numbers[0], tuple(a.extent for a in axes), op.output.dtype)
        first = _of_values(
            replace(op, name=f"{op.name}_diagonals", outputs=(line,), kernel=numbers[1]), axes, along, seen
        )
        place = [axis(a) for a in axes[:-1]] + [dims.sub(dims.add(axis(j), last), axis(i))]
        view = TensorExpr(e.axes, (read(0, place, line.dtype),))
        return first, Op("diagonals", (line,), op.outputs, expr=view, origin=op.origin)
    return None


def _pairs(e: TensorExpr, body: Expr, hints: SizeHints) -> Iterator[tuple[Axis, Axis]]:
    """The axes whose diagonals are few beside their elements; those are read backwards along the first."""
    used = axes_of(body)
    for i, j in combinations([a for a in e.axes if axis(a) in used], 2):
        rows, columns = hints.estimate(i.extent), hints.estimate(j.extent)
        if rows * columns >= DIAGONALS.min_times_fewer * (rows + columns - 1):
            yield i, j


def _is_dear(body: Expr) -> bool:
    """Whether an element costs more than loading it does: it is looked up at a place that is computed, by more than a
    few instructions."""
    gathers = any(x.op == "read" and any(_is_computed(a) for a in x.args) for x in walk(body))
    return gathers and len(walk(body)) >= DIAGONALS.min_nodes


def _is_computed(index: Expr) -> bool:
    return any(x.op not in _AFFINE for x in walk(index))


def _of_values(op: Op, axes: tuple[Axis, ...], body: Expr, seen: _Seen) -> Op:
    """The op with a body whose reads name values by their ids."""
    order: dict[int, int] = {}

    def change(r: Expr) -> Expr:
        assert isinstance(r.value, int)
        index = [map_reads(a, change) for a in r.args]
        return read(order.setdefault(r.value, len(order)), index, r.dtype)

    expr = TensorExpr(axes, (map_reads(body, change),))
    return replace(op, inputs=tuple(seen.values[n] for n in order), expr=expr)
