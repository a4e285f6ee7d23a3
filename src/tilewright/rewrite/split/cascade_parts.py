"""Cascades along one axis in parts that run side by side: few rows with much to fold give every core work.

    r = (+) over j of a(c_j),  t = (x) over j of g(r, c_j)          j = p * Q + q
 => r_p, t_p the same over q, by part p
    r = (+) over p of r_p,  t = (x) over p of M(r_p, r) t_p

M is the rescaling of the online law (Milakov and Gimelshein 2018 for softmax; Flash-Decoding, Dao et al. 2023). What
lies between a fold and what it reads is computed per part too. Parts are merged in index order.

Where elements along the axis are results themselves (of few queries, what each key receives), they are made of the
complete results and of the products in front of the folds, which the parts leave behind: nothing is multiplied twice.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from tilewright.analysis.online.find_cascades import Cascade, NotApart, operand_of
from tilewright.analysis.online.law import Law, derive
from tilewright.analysis.online.running import Upstream, empty, gap, shown
from tilewright.ir.expr import (
    Axis,
    Expr,
    axes_of,
    axis,
    call,
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

from .cut import Cut


def split_cascade(
    region: Graph, cascade: Cascade, parts: int, even: int = 1
) -> tuple[Graph, frozenset[Value]] | None:
    """The region with the folds of a cascade in so many parts, which begin at multiples of `even` elements; and what
    the parts leave behind: states of folds, and products of which elements are made that leave the region. None if some
    fold cannot follow those that it reads."""
    try:
        made = _Parts(region, cascade, parts, even)
        graph = normalise(made.graph())
    except NotApart:
        return None
    producer = graph.producer()
    return graph, frozenset(v for v in (*made.states.values(), *made.left.values()) if v in producer)


@dataclass(frozen=True, slots=True)
class _Follower:
    """How a fold follows others: by `state` (an op that makes the law's only state), beside `statistic` if there is
    one; `finish` makes its result of the state (operand 0) and complete results."""

    state: Op
    law: Law
    statistic: Value | None
    finish: Op | None


class _Parts:
    """Writes the region with a cascade in parts: `made` are the values of the parts as others see them, `states` those
    of the folds as they are merged, `left` those of the `borders`."""

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
        self.fresh = 1 + max(v.id for op in region.ops for v in (*op.inputs, *op.outputs))
        laws = _Laws(region, cascade)
        self.followers = {f: laws.follower(f) for f in cascade.reductions}
        self.shown = {x.statistic for x in self.followers.values() if x is not None and _raw(x.law)}

    def graph(self) -> Graph:
        later: set[Value] = set()
        for op in self.region.ops:
            assert op.expr is not None
            if op in self.cascade.reductions:
                self.fold(op, self.cascade.reductions[op])
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

    # -- folds

    def fold(self, op: Op, a: Axis) -> None:
        """The fold by parts, and the fold of the parts."""
        follower = self.followers[op]
        state = op if follower is None else follower.state
        expr = state.expr
        assert expr is not None and expr.reduction is not None
        body = tuple(self.moved(state, b, a) for b in expr.body)
        if self.inside is not None:
            body = tuple(
                _guarded(self.inside, b, n) for b, n in zip(body, expr.reduction.identity, strict=True)
            )
        only = replace(expr.reduction, finish=(slot("a", 0, expr.reduction.state[0]),))
        made = TensorExpr((self.p, *expr.axes), body, (self.q,), only)
        part = self.emit(op, op.name, self.inputs(state), made)
        self.states[op.output] = self.made[op.output] = part
        if op.output in self.shown:
            own = _own(part)
            seen = where(_nothing(own, expr.reduction.combiner), const(0, part.dtype), own)
            self.made[op.output] = self.emit(
                op, "shown", (part,), TensorExpr(output_axes(part.shape), (seen,))
            )
        self.merge(op, part, follower)

    def merge(self, op: Op, part: Value, follower: _Follower | None) -> None:
        """The fold of the parts, each brought to the statistic of all."""
        expr = op.expr if follower is None else follower.state.expr
        assert expr is not None
        body = own = read(0, (axis(self.p), *map(position, expr.axes)), part.dtype)
        inputs = (part,)
        if follower is not None and follower.statistic is not None:
            states = self.states[follower.statistic]
            inputs = (part, states, follower.statistic)
            place = follower.law.statistics[0].leaf.args
            before = read(1, (axis(self.p), *place), states.dtype)
            body = _brought(follower.law, own, before, read(2, place, states.dtype))
        whole = TensorExpr(expr.axes, (body,), (self.p,), expr.reduction)
        finish = None if follower is None else follower.finish
        if finish is None:
            self.ops.append(Op(op.name, inputs, op.outputs, expr=whole, origin=op.origin))
            return
        total = self.emit(op, op.name, inputs, whole)
        self.ops.append(replace(finish, inputs=(total, *finish.inputs[1:])))


def _borders(region: Graph, cascade: Cascade) -> frozenset[Value]:
    """Folds over other axes from which values along the cascade's axis are made that leave the region; rounded, where
    that is how all readers see them. Raises NotApart if one has more elements than any value that leaves."""
    producer, consumers = region.producer(), region.consumers()
    found: set[Value] = set()
    kept = [v for v in region.kept() if v in cascade.along]
    todo, done = list(kept), set(kept)
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
    if any(not any(dims.at_least(dims.sub(v.numel, b.numel), 0) for v in kept) for b in found):
        raise NotApart
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


def _guarded(inside: Expr, body: Expr, neutral: Expr) -> Expr:
    """`body` where `inside` holds, else `neutral`; the factors of a product one by one, so that it stays one."""
    if body.op == "mul" and neutral.value == 0:
        return call("mul", *(_guarded(inside, f, neutral) for f in body.args))
    if body.op == "where" and body.args[0] is inside:
        return body
    return where(inside, body, neutral)


def _own(v: Value) -> Expr:
    """A value's own element where an op has its shape."""
    return read(0, tuple(map(position, output_axes(v.shape))), v.dtype)


def _nothing(state: Expr, combiner: str | None) -> Expr:
    """Whether an extreme has seen nothing but its identity."""
    return call("eq", state, const(-math.inf if combiner == "maximum" else math.inf, state.dtype))


def _brought(law: Law, own: Expr, before: Expr, after: Expr) -> Expr:
    """The state `own`, whose statistic stood at `before`, where it stands at `after`."""
    gaps: list[Expr] = []
    for k, g in enumerate(law.statistics):
        old = substitute(g.through, {g.leaf: before})
        new = substitute(g.through, {g.leaf: shown(g, after, None, None)})
        gaps.append(gap(g, before, old, new, law.falls(k)))
    return law.rescaled(0, [own], gaps)


class _Laws:
    """The online law of folds, their bodies taken down to what they read of folds and of memory."""

    def __init__(self, region: Graph, cascade: Cascade) -> None:
        self.producer = region.producer()
        self.folds = {f.output: (f, a) for f, a in cascade.reductions.items()}
        self.values = {v.id: v for op in region.ops for v in (*op.inputs, *op.outputs)}

    def follower(self, op: Op) -> _Follower | None:
        """How a fold of the cascade follows others; None if it reads none. Raises NotApart if it cannot."""
        assert op.expr is not None and op.expr.reduction is not None
        body = self.composed(op, op.expr.body[0])
        leaves = [x for x in dict.fromkeys(walk(body)) if self.member(x) is not None]
        if not leaves:
            return None
        if any(x.dtype.is_half or axis(a) in axes_of(x) for x in leaves for a in op.expr.reduce):
            raise NotApart
        upstream = tuple(self.upstream(x, op.expr.reduce[0]) for x in leaves)
        law = derive(op.expr.reduction, (body,), upstream, op.expr.reduce)
        if not isinstance(law, Law) or law.hazard or law.rank > 1 or len(law.statistics) > 1:
            raise NotApart
        if any(g.centred or not g.closed for g in law.statistics):
            raise NotApart
        made = law.states[0]
        expr = replace(op.expr, reduction=made.reduction)
        state = self.as_op(op, expr, (made.body,), ())
        statistic = self.member(law.statistics[0].leaf) if law.statistics else None
        return _Follower(state, law, statistic, self.finish(op, law))

    def upstream(self, leaf: Expr, r: Axis) -> Upstream:
        value = self.member(leaf)
        assert value is not None
        first, a = self.folds[value]
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
        """The fold of the cascade whose result a leaf is."""
        return next((v for v in self.folds if leaf.op == "value" and leaf.value == (v.id, 0)), None)

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


def _raw(law: Law) -> bool:
    """Whether the statistic is read as it is, infinite where there is nothing."""
    return any(g.through is g.leaf for g in law.statistics)
