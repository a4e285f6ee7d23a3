"""Library calls in their fastest form: packed frozen weights, no flattening around them, pointwise readers absorbed.

Capture knows the forms (`LibraryCall.specialise`, `epilogues`, `rows`); here it is decided where they apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ir import dims
from ..ir.expr import Expr, Slot, axes_of, axis, read, slot, substitute, transform, walk
from ..ir.graph import Epilogue, Graph, LibraryCall, Maker, Op, Value
from ..ir.pattern import COMMUTATIVE, Rewriter
from ..ir.tensor import TensorExpr, output_axes
from ..rewrite.normalise import compose_views, substitute_values
from ..rewrite.rules import IEEE_RULES
from ..target import Target
from .library import live

LONGEST = 8
"""Pointwise ops that may become one epilogue."""


def specialise(graph: Graph, target: Target, maker: Maker | None = None, *, exact: bool = True) -> Graph:
    """The graph with every library call in the fastest form that its frozen operands and its readers allow on the
    machine `target`; `maker` may have code of its own for products with frozen weights.

    Runs after library selection on a normalised graph. With `exact`, no epilogue is taken that turns NaN into a
    number where the op itself does not."""
    graph = live(unflatten(pack(graph, target, maker)))
    return live(absorb(graph, exact=exact))


# --- frozen operands -----------------------------------------------------------------------------


def pack(graph: Graph, target: Target, maker: Maker | None = None) -> Graph:
    """Calls replaced by what they become when they know their frozen operands (constants, or views of them)."""
    frozen = _Frozen(graph)
    return graph.with_ops([_packed(op, frozen, target, maker) for op in graph.ops])


def _packed(op: Op, frozen: _Frozen, target: Target, maker: Maker | None) -> Op:
    call = op.call
    if call is None or call.specialise is None:
        return op
    known = {k: t for k, v in enumerate(op.inputs) if (t := frozen.tensor(v)) is not None}
    faster = call.specialise(call, known, maker, target)
    if faster is None:
        return op
    return replace(op, call=faster, inputs=tuple(v for k, v in enumerate(op.inputs) if k not in known))


class _Frozen:
    """The frozen tensors of a graph, also those seen through views."""

    def __init__(self, graph: Graph) -> None:
        self.constants = graph.constants
        self.producer = graph.producer()

    def tensor(self, v: Value) -> Tensor | None:
        """The frozen tensor that `v` is, sharing memory with the constant; None if it is not one."""
        held = self.constants.get(v)
        if isinstance(held, Tensor):
            return held
        op = self.producer.get(v)
        if op is None or op.expr is None or not op.expr.is_view() or len(op.inputs) != 1:
            return None
        source = self.tensor(op.inputs[0])
        return None if source is None or source.dtype != _dtype_of(op, source) else view_of(source, op.expr)


def _dtype_of(op: Op, source: Tensor) -> torch.dtype | None:
    return source.dtype if op.inputs[0].dtype == op.output.dtype else None


def view_of(source: Tensor, expr: TensorExpr) -> Tensor | None:
    """What a view with constant sizes shows of `source`: the same memory if strides can say it, else a copy."""
    shape = [dims.static(a.extent) for a in expr.axes]
    if any(n is None for n in shape) or axes_of(expr.body[0]) - {axis(a) for a in expr.axes}:
        return None
    sizes = [n or 0 for n in shape]
    index = expr.body[0].args
    offset = dims.add(*(dims.mul(i, dims.integer(s)) for i, s in zip(index, source.stride(), strict=True)))
    steps = [dims.coefficient(offset, axis(a)) for a in expr.axes]
    start = dims.static(substitute(offset, {axis(a): dims.ZERO for a in expr.axes}))
    numbers = [None if s is None else dims.static(s) for s in steps]
    if start is not None and all(n is not None and n >= 0 for n in numbers):
        fixed = [n or 0 for n in numbers]
        terms = [dims.mul(axis(a), dims.integer(n)) for a, n in zip(expr.axes, fixed, strict=True)]
        if dims.equal(dims.add(dims.integer(start), *terms), offset):
            return source.as_strided(sizes, fixed, source.storage_offset() + start)
    return _gathered(source, index, expr, sizes)


def _gathered(source: Tensor, index: Sequence[Expr], expr: TensorExpr, sizes: Sequence[int]) -> Tensor | None:
    """A view that strides cannot say, as a copy: only where it merges or splits dims of dense memory."""
    flat = dims.add(*(dims.mul(i, s) for i, s in zip(index, dims.dense_strides(_sizes(source)), strict=True)))
    dense = dims.add(
        dims.ZERO,
        *(dims.mul(axis(a), s) for a, s in zip(expr.axes, dims.dense_strides(expr.shape), strict=True)),
    )
    return source.reshape(tuple(sizes)) if dims.equal(flat, dense) else None


def _sizes(t: Tensor) -> tuple[Expr, ...]:
    return tuple(dims.integer(n) for n in t.shape)


# --- leading dims --------------------------------------------------------------------------------


def unflatten(graph: Graph) -> Graph:
    """Calls that take any leading dims read their operand as it was before it was flattened.

    What they make then has the same leading dims; a view gives the other readers the flat one."""
    producer = graph.producer()
    next_id = 1 + max((v.id for v in _values(graph)), default=0)
    ops: list[Op] = []
    for op in graph.ops:
        source = _unflat(op, producer)
        if source is None:
            ops.append(op)
            continue
        call = op.call
        assert call is not None and call.rows is not None
        flat = op.output
        wide = Value(next_id, (*source.shape[:-1], flat.shape[-1]), flat.dtype)
        next_id += 1
        inputs = tuple(source if k == call.rows else v for k, v in enumerate(op.inputs))
        ops.append(
            replace(
                op,
                inputs=inputs,
                outputs=(wide,),
                call=replace(call, strides=(dims.dense_strides(wide.shape),)),
            )
        )
        ops.append(_flatten(wide, flat, op.origin))
        producer[flat] = ops[-1]
    return _without_identities(compose_views(graph.with_ops(ops)))


def _without_identities(graph: Graph) -> Graph:
    """Values that are a library result seen unchanged take its place."""
    producer, kept = graph.producer(), graph.kept()
    same: dict[Value, Value] = {}
    gone: set[Op] = set()
    for op in graph.ops:
        if op.expr is None or not op.expr.is_view() or len(op.inputs) != 1:
            continue
        source, shown = op.inputs[0], op.output
        here = [_place(a.extent, axis(a)) for a in op.expr.axes]
        unchanged = (
            source.shape == shown.shape and list(op.expr.body[0].args) == here and source.dtype == shown.dtype
        )
        maker = producer.get(source)
        if (
            unchanged
            and maker is not None
            and maker.call is not None
            and source not in kept
            and source not in same
        ):
            same[source] = shown
            gone.add(op)
    ops = [
        replace(op, outputs=tuple(same.get(v, v) for v in op.outputs)) for op in graph.ops if op not in gone
    ]
    return substitute_values(graph.with_ops(ops), same)


def _values(graph: Graph) -> list[Value]:
    inputs = [v for v in graph.inputs if isinstance(v, Value)]
    return [*inputs, *graph.constants, *(v for op in graph.ops for v in op.outputs)]


def _unflat(op: Op, producer: Mapping[Value, Op]) -> Value | None:
    """The tensor whose leading dims an operand of `op` has flattened, if the call takes it as it is."""
    call = op.call
    if call is None or call.rows is None or len(op.outputs) != 1 or len(op.output.shape) != 2:
        return None
    v = op.inputs[call.rows]
    if op.inputs.count(v) > 1:
        return None
    view = producer.get(v)
    if view is None or view.expr is None or not view.expr.is_view() or len(view.inputs) != 1:
        return None
    source = view.inputs[0]
    if len(source.shape) < 3 or source.dtype != v.dtype or len(v.shape) != 2:
        return None
    rows, last = output_axes(v.shape)
    expected = (
        *_unravel(_place(rows.extent, axis(rows)), source.shape[:-1]),
        _place(last.extent, axis(last)),
    )
    body = substitute(
        view.expr.body[0], {axis(a): axis(b) for a, b in zip(view.expr.axes, (rows, last), strict=True)}
    )
    same = len(body.args) == len(expected) and all(
        dims.equal(a, b) for a, b in zip(body.args, expected, strict=True)
    )
    return source if same else None


def _place(extent: Expr, index: Expr) -> Expr:
    return dims.ZERO if extent is dims.ONE else index


def _unravel(index: Expr, sizes: Sequence[Expr]) -> list[Expr]:
    """The place in dims of `sizes` of element number `index` in row-major order."""
    found: list[Expr] = []
    for k, size in enumerate(sizes):
        whole = dims.floordiv(index, dims.prod(sizes[k + 1 :]))
        found.append(whole if k == 0 else dims.mod(whole, size))
    return [_place(size, i) for i, size in zip(found, sizes, strict=True)]


def _flatten(wide: Value, flat: Value, origin: int) -> Op:
    axes = output_axes(flat.shape)
    rows, last = (_place(a.extent, axis(a)) for a in axes)
    body = read(0, (*_unravel(rows, wide.shape[:-1]), last), wide.dtype)
    return Op("view", (wide,), (flat,), expr=TensorExpr(axes, (body,)), origin=origin)


# --- epilogues -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Match:
    """`ops` (the last makes the result) become the epilogue `call` of a library op; `second` is its further operand."""

    ops: tuple[Op, ...]
    call: LibraryCall
    second: Value | None


def absorb(graph: Graph, *, exact: bool = True) -> Graph:
    """Pointwise ops that alone read a call's result, and that the call can do itself, become part of the call."""
    while True:
        finder = _Finder(graph, exact)
        matches: dict[Op, _Match] = {}
        taken: set[Op] = set()
        for op in graph.ops:
            match = None if op in taken else finder.match(op)
            if match is not None and not taken.intersection(match.ops):
                matches[op] = match
                taken.update(match.ops)
        if not matches:
            return graph
        graph = _replaced(graph, matches)


