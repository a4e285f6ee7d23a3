"""Normal form of a graph, in small steps that each keep its meaning: simplify, compose views, share, fold,
drop.

A step maps a graph to a graph. Values that replace others are replaced everywhere: in ops, outputs, writes,
layouts and in the origins, whose library calls must keep fitting.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from types import MappingProxyType

import numpy as np
import torch

from tilewright.interp.graph import run_graph, to_torch
from tilewright.ir.expr import (
    Axis,
    Expr,
    axes_of,
    axis,
    const,
    integer,
    longest_index,
    read,
    substitute,
    transform,
    walk,
)
from tilewright.ir.graph import Graph, Layout, Op, Operand, Value, symbols_in
from tilewright.ir.pattern import ExprRule, Rewriter
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.tuning.input_limits import MODELS
from tilewright.tuning.search_limits import EXPRESSIONS

from .identities import IEEE_RULES

Evaluate = Callable[[Op, Sequence[object]], Sequence[object]]
"""Runs one op on frozen tensors and returns the frozen results."""

_SIMPLER = Rewriter(IEEE_RULES)
_NO_SIZES: Mapping[Expr, object] = MappingProxyType({})


def normalise(graph: Graph, evaluate: Evaluate | None = None) -> Graph:
    """The graph with simplified bodies, views composed into access maps, no op twice, none for nothing. With
    `evaluate`, ops on frozen tensors are folded.

    Views whose only reader is the library call of an origin stay in the graph: a cover that takes the call
    needs them."""
    graph = simplify(graph)
    graph = compose_views(keep_shown_copies(graph))
    if evaluate is not None:
        graph = fold_constants(graph, evaluate)
    graph = simplify(graph)
    graph = share(graph)
    return drop_dead(graph)


def simplify(graph: Graph) -> Graph:
    """Bodies rewritten by the identities that always hold."""

    def change(op: Op) -> Op:
        if op.expr is None:
            return op
        body = tuple(map(_SIMPLER, op.expr.body))
        return op if body == op.expr.body else replace(op, expr=replace(op.expr, body=body))

    return graph.with_ops([change(op) for op in graph.ops])


def without_nothing(graph: Graph) -> Graph:
    """The graph with no reduction over nothing: its results are those of no element. Results of no element are made of
    nothing, so that whoever else works on their sizes reads no memory of theirs."""
    return graph.with_ops([new for op in graph.ops for new in _without_nothing(op)])


def _without_nothing(op: Op) -> tuple[Op, ...]:
    expr = op.expr
    if expr is None:
        return (op,)
    reduction, results = expr.reduction, tuple(const(0, v.dtype) for v in op.outputs)
    if not any(a.extent is dims.ZERO for a in expr.axes):
        if reduction is None or not any(a.extent is dims.ZERO for a in expr.reduce):
            return (op,)
        results = reduction.finished(reduction.identity)
    made = zip(op.outputs, results, strict=True)
    return tuple(
        replace(op, inputs=(), outputs=(v,), expr=TensorExpr(expr.axes, (x,)), origin=-1) for v, x in made
    )


def rules_in_use() -> tuple[ExprRule, ...]:
    """The identities that `simplify` applies."""
    return _SIMPLER.rules


def keep_shown_copies(graph: Graph) -> Graph:
    """The graph with a kernel for each copy that is a result, if another result shows it: both share its memory, and
    not that of what was copied."""
    maker = {v: op for op in graph.ops for v in op.outputs}
    results = [v for v in graph.outputs if isinstance(v, Value)]
    kept: set[Value] = set()
    for result in results:
        op = maker.get(result)
        while op is not None and op.expr is not None and op.expr.is_view() and op.kernel < 0:
            if op.name == "copy" and op.output is not result and op.output in results:
                kept.add(op.output)
            op = maker.get(op.inputs[0])
    if not kept:
        return graph
    free = count(max(op.kernel for op in graph.ops) + 1)
    return graph.with_ops(
        [replace(op, kernel=next(free)) if kept & {*op.outputs} else op for op in graph.ops]
    )


def compose_views(graph: Graph) -> Graph:
    """Reads of a pure view become reads of what it shows, through the composed access map, where it is not too long and
    no kernel is to copy it.

    Library calls and graph outputs keep reading the view itself."""
    views: dict[Value, Op] = {}
    ops: list[Op] = []
    for op in graph.ops:
        new = _through_views(op, views)
        if new.expr is not None and new.expr.is_view() and new.kernel < 0:
            views[new.output] = new
        ops.append(new)
    return graph.with_ops(ops)


def _through_views(op: Op, views: Mapping[Value, Op]) -> Op:
    """`op` with reads of views replaced; its operands are those that it reads, once each, in order of first
    use."""
    expr = op.expr
    if expr is None:
        return op
    shown = tuple(_shown(views.get(v)) for v in op.inputs)
    sources = [view.inputs[0] for v in op.inputs if (view := views.get(v)) is not None]
    number: dict[Value, int] = {}
    for v in (*op.inputs, *sources):
        number.setdefault(v, len(number))
    inputs = tuple(map(number.__getitem__, op.inputs))
    body, order = _composed(expr.body, inputs, shown, tuple(map(number.__getitem__, sources)))
    if body == expr.body and order == inputs:
        return op
    values = list(number)
    op = replace(op, expr=replace(expr, body=body), inputs=tuple(values[n] for n in order))
    read_ = {r.value for b in body for r in walk(b) if r.op == "read"}
    return op if len(read_) == len(order) else tidy_operands(op)  # sides of a choice that became one


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a view shows: an element of its source, of that shape, at its axes."""

    element: Expr
    axes: tuple[Axis, ...]
    shape: tuple[Expr, ...]


