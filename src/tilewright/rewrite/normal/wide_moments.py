"""Means that hold all digits of singles where distances from them are taken, and the squares of these distances.

    s[i] = sum over r of x(i, r)        m[i] = s[i] / N        d[i] = sum over r of (x(i, r) - m[i])^2

A mean of singles is off by half a unit in its last place or more. Of equal elements no distance is 0 then, and a norm
with a small variance makes that error large. Libraries for a CPU keep these sums in doubles, or take them in steps that
are exact there. Sums in doubles would halve the lanes of each vector. Where squares are summed, the pass that sums them
sums the distances as well, in singles, and one step in doubles for each i corrects both:

    c[i] = sum over r of (x(i, r) - m[i])
    m[i] + c[i] / N   for m[i]          d[i] - c[i]^2 / N   for d[i]

Equal elements have distances of a few units in the last place of x: sums of these and of their squares are exact, and
so are both corrections. But c is off by units of the distances, not of the mean: a mean that is a result, or read by
more than distances, is summed in doubles instead. With n[i], the single next to it, in the place of m[i], the squares
are then d[i] - N * (m[i] - n[i])^2. So is a mean of which no squares are taken: to correct would take a pass more.

Where many elements are equal, so are their squares, and a chain of singles rounds them alike: their sum is off by units
in its last place. Where it only scales elements, as in a norm, that is borne, as a library's layer norm bears it. A
variance that is a result (what a norm saves for its gradient is one), is written, or is read by more, is made of
doubles throughout.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.analysis.moments import Moments, is_difference, is_quotient, is_square, is_sum, operand
from tilewright.ir.dtype import DType, f32, f64
from tilewright.ir.expr import Expr, axis, call, cast, const, make, read, transform, walk, where
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.reduction import sum_
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes

from .normalise import drop_dead

ROUNDED = frozenset({"read", "const", "cast", "add", "sub", "mul", "div", "maximum", "sqrt", "rsqrt"})
"""Arithmetic that only rounds: doubles give what singles give, but closer."""


def widen_moments(graph: Graph) -> Graph:
    """The graph with doubles for singles as each mean of singles from which distances of its own elements are taken, as
    the sum of their squares, and as what is made of these, or of these and stored values beside them.
    Those of halves stay: singles hold them well."""
    rewriter = _Rewriter(graph)
    for op in graph.ops:
        rewriter.add(op)
    return drop_dead(graph.with_ops(rewriter.ops)) if rewriter.in_f64 else graph


class _Rewriter:
    """The ops so far, and the doubles that stand beside singles."""

    def __init__(self, graph: Graph) -> None:
        self.producer, self.consumers = graph.producer(), graph.consumers()
        self.fresh = graph.fresh_id()
        self.ops: list[Op] = []
        self.in_f64: dict[Value, Value] = {}
        self.replaced: set[Op] = set()
        self.place = {v: k for k, op in enumerate(graph.ops) for v in op.outputs}
        self.stored = {*graph.inputs, *graph.constants}
        self.kept = graph.kept()

    def add(self, op: Op) -> None:
        """Take `op` over, in doubles where it should be, and its result in singles for others."""
        if op.kernel >= 0:  # an op between two of a chosen kernel would wait for it, and it for that op
            self.ops.append(op)
            return
        e = op.expr
        moments = self.moments(op)
        if op in self.replaced:
            return
        if moments is not None:
            (self.summed if self.leaves(moments.mean.output) else self.correct)(moments)
        elif e is None or e.scan is not None or len(op.outputs) != 1 or op.output.dtype is not f32:
            self.ops.append(op)
        elif e.reduction is not None:
            known = any(v in self.in_f64 for v in op.inputs)
            self.take(op, is_sum(op) and (known or self.makes_mean(op)))
        elif self.reads_f64(op):
            self.take(op, True)
        else:
            known = any(v in self.in_f64 for v in op.inputs) and not self.is_of_rounded(op)
            if known and _is_distance(op):
                self.ops.append(self.over_f64(op, replace(e, body=(cast(self.wide(op), f32),))))
            else:
                self.take(op, known and is_square(op))

    def take(self, op: Op, wide: bool) -> None:
        """`op` as it is, or the same in doubles and the rounded one."""
        if not wide or op.expr is None:
            self.ops.append(op)
            return
        reducer = None if op.expr.reduction is None else sum_(f64)
        made = self.new_f64(op.output)
        double = self.over_f64(op, replace(op.expr, body=(self.wide(op),), reduction=reducer))
        self.ops += [replace(double, outputs=(made,)), _rounded(op, made)]

    def new_f64(self, v: Value) -> Value:
        """A new value for `v` in doubles."""
        self.in_f64[v] = self.new(v, f64)
        return self.in_f64[v]

    def new(self, v: Value, dtype: DType) -> Value:
        """A value with the shape of `v`."""
        self.fresh += 1
        return replace(v, id=self.fresh - 1, dtype=dtype)

    def moments(self, mean: Op) -> Moments | None:
        """The moments of which an op is the mean, if they are those of singles in memory."""
        if not is_quotient(mean) or mean.inputs[0] not in self.producer or mean.inputs[0] in self.in_f64:
            return None
        total = self.producer[mean.inputs[0]]
        for square in filter(is_square, self.consumers.get(mean.output, [])):
            for squares in self.consumers.get(square.output, []):
                found = Moments(total, mean, square, squares)
                if squares in self.replaced or _is_chosen(found) or not found.hold():
                    continue
                if self.only_scales(found):
                    return found
        return None

    def only_scales(self, x: Moments) -> bool:
        """Whether all that is made of the squares is what elements are multiplied with or divided by, as in a norm."""
        todo, seen = [x.squares.output], set[Value]()
        while todo:
            v = todo.pop()
            if v in seen:
                continue
            seen.add(v)
            readers = self.consumers.get(v, [])
            if v in self.kept or not all(map(_is_pointwise, readers)):
                return False
            todo += [op.output for op in readers if not _scales(op, v, x.square.output)]
        return True

    def leaves(self, mean: Value) -> bool:
        """Whether a mean is more than what is taken from elements."""
        readers = self.consumers.get(mean, [])
        return mean in self.kept or not all(_only_subtracts(op, mean) for op in readers)

    def correct(self, x: Moments) -> None:
        """The moments, corrected by the sum of all distances."""
        assert x.mean.expr and x.square.expr and x.squares.expr
        near, distance = self.new(x.mean.output, f32), self.new(x.square.output, f32)
        left, rough = (self.new(x.squares.output, f32) for _ in range(2))
        inputs = tuple(near if v is x.mean.output else v for v in x.square.inputs)
        away = replace(x.square.expr, body=(x.square.expr.body[0].args[0],))
        mean, squares = self.new_f64(x.mean.output), self.new_f64(x.squares.output)
        axes = output_axes(near.shape)
        index = [dims.ZERO if a.extent is dims.ONE else axis(a) for a in axes]
        first, rest, d = (cast(read(k, index, f32), f64) for k in range(3))
        share = call("div", rest, x.count)
        known = where(call("isnan", share), const(0, f64), share)  # of elements that are not all finite
        less = call("maximum", call("sub", d, call("mul", rest, share)), const(0, f64))
        self.ops += [
            replace(x.mean, outputs=(near,)),
            replace(x.square, inputs=inputs),
            Op("distance", inputs, (distance,), expr=away, origin=x.square.origin),
            replace(x.squares, outputs=(rough,)),
            replace(x.squares, inputs=(distance,), outputs=(left,)),
            Op("mean", (near, left, rough), (mean,), expr=TensorExpr(axes, (call("add", first, known),)),
               origin=x.mean.origin),
            Op("squares", (near, left, rough), (squares,), expr=TensorExpr(axes, (less,)), origin=x.squares.origin),
            _rounded(x.mean, mean), _rounded(x.squares, squares),
        ]  # fmt: skip
        self.replaced |= {x.square, x.squares}

    def summed(self, x: Moments) -> None:
        """The moments over a sum in doubles."""
        assert x.total.expr and x.mean.expr and x.square.expr and x.squares.expr
        near, rough = self.new(x.mean.output, f32), self.new(x.squares.output, f32)
        total = self.in_f64.get(x.total.output)
        if total is None:
            total = self.new_f64(x.total.output)
            wide = replace(x.total.expr, body=(self.wide(x.total),), reduction=sum_(f64))
            self.ops.append(self.over_f64(replace(x.total, outputs=(total,)), wide))
        mean, squares = self.new_f64(x.mean.output), self.new_f64(x.squares.output)
        axes = output_axes(near.shape)
        index = [dims.ZERO if a.extent is dims.ONE else axis(a) for a in axes]
        first, m, d = read(0, index, f64), cast(read(0, index, f32), f64), cast(read(2, index, f32), f64)
        off = call("sub", read(1, index, f64), m)
        square = call("mul", x.count, call("mul", off, off))
        less = call("maximum", call("sub", d, square), const(0, f64))
        self.ops += [
            Op("mean", (total,), (mean,), expr=TensorExpr(axes, (call("div", first, x.count),)), origin=x.mean.origin),
            replace(_rounded(x.mean, mean), outputs=(near,)),
            replace(x.square, inputs=tuple(near if v is x.mean.output else v for v in x.square.inputs)),
            replace(x.squares, outputs=(rough,)),
            Op("squares", (near, mean, rough), (squares,), expr=TensorExpr(axes, (less,)), origin=x.squares.origin),
            _rounded(x.mean, mean), _rounded(x.squares, squares),
        ]  # fmt: skip
        self.replaced |= {x.square, x.squares}

    def over_f64(self, op: Op, expr: TensorExpr) -> Op:
        """`op` with `expr` over what it reads, in doubles where that is known."""
        return replace(op, inputs=tuple(self.in_f64.get(v, v) for v in op.inputs), expr=expr)

    def wide(self, op: Op) -> Expr:
        """The element of `op` in doubles."""
        assert op.expr is not None

        def visit(e: Expr) -> Expr | None:
            if e.dtype is not f32:
                return None
            if e.op == "read":
                assert isinstance(e.value, int)
                known = op.inputs[e.value] in self.in_f64
                return read(e.value, e.args, f64) if known else cast(e, f64)
            if e.op == "cast":
                return cast(e.args[0], f64)
            return make("const", (), f64, e.value) if e.op == "const" else None

        return transform(op.expr.body[0], visit)

    def makes_mean(self, total: Op) -> bool:
        """Whether a sum of singles, divided, is what distances of its elements are taken from, but for moments."""
        assert total.expr is not None
        x = total.expr.body[0]
        if x.op != "read" or x.dtype is not f32:
            return False
        source = total.inputs[operand(x)]
        means = [op for op in self.consumers.get(total.output, []) if is_quotient(op)]
        if any(self.moments(m) is not None for m in means):
            return False
        readers = [r for m in means for r in self.consumers.get(m.output, []) if source in r.inputs]
        return any(is_square(r) or _is_distance(r) for r in readers)

    def is_of_rounded(self, op: Op) -> bool:
        """Whether `op` reads a value known in doubles beside one that is made of that value in singles: between the two
        lies what was rounded away, where the program has two equal numbers."""
        known = {v for v in op.inputs if v in self.in_f64}
        first = min((self.place[v] for v in known if v in self.place), default=0)
        todo, seen = [v for v in op.inputs if v not in known], set[Value]()
        while todo:
            v = todo.pop()
            if v in known:
                return True
            if v not in seen and self.place.get(v, -1) > first:
                seen.add(v)
                todo += self.producer[v].inputs
        return False

    def reads_f64(self, op: Op) -> bool:
        """Whether `op` rounds what it makes of doubles, each with as many values that are stored at most."""
        assert op.expr is not None
        read_ = [op.inputs[operand(r)] for r in op.expr.reads()]
        beside = [v for v in read_ if v not in self.in_f64]
        known = len(beside) < len(read_) and all(
            v in self.stored and v.shape == op.output.shape for v in beside
        )
        return known and all(y.op in ROUNDED for y in walk(op.expr.body[0]) if y.dtype is f32)


def _is_chosen(moments: Moments) -> bool:
    """Whether some of the moments belong to a chosen kernel."""
    return any(op.kernel >= 0 for op in (moments.total, moments.mean, moments.square, moments.squares))


def _rounded(op: Op, wide: Value) -> Op:
    """What makes the result of `op` from the one in doubles."""
    axes = output_axes(wide.shape)
    index = [dims.ZERO if a.extent is dims.ONE else axis(a) for a in axes]
    return Op(
        "round",
        (wide,),
        op.outputs,
        expr=TensorExpr(axes, (cast(read(0, index, f64), f32),)),
        origin=op.origin,
    )


def _is_distance(op: Op) -> bool:
    """Whether an op takes one element from another."""
    return op.expr is not None and op.expr.reduction is None and is_difference(op.expr.body[0])


def _is_pointwise(op: Op) -> bool:
    e = op.expr
    return e is not None and e.reduction is None and e.scan is None and len(op.outputs) == 1


def _scales(op: Op, v: Value, elements: Value) -> bool:
    """Whether an op multiplies what has the shape of `elements` with `v`, or divides it by that, and does no more with
    it."""
    assert op.expr is not None
    for e in walk(op.expr.body[0]):
        for k, part in enumerate(e.args):
            if part.op != "read" or op.inputs[operand(part)] is not v:
                continue
            scaled = e.args[1 - k] if e.op == "mul" or (e.op == "div" and k) else None
            if scaled is None or not any(
                op.inputs[operand(r)].shape == elements.shape for r in _reads(scaled)
            ):
                return False
    return op.expr.body[0].op != "read"


def _reads(e: Expr) -> list[Expr]:
    return [x for x in walk(e) if x.op == "read"]


def _only_subtracts(op: Op, mean: Value) -> bool:
    """Whether all that an op does with a mean is to take it from elements."""
    if op.expr is None or op.expr.body[0].op == "read":
        return False
    return all(
        e.op == "sub" and e.args[1] is part
        for e in walk(op.expr.body[0])
        for part in e.args
        if part.op == "read" and op.inputs[operand(part)] is mean
    )