class _Finder:
    def __init__(self, graph: Graph, exact: bool) -> None:
        self.graph, self.exact = graph, exact
        self.consumers = graph.consumers()
        self.kept = graph.kept()
        self.frozen = _Frozen(graph)
        self.position = {op: n for n, op in enumerate(graph.ops)}
        self.simplify = _simplify

    def match(self, op: Op) -> _Match | None:
        """The longest run of pointwise readers that is an epilogue of the call of `op`."""
        call = op.call
        offers = [e for e in call.epilogues if not (self.exact and e.hides_nan)] if call is not None else []
        if not offers or len(op.outputs) != 1 or op.output in self.kept:
            return None
        best: _Match | None = None
        run = _Run(self, op.output, max(0, call.channel % max(1, len(op.output.shape)) if call else 0))
        for last in run.grow():
            if not run.closed(last) or not self._lies_well(op, last):
                continue
            found = self._offer(op, offers, run, last)
            best = found or best
        return best

    def _lies_well(self, op: Op, last: Op) -> bool:
        """Whether a result that leaves the graph may have the strides that the call gives it."""
        layout = self.graph.layouts.get(last.output)
        if last.output not in self.kept or layout is None or op.call is None or not op.call.strides:
            return True
        pairs = zip(layout.strides, op.call.strides[0], last.output.shape, strict=False)
        return all(size is dims.ONE or dims.equal(a, b) for a, b, size in pairs)

    def _offer(self, op: Op, offers: Sequence[Epilogue], run: _Run, last: Op) -> _Match | None:
        body = self.simplify(run.bodies[last.output])
        for epilogue in offers:
            if epilogue.extra != run.extra:
                continue
            constants = match_body(self.simplify(epilogue.template), body)
            if constants is None:
                continue
            vector: object = None
            if epilogue.extra == "channel":
                assert run.second is not None
                vector = self.frozen.tensor(run.second)
            made = epilogue.make(constants, vector)
            second = run.second if epilogue.extra == "equal" else None
            if made.reuses is not None and made.reuses >= 0 and not self._may_reuse(op, run, last):
                continue
            return _Match(tuple(run.ops_of(last)), made, second)
        return None

    def _may_reuse(self, op: Op, run: _Run, last: Op) -> bool:
        """Whether the call may write over the second operand: it is memory of its own, of the call's strides, and all
        else that reads it comes before, as a library call that `op` depends on."""
        v = run.second
        assert v is not None
        maker = self.frozen.producer.get(v)
        if maker is None or maker.call is None or v in self.kept or maker.call.reuses is None:
            return False
        if not maker.call.strides or op.call is None or maker.call.strides[0] != op.call.strides[0]:
            return False
        before = self._ancestors(op)
        readers = [r for r in self.consumers.get(v, []) if r is not last and r not in run.ops]
        return all(r.call is not None and r in before and r.call.reuses == -1 for r in readers)

    def _ancestors(self, op: Op) -> set[Op]:
        found: set[Op] = set()
        todo = [op]
        while todo:
            for v in todo.pop().inputs:
                maker = self.frozen.producer.get(v)
                if maker is not None and maker not in found:
                    found.add(maker)
                    todo.append(maker)
        return found


