"""Cascades along one axis in parts that run side by side: few rows with much to reduce give every core work.

    r = (+) over j of a(c_j),  t = (x) over j of g(r, c_j)          j = p * Q + q
 => r_p, t_p the same over q, by part p
    r = (+) over p of r_p,  t = (x) over p of M(r_p, r) t_p

M is the rescaling of the online law (Milakov and Gimelshein 2018 for softmax; Flash-Decoding, Dao et al. 2023). What
lies between a reduction and what it reads is computed per part too. Parts are merged in index order.

Where elements along the axis are results themselves (of few queries, what each key receives), they are made of the
complete results and of the products in front of the reductions, which the parts leave behind: nothing is multiplied
twice.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from tilewright.analysis.online.cascade import rescale_part
from tilewright.analysis.online.find_cascades import Cascade, NotSplittable, operand_of
from tilewright.analysis.online.law import Law, derive
from tilewright.analysis.online.running import Upstream, empty, shown
from tilewright.analysis.online.terms import RunningStatistic
from tilewright.ir.expr import (
    Axis,
    Expr,
    axes_of,
    axis,
    cast,
    const,
    make,
    read,
    slot,
    substitute,
    transform,
    walk,
    where,
)
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.ops.common import position
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes
from tilewright.rewrite.normal.normalise import normalise

from .merge_laws import law_of
from .parts import Bring, Cut, ReductionParts, split_reduction


def split_cascade(
    region: Graph, cascade: Cascade, parts: int, even: int = 1
) -> tuple[Graph, frozenset[Value]] | None:
    """The region with the reductions of a cascade in so many parts, which begin at multiples of `even` elements; and
    what the parts leave behind: states, and products of which elements are made that leave the region. None if some
    reduction cannot follow those that it reads."""
    try:
        made = _CascadeParts(region, cascade, parts, even)
        graph = normalise(made.graph())
    except NotSplittable:
        return None
    producer = graph.producer()
    return graph, frozenset(v for v in (*made.states.values(), *made.left.values()) if v in producer)


@dataclass(frozen=True, slots=True)
class _Follower:
    """How a reduction follows others: by `state` (an op that makes the law's only state), beside `statistic` if there
    is one; `finish` makes its result of the state (operand 0) and complete results."""

    state: Op
    law: Law
    statistic: Value | None
    finish: Op | None


class _CascadeParts:
    """Writes the region with a cascade in parts: `made` are the values of the parts as others see them, `states` those
    of the reductions as they are merged, `left` those of the `borders`."""

    def __init__(self, region: Graph, cascade: Cascade, parts: int, even: int) -> None:
        self.borders = _borders(region, cascade)
        self.region, self.cascade = _rounded(region, self.borders), cascade
        region = self.region
        cut = Cut.into(Axis("j", cascade.extent), parts, even)
        assert cut.part is not None and cut.element is not None
        self.p, self.q, self.place, self.inside = cut.part, cut.element, cut.place, cut.inside
        self.made: dict[Value, Value] = {}
        self.states: dict[Value, Value] = {}
        self.left: dict[Value, Value] = {}
        self.ops: list[Op] = []
        self.fresh = region.fresh_id()
        laws = _Laws(region, cascade)
        self.followers = {op: laws.follower(op) for op in cascade.reductions}
        self.shown = {x.statistic: g for x in self.followers.values() if x is not None for g in _raw(x.law)}

    def graph(self) -> Graph:
        later: set[Value] = set()
        for op in self.region.ops:
            assert op.expr is not None
            if op in self.cascade.reductions:
                self.split(op, self.cascade.reductions[op])
                later |= set(op.outputs)
            elif op.output in self.cascade.along:
                self.part(op, op.expr, op.expr.axes[self.cascade.along[op.output]])
                self.ops.append(self.joined(op) if op.output in self.borders else op)
            else:
                self.ops.append(op)
                if later & set(op.inputs):
                    later |= set(op.outputs)
                    self.part(op, op.expr, None)
        return self.region.with_ops(self.ops)

    def emit(self, op: Op, name: str, inputs: tuple[Value, ...], expr: TensorExpr) -> Value:
        """Write an op of one result; the result."""
        (dtype,) = expr.dtypes
        made = Value(self.fresh, expr.shape, dtype)
        self.fresh += 1
        self.ops.append(Op(name, inputs, (made,), expr=expr, origin=op.origin))
        return made

    def part(self, op: Op, expr: TensorExpr, a: Axis | None) -> None:
        """`op` by parts, along `a` where its result has the axis."""
        if len(op.outputs) > 1:
            return
        body = tuple(self.moved(op, b, a) for b in expr.body)
        axes = (self.p, *expr.axes)
        if a is not None:
            axes = tuple(x for b in expr.axes for x in ((self.p, self.q) if b == a else (b,)))
        made = replace(expr, axes=axes, body=body)
        self.made[op.output] = self.emit(op, op.name, self.inputs(op), made)

    def joined(self, op: Op) -> Op:
        """The result of `op` put together of its parts."""
        v, d = op.output, self.cascade.along[op.output]
        self.left[v] = part = self.made[v]
        axes = output_axes(v.shape)
        index = list(map(position, axes))
        index[d : d + 1] = dims.floordiv(index[d], self.q.extent), dims.mod(index[d], self.q.extent)
        return replace(op, inputs=(part,), expr=TensorExpr(axes, (read(0, index, v.dtype),)))

    def inputs(self, op: Op) -> tuple[Value, ...]:
        return tuple(self.made.get(v, v) for v in op.inputs)

    def moved(self, op: Op, body: Expr, a: Axis | None) -> Expr:
        """A body with `a` as p * Q + q, its reads those of the parts."""
        table = {} if a is None else {axis(a): self.place}

        def visit(x: Expr) -> Expr | None:
            if x.op != "read":
                return None
            v = operand_of(op, x)
            args = tuple(substitute(transform(i, visit), table) for i in x.args)
            if v in self.cascade.along:
                d = self.cascade.along[v]
                return make("read", (*args[:d], axis(self.p), axis(self.q), *args[d + 1 :]), x.dtype, x.value)
            if v in self.made:
                return make("read", (axis(self.p), *args), x.dtype, x.value)
            found = make("read", args, x.dtype, x.value)
            if self.inside is None or a is None or not any(axis(a) in axes_of(i) for i in x.args):
                return found
            return where(self.inside, found, const(0, x.dtype))

        return substitute(transform(body, visit), table)

    # -- reductions

    def split(self, op: Op, a: Axis) -> None:
        """The reduction of each part, and what merges them, each rescaled to the statistic of all."""
        follower = self.followers[op]
        state = op if follower is None else follower.state
        expr = state.expr
        assert expr is not None and expr.reduction is not None
        body = tuple(self.moved(state, b, a) for b in expr.body)
        parts = ReductionParts(expr.axes, (self.p,), (self.q,), self.inside)
        beside, bring = self.statistic(follower)
        each, merge = split_reduction(body, parts, law_of(expr.reduction), bring, factors=True)
        part = self.emit(op, op.name, self.inputs(state), each)
        self.states[op.output] = self.made[op.output] = part
        if op.output in self.shown:
            axes = output_axes(part.shape)
            own = read(0, tuple(map(position, axes)), part.dtype)
            seen = TensorExpr(axes, (shown(self.shown[op.output], own, None, None),))
            self.made[op.output] = self.emit(op, "shown", (part,), seen)
        inputs = (part, *beside)
        if follower is None or follower.finish is None:
            self.ops.append(Op(op.name, inputs, op.outputs, expr=merge, origin=op.origin))
            return
        total = self.emit(op, op.name, inputs, merge)
        self.ops.append(replace(follower.finish, inputs=(total, *follower.finish.inputs[1:])))

    def statistic(self, follower: _Follower | None) -> tuple[tuple[Value, ...], Bring]:
        """The statistic of a part and of all, and what brings states from one to the other."""
        if follower is None or follower.statistic is None:
            return (), tuple
        law, statistic = follower.law, follower.statistic
        part, place = self.states[statistic], law.statistics[0].leaf.args
        before, after = read(1, (axis(self.p), *place), part.dtype), read(2, place, part.dtype)
        return (part, statistic), lambda states: (rescale_part(law, states, (before,), (after,)),)


def _borders(region: Graph, cascade: Cascade) -> frozenset[Value]:
    """Reductions over other axes from which values along the cascade's axis are made that leave the region; rounded,
    where that is how all readers see them. Raises NotSplittable if one has more elements than any value that leaves."""
    producer, consumers = region.producer(), region.consumers()
    found: set[Value] = set()
    required = [v for v in region.kept() if v in cascade.along]
    todo, done = list(required), set(required)
    while todo:
        v = todo.pop()
        op = producer[v]
        assert op.expr is not None
        if op.expr.reduction is not None and not cascade.along.keys() & set(op.inputs):
            readers = consumers.get(v, [])
            narrow = readers[0].output if len(readers) == 1 and readers[0].inputs == (v,) else v
            small = narrow in cascade.along and narrow.dtype.bytes < v.dtype.bytes
            found.add(narrow if small and dims.equal(narrow.numel, v.numel) else v)
            continue
        fresh = [x for x in op.inputs if x in cascade.along and x not in done]
        todo += fresh
        done.update(fresh)
    if any(not any(dims.at_least(dims.sub(v.numel, b.numel), 0) for v in required) for b in found):
        raise NotSplittable
    return frozenset(found)


def _rounded(region: Graph, values: Collection[Value]) -> Graph:
    """The region in which `values` are rounded for all their readers: they are stored, and elements made of them must
    fit the sums that others of them went into."""

    def change(op: Op) -> Op:
        if op.expr is None or op.output not in values or op.expr.body[0].op != "narrow":
            return op
        (body,) = op.expr.body
        return replace(op, expr=replace(op.expr, body=(cast(body.args[0], body.dtype),)))

    return region.with_ops([change(op) for op in region.ops])


class _Laws:
    """The online law of reductions, their bodies taken down to what they read of reductions and of memory."""

    def __init__(self, region: Graph, cascade: Cascade) -> None:
        self.producer = region.producer()
        self.members = {op.output: (op, a) for op, a in cascade.reductions.items()}
        self.values = {v.id: v for op in region.ops for v in (*op.inputs, *op.outputs)}

    def follower(self, op: Op) -> _Follower | None:
        """How a reduction of the cascade follows others; None if it reads none. Raises NotSplittable if it cannot."""
        assert op.expr is not None and op.expr.reduction is not None
        body = self.composed(op, op.expr.body[0])
        leaves = [x for x in dict.fromkeys(walk(body)) if self.member(x) is not None]
        if not leaves:
            return None
        if any(x.dtype.is_half or axis(a) in axes_of(x) for x in leaves for a in op.expr.reduce):
            raise NotSplittable
        upstream = tuple(self.upstream(x, op.expr.reduce[0]) for x in leaves)
        law = derive(op.expr.reduction, (body,), upstream, op.expr.reduce)
        if not isinstance(law, Law) or law.hazard or law.rank > 1 or len(law.statistics) > 1:
            raise NotSplittable
        if any(g.centred or not g.closed for g in law.statistics):
            raise NotSplittable
        made = law.states[0]
        expr = replace(op.expr, reduction=made.reduction)
        state = self.as_op(op, expr, (made.body,), ())
        statistic = self.member(law.statistics[0].leaf) if law.statistics else None
        return _Follower(state, law, statistic, self.finish(op, law))

    def upstream(self, leaf: Expr, r: Axis) -> Upstream:
        value = self.member(leaf)
        assert value is not None
        first, a = self.members[value]
        assert first.expr is not None and first.expr.reduction is not None
        table = {axis(b): x for b, x in zip(first.expr.axes, leaf.args, strict=True)} | {axis(a): axis(r)}
        own = substitute(self.composed(first, first.expr.body[0]), table)
        return Upstream(leaf, first.expr.reduction, (own,))

    def finish(self, op: Op, law: Law) -> Op | None:
        """What makes the result of the state; None if the state is the result."""
        assert op.expr is not None
        dtype = law.states[0].reduction.state[0]
        total = read(0, tuple(map(position, op.expr.axes)), dtype)
        result = substitute(law.finish, {slot("a", 0, dtype): total})
        if law.states[0].lost:
            nothing = empty(law.statistics[0], law.statistics[0].leaf)
            result = where(nothing, const(math.nan, result.dtype), result)
        if result is total:
            return None
        return self.as_op(op, TensorExpr(op.expr.axes, (result,)), (result,), (op.output,))

    def as_op(self, op: Op, expr: TensorExpr, body: tuple[Expr, ...], first: tuple[Value, ...]) -> Op:
        """An op with the results of `op` whose body has leaves; `first` are its first operands."""
        inputs = [*first]

        def visit(x: Expr) -> Expr | None:
            number = x.value[0] if isinstance(x.value, tuple) else x.value
            if x.op not in ("read", "value") or x in own or not isinstance(number, int):
                return None
            v = self.values[number]
            if v not in inputs[len(first) :]:
                inputs.append(v)
            place = inputs.index(v, len(first))
            return read(place, tuple(transform(i, visit) for i in x.args), v.dtype)

        own = {read(0, tuple(map(position, expr.axes)), v.dtype) for v in first}
        changed = tuple(transform(b, visit) for b in body)
        return replace(op, inputs=tuple(inputs), expr=replace(expr, body=changed))

    def member(self, leaf: Expr) -> Value | None:
        """The reduction of the cascade whose result a leaf is."""
        return next((v for v in self.members if leaf.op == "value" and leaf.value == (v.id, 0)), None)

    def composed(self, op: Op, body: Expr) -> Expr:
        """`body` with what pointwise ops make put in."""

        def visit(x: Expr) -> Expr | None:
            if x.op != "read":
                return None
            v = operand_of(op, x)
            args = tuple(transform(i, visit) for i in x.args)
            maker = self.producer.get(v)
            if maker is None or maker.expr is None:
                return make("read", args, v.dtype, v.id)
            if not maker.expr.is_pointwise:
                return make("value", args, v.dtype, (v.id, maker.outputs.index(v)))
            table = {axis(a): i for a, i in zip(maker.expr.axes, args, strict=True)}
            return substitute(self.composed(maker, maker.expr.body[0]), table)

        return transform(body, visit)


def _raw(law: Law) -> list[RunningStatistic]:
    """The statistics that are read as they are, infinite where there is nothing."""
    return [g for g in law.statistics if g.through is g.leaf]