def _shown(view: Op | None) -> _Shown | None:
    if view is None or view.expr is None:
        return None
    return _Shown(view.expr.body[0], view.expr.axes, view.inputs[0].shape)


@lru_cache(1 << 12)
def _composed(
    bodies: tuple[Expr, ...],
    inputs: tuple[int, ...],
    shown: tuple[_Shown | None, ...],
    sources: tuple[int, ...],
) -> tuple[tuple[Expr, ...], tuple[int, ...]]:
    """Bodies over tensors of the numbers `inputs`, and what those of them that are views show of the numbers
    `sources`: over what is left to read, and which numbers that is, in order. Layers of a model ask the same."""
    behind = dict(zip([k for k, view in enumerate(shown) if view is not None], sources, strict=True))
    order: dict[int, int] = {}

    def change(r: Expr) -> Expr:
        assert isinstance(r.value, int)
        index = tuple(map_reads(a, change) for a in r.args)
        number, view = inputs[r.value], shown[r.value]
        if view is not None and _keeps_bounds(view, index):
            place = substitute(view.element, dict(zip(map(axis, view.axes), index, strict=True))).args
            if longest_index(place) <= EXPRESSIONS.max_written_index_nodes:
                index, number = place, behind[r.value]
        return read(order.setdefault(number, len(order)), index, r.dtype)

    return tuple(map_reads(b, change) for b in bodies), tuple(order)


def _keeps_bounds(view: _Shown, index: Sequence[Expr]) -> bool:
    """Whether an index from data is out of bounds in what the view shows exactly if it is in the view."""
    shown = view.element.args
    for a, i in zip(view.axes, index, strict=True):
        if any(x.op == "read" for x in walk(i)):
            users = [(p, n) for p, n in zip(shown, view.shape, strict=True) if axis(a) in axes_of(p)]
            if len(users) != 1 or users[0][0] is not axis(a) or not dims.equal(users[0][1], a.extent):
                return False
    return True


def map_reads(e: Expr, change: Callable[[Expr], Expr | None]) -> Expr:
    """`e` with its outermost reads replaced (None = keep)."""
    return transform(e, lambda x: change(x) if x.op == "read" else None)


def tidy_operands(op: Op) -> Op:
    """`op` with the inputs that its expression reads, once each, in order of first use."""
    return _through_views(op, {})