_simplify = Rewriter(IEEE_RULES)


class _Run:
    """Pointwise ops behind a call's result `start`, with their bodies over slots: e0 is its element, e1 that of a
    `second` tensor, which is of the same shape or a frozen vector along dim `channel`."""

    def __init__(self, finder: _Finder, start: Value, channel: int) -> None:
        self.finder, self.start, self.channel = finder, start, channel
        self.ops: list[Op] = []
        self.bodies: dict[Value, Expr] = {start: slot("e", 0, start.dtype)}
        self.second: Value | None = None
        self.extra = ""

    def grow(self) -> list[Op]:
        """Take ops in, nearest first; returns them."""
        todo = list(self.finder.consumers.get(self.start, []))
        while todo and len(self.ops) < LONGEST:
            op = min(todo, key=lambda o: self.finder.position[o])
            todo.remove(op)
            if op in self.ops or not self._take(op):
                continue
            todo += self.finder.consumers.get(op.output, [])
        return list(self.ops)

    def _take(self, op: Op) -> bool:
        e = op.expr
        if (
            e is None
            or not e.is_pointwise
            or e.shape != self.start.shape
            or op.output.dtype != self.start.dtype
        ):
            return False
        here = [_place(a.extent, axis(a)) for a in e.axes]
        table: dict[Expr, Expr] = {}
        second, extra = self.second, self.extra
        for r in e.reads():
            assert isinstance(r.value, int)
            v = op.inputs[r.value]
            if v in self.bodies:
                if list(r.args) != here:
                    return False
                table[r] = self.bodies[v]
                continue
            kind = self._kind(v, r, here)
            if not kind or (second is not None and second is not v):
                return False
            second, extra = v, kind
            table[r] = slot("e", 1, v.dtype)
        self.second, self.extra = second, extra
        body = transform(e.body[0], table.get)
        if axes_of(body):
            return False
        self.bodies[op.output] = body
        self.ops.append(op)
        return True

    def _kind(self, v: Value, r: Expr, here: list[Expr]) -> str:
        if v.dtype != self.start.dtype:
            return ""
        if v.shape == self.start.shape and list(r.args) == here:
            return "" if self.finder.frozen.tensor(v) is not None else "equal"
        along = [i for i in r.args if i is not dims.ZERO]
        fits = (
            len(along) == 1 and along[0] is here[self.channel] and v.numel is self.start.shape[self.channel]
        )
        return "channel" if fits and self.finder.frozen.tensor(v) is not None else ""

    def ops_of(self, last: Op) -> list[Op]:
        """The ops that `last` needs, itself at the end."""
        needed = {last}
        for op in reversed(self.ops):
            if any(op.output in o.inputs for o in needed):
                needed.add(op)
        return [op for op in self.ops if op in needed]

    def closed(self, last: Op) -> bool:
        """Whether nothing but the ops up to `last` reads what they make on the way."""
        inside = self.ops_of(last)
        within = [self.start, *(op.output for op in inside if op is not last)]
        readers = [r for v in within for r in self.finder.consumers.get(v, [])]
        uses_second = self.second is None or any(self.second in op.inputs for op in inside)
        return uses_second and not self.finder.kept.intersection(within) and all(r in inside for r in readers)


