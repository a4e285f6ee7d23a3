"""Writes of a part: a written value that is the old one but for a box of its elements becomes the lines of that box,
and an op that puts them there.

    v[i] = new[i] if start <= i < stop else x[i]      becomes      lines[j] = new[j + start];  v = x with lines at start

for an input `x` that `v` is written into, with nothing between but steps of this kind. In the memory of the input, this
stores the lines and leaves the rest alone; whether it may is for `analysis/writes` to say. Where it may not, the op is
a copy, as the kernel was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright.ir.dtype import i64
from tilewright.ir.expr import Axis, Expr, axes_of, axis, call, conjuncts, read, substitute, transform, walk
from tilewright.ir.graph import Graph, Layout, Op, Value
from tilewright.ir.ops.strided import nested
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.rewrite.normal.normalise import tidy_operands

from .part import part_call


def with_written_parts(graph: Graph) -> Graph:
    """The graph with lines in place of written values of which only a box is new. Values of kernels that are written
    lie as the inputs do."""
    if not graph.writes:
        return graph
    rewriting = _Rewriting(graph)
    for w in graph.writes:
        given = graph.inputs[w.input]
        assert isinstance(given, Value)
        rewriting.write(given, w.value)
    return rewriting.graph()


@dataclass(frozen=True, slots=True)
class ElementBox:
    """Elements of a tensor: first places and sizes, one for each dim."""

    starts: tuple[Expr, ...]
    sizes: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    """What `op` makes: `new` where the condition holds, else the element of `base` at the same place. Reads count the
    values `over`."""

    op: Op
    axes: tuple[Axis, ...]
    condition: Expr
    new: Expr
    base: Value
    over: tuple[Value, ...]


class _Rewriting:
    def __init__(self, graph: Graph) -> None:
        self.old = graph
        self.producer = graph.producer()
        self.layouts = dict(graph.layouts)
        self.ops: dict[Op, tuple[Op, ...]] = {}
        self.fresh = graph.fresh_id()
        self.same: dict[Value, Value] = {}
        """Values that are written, with what they show all of."""

    def graph(self) -> Graph:
        """With what was found."""
        ops = [new for op in self.old.ops for new in self.ops.get(op, (op,))]
        writes = tuple(replace(w, value=self.same.get(w.value, w.value)) for w in self.old.writes)
        return replace(self.old, ops=tuple(ops), layouts=self.layouts, writes=writes)

    def write(self, given: Value, value: Value) -> None:
        """Look at one write."""
        shown = value
        while (op := self.producer.get(shown)) is not None and _is_same(op):
            shown = op.inputs[0]
        if shown is not value and shown is not given and shown in self.producer:
            self.same[value] = shown
            value = shown
        layout = self.layouts.get(given) or Layout(dims.dense_strides(given.shape))
        if nested(given.shape, layout.strides) is None:
            return
        found: list[tuple[_Choice, ElementBox]] = []
        lines: list[Op] = []
        last = value
        while value is not given:
            op = self.producer.get(value)
            if op is None or op in self.ops:
                return
            if op.call is not None:
                if op.call.over is None or not op.inputs:
                    return
                if op.call.line is not None:
                    lines.append(op)
                value = op.inputs[0]
                continue
            choice = self._choice(op)
            box = box_of(choice.condition, choice.axes) if choice is not None else None
            if choice is None or box is None:
                self._lay(last, layout)
                return
            found.append((choice, box))
            value = choice.base
        for choice, box in found:
            self.ops[choice.op] = self._split(choice, box, layout)
        for op in lines:
            self.ops[op] = self._lined(op, layout)

    def _lined(self, op: Op, layout: Layout) -> tuple[Op, ...]:
        """A copy of the line that a call puts somewhere, as it lies there, and the call with it: who makes the line may
        make the copy as well, where it belongs."""
        call_ = op.call
        assert call_ is not None and call_.line is not None
        at, whole, source = call_.line, op.inputs[0], op.inputs[call_.line.source]
        sizes = tuple(dims.ONE if d == at.dim else n for d, n in enumerate(whole.shape))
        axes = tuple(Axis(f"l{d}", n) for d, n in enumerate(sizes))
        places = [dims.ZERO if a.extent is dims.ONE else axis(a) for a in axes]
        if at.signed and not op.inputs[at.index].shape:
            del places[at.dim]
        shown = places[len(places) - len(source.shape) :]
        here = [dims.ZERO if n is dims.ONE else p for n, p in zip(source.shape, shown, strict=True)]
        line = Value(self.fresh, sizes, whole.dtype)
        self.fresh += 1
        self.layouts[line] = layout
        copied = Op("line", (source,), (line,), TensorExpr(axes, (read(0, here, source.dtype),)))
        inputs = tuple(line if k == at.source else v for k, v in enumerate(op.inputs))
        anyhow = [
            tuple(None if k == at.source else s for k, s in enumerate(x)) for x in (call_.lies, call_.seen)
        ]
        return copied, replace(op, inputs=inputs, call=replace(call_, lies=anyhow[0], seen=anyhow[1]))

    def _lay(self, value: Value, layout: Layout) -> None:
        """A kernel that makes all of a value that is written lays it as the input lies."""
        maker = self.producer.get(value)
        if maker is not None and maker.expr is not None and not maker.expr.is_view():
            self.layouts.setdefault(value, layout)

    def _choice(self, op: Op) -> _Choice | None:
        """What `op` chooses between, with a second choice written into it if that is one between something new and the
        same old elements: of a slice of a row, say."""
        expr = op.expr
        if expr is None or not expr.is_pointwise or expr.body[0].op != "where" or op.kernel >= 0:
            return None
        condition, new, old = expr.body[0].args
        same = [dims.ZERO if a.extent is dims.ONE else axis(a) for a in expr.axes]
        if old.op != "read" or not isinstance(old.value, int) or list(old.args) != same:
            return None
        base = op.inputs[old.value]
        if base.dtype is not op.output.dtype or not all(map(dims.equal, base.shape, op.output.shape)):
            return None
        found = _Choice(op, expr.axes, condition, new, base, op.inputs)
        return self._deeper(found, old)

    def _deeper(self, found: _Choice, old: Expr) -> _Choice:
        new = found.new
        inner = (
            self.producer.get(found.over[new.value])
            if new.op == "read" and isinstance(new.value, int)
            else None
        )
        body = inner.expr.body[0] if inner is not None and inner.expr is not None else None
        if (
            inner is None
            or inner.expr is None
            or body is None
            or not inner.expr.is_pointwise
            or body.op != "where"
        ):
            return found
        count = len(found.over)
        moved = transform(body, lambda x: _counted_from(x, count) if x.op == "read" else None)
        here = substitute(moved, {axis(a): i for a, i in zip(inner.expr.axes, new.args, strict=True)})
        over = (*found.over, *inner.inputs)
        if here.op != "where":
            return found
        second, newer, older = here.args
        if older.op != "read" or not isinstance(older.value, int) or over[older.value] is not found.base:
            return found
        if not _same_where(older.args, old.args, found.condition):
            return found
        return self._deeper(
            replace(found, condition=call("and", found.condition, second), new=newer, over=over), old
        )

    def _split(self, choice: _Choice, box: ElementBox, layout: Layout) -> tuple[Op, ...]:
        """The lines, and the op that puts them where they belong."""
        op, v = choice.op, choice.op.output
        axes = tuple(Axis(a.name, n) for a, n in zip(choice.axes, box.sizes, strict=True))
        places = {
            axis(a): dims.add(dims.ZERO if b.extent is dims.ONE else axis(b), start)
            for a, b, start in zip(choice.axes, axes, box.starts, strict=True)
        }
        lines = Value(self.fresh, box.sizes, v.dtype)
        self.fresh += 1
        self.layouts[lines] = layout
        made = replace(
            op, inputs=choice.over, outputs=(lines,), expr=TensorExpr(axes, (substitute(choice.new, places),))
        )
        call_ = part_call(box.starts, layout.strides)
        return tidy_operands(made), Op("part", (choice.base, lines), (v,), call=call_)


def _is_same(op: Op) -> bool:
    """Whether an op shows all of what it reads, at the same places."""
    if (
        op.expr is None
        or not op.expr.is_view()
        or op.kernel >= 0
        or op.inputs[0].dtype is not op.output.dtype
    ):
        return False
    same = [dims.ZERO if a.extent is dims.ONE else axis(a) for a in op.expr.axes]
    sizes = zip(op.inputs[0].shape, op.output.shape, strict=False)
    alike = len(op.inputs[0].shape) == len(op.output.shape) and all(dims.equal(a, b) for a, b in sizes)
    return alike and list(op.expr.body[0].args) == same


def _counted_from(x: Expr, count: int) -> Expr:
    """A read of operands that stand behind `count` others."""
    assert isinstance(x.value, int)
    args = [transform(a, lambda y: _counted_from(y, count) if y.op == "read" else None) for a in x.args]
    return read(x.value + count, args, x.dtype)


def _same_where(one: Sequence[Expr], other: Sequence[Expr], condition: Expr) -> bool:
    """Whether two places are one where the condition holds."""
    fixed: dict[Expr, Expr] = {}
    for c in conjuncts(condition):
        if c.op == "eq" and c.args[0].op == "axis":
            fixed[c.args[0]] = c.args[1]
    return all(
        dims.equal(substitute(a, fixed), substitute(b, fixed)) for a, b in zip(one, other, strict=True)
    )


_FLIPPED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt", "eq": "eq"}


def box_of(condition: Expr, axes: Sequence[Axis]) -> ElementBox | None:
    """The places where a condition holds, if they are proved to be a box inside the axes, and not all of them."""
    lows: dict[Expr, Expr] = {}
    highs: dict[Expr, Expr] = {}
    names = {axis(a) for a in axes}
    for c in conjuncts(condition):
        if c.op not in _FLIPPED or c.args[0].dtype is not i64:
            return None
        difference = dims.sub(c.args[0], c.args[1])
        bound = axes_of(difference)
        if len(bound) != 1 or not bound <= names or any(x.op in _DATA for x in walk(difference)):
            return None
        (a,) = bound
        step, op = dims.coefficient(difference, a), c.op
        if step is None or dims.static(step) not in (1, -1):
            return None
        rest = dims.sub(difference, dims.mul(a, step))  # a + rest, or rest - a, against 0
        place = dims.mul(rest, dims.integer(-1)) if step is dims.ONE else rest
        if axes_of(rest):
            return None
        op = op if step is dims.ONE else _FLIPPED[op]
        above = dims.add(place, dims.ONE)
        if op in ("ge", "gt", "eq"):
            if a in lows:
                return None
            lows[a] = above if op == "gt" else place
        if op in ("le", "lt", "eq"):
            if a in highs:
                return None
            highs[a] = place if op == "lt" else above
    starts = tuple(lows.get(axis(a), dims.ZERO) for a in axes)
    stops = tuple(highs.get(axis(a), a.extent) for a in axes)
    sizes = tuple(map(dims.sub, stops, starts))
    inside = all(
        dims.at_least(low, 0) and dims.at_least(n, 0) and dims.at_least(dims.sub(a.extent, stop), 0)
        for a, low, stop, n in zip(axes, starts, stops, sizes, strict=True)
    )
    return ElementBox(starts, sizes) if inside and lows.keys() | highs.keys() else None


_DATA = ("read", "var", "value")