def share(graph: Graph) -> Graph:
    """One op for equal ops on equal inputs (tensor expressions and pure library calls).

    An output of the graph is never shared with another: the caller may change one in place."""
    required = graph.kept()
    bound = bound_symbols(graph)
    alike: dict[object, _Alike] = {}
    same: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in graph.ops:
        if not same.keys().isdisjoint(op.inputs):
            op = replace(op, inputs=tuple(same.get(v, v) for v in op.inputs))
        op = tidy_operands(op)
        key = None if binds(op, bound) else _outline(op)
        first = op if key is None else alike.setdefault(key, _Alike()).first(op)
        if first is op or not required.isdisjoint(op.outputs):
            ops.append(op)
        else:
            same |= dict(zip(op.outputs, first.outputs, strict=True))
    return substitute_values(graph.with_ops(ops), same)


class _Alike:
    """Ops of one outline; what each computes is only looked at when there is a second."""

    def __init__(self) -> None:
        self._only: Op | None = None
        self._seen: dict[object, Op] = {}

    def first(self, op: Op) -> Op:
        """The first op that computes what `op` does: itself if there was none."""
        if self._only is None and not self._seen:
            self._only = op
            return op
        if self._only is not None:
            self._seen[_identity(self._only)] = self._only
            self._only = None
        return self._seen.setdefault(_identity(op), op)


def _outline(op: Op) -> object | None:
    """Equal for ops that compute the same, cheap, and seldom equal for others; None for ops that must stay."""
    if op.expr is not None:
        axes = tuple(a.extent for a in op.expr.axes + op.expr.reduce)
        return op.inputs, op.kernel, axes, tuple(b.op for b in op.expr.body)
    return (op.inputs, op.call.function) if op.call is not None and op.call.pure else None


def _identity(op: Op) -> object:
    """Equal for ops that compute the same, among those with an outline."""
    types = tuple(v.dtype for v in op.outputs)
    if op.expr is not None:
        return op.inputs, types, op.kernel, _canonical(op.expr)
    call = op.call
    assert call is not None
    return (
        op.inputs,
        types,
        call.function,
        _plain(call.args),
        _plain(call.kwargs),
        tuple(v.shape for v in op.outputs),
    )


def _canonical(expr: TensorExpr) -> TensorExpr:
    """The expression over axes named as declarations name them."""
    names = [f"i{k}" for k in range(len(expr.axes))] + [f"r{k}" for k in range(len(expr.reduce))]
    axes = expr.axes + expr.reduce
    if [a.name for a in axes] == names:
        return expr
    return expr.renamed({a: Axis(name, a.extent) for a, name in zip(axes, names, strict=True)})


def _plain(argument: object) -> object:
    """A hashable stand-in: equal by value for plain data, by identity for everything else."""
    if isinstance(argument, (tuple, list)):
        return type(argument), tuple(_plain(a) for a in argument)
    if argument is None or isinstance(argument, (bool, int, float, str, Operand)):
        return type(argument), repr(argument)
    return argument if isinstance(argument, Expr) else _Same(argument)


@dataclass(frozen=True, eq=False)
class _Same:
    """An object that is kept alive and compares by its identity."""

    of: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.of is self.of

    def __hash__(self) -> int:
        return id(self.of)


def bound_symbols(graph: Graph) -> set[Expr]:
    """The sizes that the inputs bind."""
    shapes = [v.shape if isinstance(v, Value) else (v,) for v in graph.inputs]
    return {s for shape in shapes for e in shape for s in dims.symbols_of(e)}


def binds(op: Op, bound: set[Expr]) -> bool:
    """Whether `op` is a library call that binds a size."""
    return (
        bool(op.binds)
        or op.call is not None
        and any(s not in bound for v in op.outputs for e in v.shape for s in dims.symbols_of(e))
    )


def substitute_values(graph: Graph, same: Mapping[Value, Value]) -> Graph:
    """The graph with values replaced wherever they are used (not where they are made)."""
    if not same:
        return graph

    def new(v: Value) -> Value:
        while v in same:
            v = same[v]
        return v

    each = lambda values: tuple(new(v) for v in values)  # noqa: E731
    origins = tuple(replace(o, inputs=each(o.inputs), outputs=each(o.outputs)) for o in graph.origins)
    return replace(
        graph,
        ops=tuple(replace(op, inputs=each(op.inputs)) for op in graph.ops),
        outputs=tuple(new(v) if isinstance(v, Value) else v for v in graph.outputs),
        writes=tuple(replace(w, value=new(w.value)) for w in graph.writes),
        origins=origins,
    )