def match_body(template: Expr, body: Expr) -> tuple[float, ...] | None:
    """The constants c0, c1, ... with which `template` is `body`; None if there are none. Arguments of commutative
    operations may stand in either order."""
    found: dict[int, float] = {}
    if template is not body and not _same(template, body, found):
        return None
    wanted = {x.value.index for x in walk(template) if isinstance(x.value, Slot) and x.value.side == "c"}
    return tuple(found[k] for k in sorted(wanted)) if wanted <= set(found) else None


def _same(t: Expr, e: Expr, found: dict[int, float]) -> bool:
    if isinstance(t.value, Slot) and t.value.side == "c":
        if e.op != "const" or e.dtype != t.dtype or isinstance(e.value, Slot):
            return False
        number = float(e.value)  # type: ignore[arg-type]
        return found.setdefault(t.value.index, number) == number
    if t is e:
        return True
    if t.op != e.op or t.dtype != e.dtype or t.value != e.value or len(t.args) != len(e.args) or not t.args:
        return False
    orders = [e.args, e.args[::-1]] if t.op in COMMUTATIVE else [e.args]
    for args in orders:
        trial = dict(found)
        if all(_same(a, b, trial) for a, b in zip(t.args, args, strict=True)):
            found.update(trial)
            return True
    return False


def _replaced(graph: Graph, matches: Mapping[Op, _Match]) -> Graph:
    """The graph with each op and the ops of its match as one, at the place of the last of them."""
    at = {match.ops[-1]: _fused(op, match) for op, match in matches.items()}
    gone = {*matches, *(o for match in matches.values() for o in match.ops)}
    return graph.with_ops([at.get(op, op) for op in graph.ops if op in at or op not in gone])


def _fused(op: Op, match: _Match) -> Op:
    last, call = match.ops[-1], match.call
    second = () if match.second is None else (match.second,)
    origins = tuple(dict.fromkeys(o.origin for o in match.ops if o.origin >= 0 and o.origin != op.origin))
    assert op.call is not None
    call = replace(call, strides=op.call.strides)  # the leading dims may be others than at capture
    return replace(
        op, call=call, inputs=(*op.inputs, *second), outputs=last.outputs, absorbed=(*op.absorbed, *origins)
    )
