"""Reductions of a region that wait for each other along one axis: what belongs to such a cascade."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilewright.ir.expr import Axis, Expr, axes_of, axis
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.sizes import dims


@dataclass(frozen=True, slots=True, eq=False)
class Cascade:
    """Reductions over one axis (by op: the axis that each of them folds), and the values made on the way that have this
    axis as a dim (by value: which)."""

    reductions: Mapping[Op, Axis]
    along: Mapping[Value, int]

    @property
    def extent(self) -> Expr:
        """Elements along the axis."""
        return next(iter(self.reductions.values())).extent

    @property
    def rows(self) -> Expr:
        """Results of the reduction with the fewest."""
        return min((op.output.numel for op in self.reductions), key=lambda n: dims.static(n) or 1 << 62)


class NotSplittable(Exception):
    """The cascade cannot run in parts."""


def cascades(region: Graph) -> list[Cascade]:
    """The cascades of a region."""
    found: list[Cascade] = []
    for op in region.ops:
        if any(op in c.reductions for c in found):
            continue
        for v, d in _starts(region, op):
            try:
                found.append(_Closure(region).of(v, d))
                break
            except NotSplittable:
                continue
    return found


def _starts(region: Graph, op: Op) -> Iterator[tuple[Value, int]]:
    """Values made in the region that a reduction reads plainly along the axis that it folds."""
    producer = region.producer()
    if op.expr is None or op.expr.reduction is None or len(op.expr.reduce) != 1:
        return
    for r in op.expr.reads():
        v = operand_of(op, r)
        for d, index in enumerate(r.args):
            if v in producer and index is axis(op.expr.reduce[0]):
                yield v, d


def operand_of(op: Op, r: Expr) -> Value:
    """The value that a read of an op takes."""
    assert isinstance(r.value, int)
    return op.inputs[r.value]


class _Closure:
    """Follows an axis through the values that have it."""

    def __init__(self, region: Graph) -> None:
        self.producer, self.consumers = region.producer(), region.consumers()
        self.reductions: dict[Op, Axis] = {}
        self.along: dict[Value, int] = {}
        self.todo: list[Value] = []

    def of(self, v: Value, d: int) -> Cascade:
        self.add(v, d)
        while self.todo:
            v = self.todo.pop()
            op, d = self.producer[v], self.along[v]
            assert op.expr is not None
            if op.expr.scan is not None or len(op.outputs) > 1:
                raise NotSplittable
            self.back(op, op.expr.axes[d])
            for reader in self.consumers.get(v, []):
                self.onward(reader, v, d)
        return Cascade(dict(self.reductions), dict(self.along))

    def add(self, v: Value, d: int) -> None:
        if self.along.setdefault(v, d) != d:
            raise NotSplittable
        if v not in self.todo:
            self.todo.append(v)

    def back(self, op: Op, a: Axis) -> None:
        """The values made here that `op` reads along `a`."""
        assert op.expr is not None
        for r in op.expr.reads():
            v = operand_of(op, r)
            for d, index in enumerate(r.args):
                if v in self.producer and axis(a) in axes_of(index):
                    if index is not axis(a):
                        raise NotSplittable
                    if not dims.equal(v.shape[d], a.extent):
                        continue  # a piece of a concatenation: read at the places of the parts, as memory is
                    if v not in self.along or self.along[v] != d:
                        self.add(v, d)

    def onward(self, reader: Op, v: Value, d: int) -> None:
        """What `reader` makes of `v`."""
        if reader.expr is None or reader.expr.scan is not None:
            raise NotSplittable
        for r in reader.expr.reads():
            if operand_of(reader, r) is not v:
                continue
            a = r.args[d].value
            if r.args[d].op != "axis" or not isinstance(a, Axis) or not dims.equal(v.shape[d], a.extent):
                raise NotSplittable
            if a not in reader.expr.reduce:
                place = reader.expr.axes.index(a)
                for made in reader.outputs:
                    if self.along.get(made) != place:
                        self.add(made, place)
            elif reader not in self.reductions:
                self.reductions[reader] = self.member(reader, a)
                self.back(reader, a)

    def member(self, op: Op, a: Axis) -> Axis:
        assert op.expr is not None and op.expr.reduction is not None
        reduction = op.expr.reduction
        neutral = reduction.lifted(reduction.identity) == reduction.identity
        if op.expr.reduce != (a,) or reduction.combiner is None or not neutral:
            raise NotSplittable
        return a