def fold_constants(graph: Graph, evaluate: Evaluate, limit: int = MODELS.max_folded_elements) -> Graph:
    """Ops that read only frozen tensors become frozen tensors, unless the result is larger than `limit` and
    its inputs.

    Views and ops without inputs (which cost nothing to compute in place) stay. What copies in a kernel of its own
    folds, unless it is a result: other results may show its memory."""
    constants, layouts, kept = dict(graph.constants), dict(graph.layouts), graph.kept()
    ops: list[Op] = []
    for op in graph.ops:
        if _is_left(op, kept) or not is_foldable(op, constants, limit):
            ops.append(op)
            continue
        results = evaluate(op, [constants[v] for v in op.inputs])
        constants |= dict(zip(op.outputs, results, strict=True))
        layouts |= {
            v: layout_of(t) for v, t in zip(op.outputs, results, strict=True) if isinstance(t, torch.Tensor)
        }
    return replace(graph, ops=tuple(ops), constants=constants, layouts=layouts)


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a frozen tensor."""
    return Layout(tuple(integer(s) for s in tensor.stride()))


def _is_left(op: Op, kept: Set[Value]) -> bool:
    """Whether an op is a view of a tensor, or a copy that is a result."""
    return op.expr is not None and op.expr.is_view() and (op.kernel < 0 or op.output in kept)


def is_foldable(op: Op, constants: Container[Value], limit: int = MODELS.max_folded_elements) -> bool:
    """Whether an op that is no view reads only frozen tensors, the `constants`, and its results are small enough."""
    if not op.inputs or not all(v in constants for v in op.inputs):
        return False
    if op.call is not None and not op.call.pure:
        return False
    if symbols_in((op.expr, *((op.call.args, op.call.kwargs) if op.call is not None else ()))):
        return False  # a number that only a call tells is part of the result
    sizes = [dims.static(v.numel) for v in (*op.outputs, *op.inputs)]
    if op.expr is not None:
        sizes += [dims.static(a.extent) for a in op.expr.reduce]
    known = [s for s in sizes if s is not None]
    if len(known) < len(sizes):
        return False
    made, given = known[: len(op.outputs)], known[len(op.outputs) :]
    return max(made) <= max(limit, *given[: len(op.inputs)])


def drop_dead(graph: Graph) -> Graph:
    """Without ops that nobody needs.

    Kept are: what leads to outputs and writes, library calls with effects, calls that bind a size, and the
    views that the library call of an origin reads, if that origin reduces (other origins are never worth a
    call)."""
    producer = graph.producer()
    bound = bound_symbols(graph)
    live: set[Op] = set()
    stack = [op for op in graph.ops if op.call is not None and (not op.call.pure or binds(op, bound))]
    stack += [producer[v] for v in graph.kept() if v in producer]
    used = set(graph.kept())
    while stack:
        op = stack.pop()
        if op in live:
            continue
        live.add(op)
        wanted = set(op.inputs) | _read_by_call(op, graph, producer)
        used |= wanted
        stack += [producer[v] for v in wanted if v in producer]
    constants = {v: t for v, t in graph.constants.items() if v in used}
    return replace(graph, ops=tuple(op for op in graph.ops if op in live), constants=constants)


def _read_by_call(op: Op, graph: Graph, producer: Mapping[Value, Op]) -> set[Value]:
    """What the library call of the origin of a reduction reads beside the op itself: constants, and views."""
    origin = graph.origins[op.origin] if op.origin >= 0 else None
    if origin is None or origin.call is None or op.expr is None or op.expr.reduction is None:
        return set()
    makers = {v: producer.get(v) for v in origin.inputs}
    return {v for v, p in makers.items() if p is None or (p.expr is not None and p.expr.is_view())}


def interpret(op: Op, tensors: Sequence[object], sizes: Mapping[Expr, object] = _NO_SIZES) -> list[object]:
    """An `Evaluate` without a device: the interpreter for expressions, the library for calls. `sizes` are the numbers
    of symbols that the operands' shapes do not tell. Returns torch tensors."""
    outputs = Graph((*op.inputs, *sizes), (op,), op.outputs)
    return [to_torch(np.asarray(x)) for x in run_graph(outputs, [*tensors, *sizes.values()])]
