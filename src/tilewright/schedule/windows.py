"""Windows: for each row, the first and last place that a mask made of data lets through, found by a kernel before.

    s[i, j] = x[i, j] where visible(i, j), else c          visible reads ids of documents, flags of blocks, ...
 => first[i] = min over j of (j where visible(i, j)),  last[i] = max over j of (j where visible(i, j))
    s[i, j] = (x[i, j] where visible(i, j), else c) where implied(first[i] <= j <= last[i]), else c

It changes no result, and tells the loop over j where to start and to end (see `ends`): over a block of rows, at the
least first and the greatest last place. That is exact where each row sees one run of places, and more than it sees
otherwise. Masks that are known from data only by numbers that a loop can end at anyway (lengths) need no windows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import IllegalSchedule
from ..ir import dims
from ..ir.dtype import Kind, bool_, i32, i64
from ..ir.expr import (
    Axis,
    Expr,
    axes_of,
    axis,
    call,
    cast,
    conjuncts,
    implied,
    is_const,
    read,
    substitute,
    transform,
    walk,
    where,
)
from ..ir.graph import Graph, Op, Value
from ..ir.kernel import Kernel
from ..ir.program import Loop
from ..ir.reduction import Reduction, maximum, minimum
from ..ir.tensor import TensorExpr, output_axes
from ..rewrite.dependency import Classes, Dependency, classes_of
from ..rewrite.value import Region, ValueAnalysis
from ..tile.sizes import seen_sizes
from .checks import from_data, inside_of
from .predicate import slack_of
from .solver import Solver
from .split import split_fold

WORTH = 8
"""How many times as long as finding windows a kernel must take: what they save is only known at run time."""


def with_windows(graph: Graph, solver: Solver, sizes: Mapping[str, int]) -> Graph:
    """The graph with windows for the kernels that are settled in it and skip whole tiles with them, where finding
    them is cheap beside the kernel at typical `sizes`. Equal masks share windows. Values behind masks are trusted to
    be finite: where the options do not, the graph stays as it is."""
    if solver.options.trim == "exact" or not any(op.kernel >= 0 for op in graph.ops):
        return graph
    with seen_sizes(sizes):
        return _with_windows(graph, solver)


def _with_windows(graph: Graph, solver: Solver) -> Graph:
    made = _Windows(graph, solver)
    settled: dict[int, list[Op]] = {}
    for op in graph.ops:
        if op.kernel >= 0:
            settled.setdefault(op.kernel, []).append(op)
    changed: dict[Op, Op] = {}
    for ops in settled.values():
        changed |= made.trimmed(ops)
    if not changed:
        return graph
    return graph.with_ops([x for op in graph.ops for x in (*made.before.get(op, ()), changed.get(op, op))])


@dataclass(frozen=True, slots=True)
class _Mask:
    """Elements of the result of `op` are `constant` where one of `hiding` holds, and thus but where `visible` does, a
    condition over the axes of the result that reads `inputs`; folds take them along dim `along`."""

    op: Op
    constant: Expr
    hiding: frozenset[Expr]
    visible: Expr
    inputs: tuple[Value, ...]
    along: int


@dataclass
class _Windows:
    graph: Graph
    solver: Solver
    before: dict[Op, list[Op]] = field(default_factory=dict[Op, list[Op]])
    """Ops that find windows, by the op that they stand before."""
    known: dict[tuple[Expr, tuple[Value, ...], int, tuple[Expr, ...]], tuple[Op, Op]] = field(
        default_factory=dict[tuple[Expr, tuple[Value, ...], int, tuple[Expr, ...]], tuple[Op, Op]]
    )

    def __post_init__(self) -> None:
        values = [v for v in (*self.graph.inputs, *self.graph.constants) if isinstance(v, Value)]
        values += [v for op in self.graph.ops for v in op.outputs]
        self.fresh = 1 + max((v.id for v in values), default=0)
        self.kernels = 1 + max(op.kernel for op in self.graph.ops)
        self.kept = self.graph.kept()
        self.consumers = self.graph.consumers()

    def trimmed(self, ops: Sequence[Op]) -> dict[Op, Op]:
        """The ops of a kernel that change; none if nothing is won."""
        found = masks(ops)
        kernel = self.kernel(ops)
        if not found or kernel is None:
            return {}
        fresh: list[tuple[_Mask, tuple[Op, Op]]] = []
        changed: dict[Op, Op] = {}
        for m in found:
            pair = self.known.get(_key(m))
            if pair is None:
                pair = next((p for n, p in fresh if _key(n) == _key(m)), None)
            if pair is None:
                pair = self.search(m)
                fresh.append((m, pair))
            changed[m.op] = _bounded(m, pair[0].output, pair[1].output)
        if not self.pays(kernel, [p for _, p in fresh], changed):
            return {}
        for m, pair in fresh:
            self.known[_key(m)] = pair
            self.before.setdefault(m.op, []).extend(self.settled(pair))
        return changed

    def settled(self, pair: tuple[Op, Op]) -> list[Op]:
        """The ops of windows as one kernel, or as two that find them in parts, if that is modelled as faster."""
        best, least = [pair], self.seconds(pair)
        halves = [split_fold(op, self.fresh + k, self.solver.target) for k, op in enumerate(pair)]
        for parts, merges in (zip(*both, strict=True) for both in zip(*halves, strict=True)):
            both = self.seconds(parts) + self.seconds(merges)
            if both < least:
                best, least = [parts, merges], both
        self.fresh += len(pair)
        self.kernels += len(best)
        first = self.kernels - len(best)
        return [replace(op, kernel=first + k) for k, ops in enumerate(best) for op in ops]

    def seconds(self, ops: Sequence[Op]) -> float:
        return self.solver.price(Kernel(tuple(ops), tuple(op.output for op in ops)), self.graph.layouts)

    def kernel(self, ops: Sequence[Op]) -> Kernel | None:
        inside = set(ops)
        stored = [
            v
            for op in ops
            for v in op.outputs
            if v in self.kept or any(r not in inside for r in self.consumers.get(v, ()))
        ]
        return Kernel(tuple(ops), tuple(stored)) if stored else None

    def pays(self, kernel: Kernel, fresh: Sequence[tuple[Op, Op]], changed: Mapping[Op, Op]) -> bool:
        """Whether the kernel's loops end by windows then, and is long enough."""
        bounded = replace(kernel, ops=tuple(changed.get(op, op) for op in kernel.ops))
        layouts = self.graph.layouts
        try:
            if sum(map(self.seconds, fresh)) * WORTH > self.solver.price(kernel, layouts):
                return False
            program = self.solver.solve(bounded, layouts).program
        except IllegalSchedule:
            return False
        return any(_by_data(s) for s in program.loops())

    def search(self, m: _Mask) -> tuple[Op, Op]:
        """The ops that find the first and last visible places."""
        shape = m.op.output.shape
        own = output_axes(shape)
        kept = _kept(m)
        axes = output_axes(tuple(shape[d] for d in kept))
        r = Axis("r0", shape[m.along])
        table = {axis(own[d]): axis(a) for d, a in zip(kept, axes, strict=True)} | {
            axis(own[m.along]): axis(r)
        }
        visible = substitute(m.visible, table)
        place = cast(axis(r), i32)
        pair: list[Op] = []
        for name, reduction in (("first", minimum(i32)), ("last", maximum(i32))):
            body = where(visible, place, reduction.identity[0])
            pair.append(self.fold(name, m.inputs, TensorExpr(axes, (body,), (r,), reduction)))

        return pair[0], pair[1]

    def fold(self, name: str, inputs: tuple[Value, ...], expr: TensorExpr) -> Op:
        assert isinstance(expr.reduction, Reduction)
        result = Value(self.fresh, expr.shape, expr.reduction.results[0])
        self.fresh += 1
        return Op(name, inputs, (result,), expr=expr)


def _key(m: _Mask) -> tuple[Expr, tuple[Value, ...], int, tuple[Expr, ...]]:
    return m.visible, m.inputs, m.along, m.op.output.shape


def _kept(m: _Mask) -> list[int]:
    """The dims that index windows."""
    used = axes_of(m.visible)
    return [d for d, a in enumerate(output_axes(m.op.output.shape)) if axis(a) in used and d != m.along]


def _bounded(m: _Mask, first: Value, last: Value) -> Op:
    """The masked op, which knows its windows."""
    expr = m.op.expr
    assert expr is not None
    index = [axis(expr.axes[d]) for d in _kept(m)]
    count = len(m.op.inputs)
    place = axis(expr.axes[m.along])
    low, high = (cast(read(count + k, index, i32), i64) for k in (0, 1))
    window = implied(call("and", call("ge", place, low), call("le", place, high)))
    body = where(window, expr.body[0], m.constant)
    return replace(m.op, inputs=(*m.op.inputs, first, last), expr=replace(expr, body=(body,)))


def _by_data(s: Loop) -> bool:
    return any(x.op == "var" for e in (s.start, s.stop) for x in walk(e))


def masks(ops: Sequence[Op]) -> list[_Mask]:
    """Where a kernel's ops first put a constant in place of what data hide, along dims that are folded."""
    made = {v for op in ops for v in op.outputs}
    outside = {v.id: v for op in ops for v in op.inputs if v not in made and _is_whole(v)}
    if not outside or any(op.expr is None for op in ops):
        return []
    analysis, classes = ValueAnalysis(ops), classes_of(ops)
    for constant in (-math.inf, 0.0):
        found = _masks(ops, constant, analysis, classes, outside)
        if found:
            return found
    return []


def _masks(
    ops: Sequence[Op],
    constant: float,
    analysis: ValueAnalysis,
    classes: Classes,
    outside: Mapping[int, Value],
) -> list[_Mask]:
    """Those that put `constant`. What is made of masked values is masked already; another mask counts there only if it
    hides more, and all that the first one masks goes there."""
    readers = Counter(v for op in ops for v in set(op.inputs))
    found: list[_Mask] = []
    behind: dict[Value, int] = {}
    for op in ops:
        if op.expr is None or not op.expr.is_pointwise or not op.output.dtype.is_float:
            continue
        first = next((behind[v] for v in op.inputs if v in behind), None)
        regions = [r for r in analysis.regions[op.output] if is_const(r.constant, constant)]
        mask = _mask(op, regions, classes, outside)
        if first is not None:
            only = all(readers[v] == 1 for v, n in behind.items() if n == first)
            if only and mask is not None and mask.hiding > found[first].hiding:
                found[first] = mask
            behind[op.output] = first
        elif mask is not None:
            behind[op.output] = len(found)
            found.append(mask)
    return found


def _mask(op: Op, regions: Sequence[Region], classes: Classes, outside: Mapping[int, Value]) -> _Mask | None:
    v = op.output
    folded = [
        d
        for d, kind in enumerate(classes.dependency[v])
        if kind is Dependency.NONPARA and v.shape[d] is not dims.ONE
    ]
    for region in regions:
        reads = [x for x in walk(region.condition) if x.op == "read"]
        along = [d for d in folded if axis(output_axes(v.shape)[d]) in axes_of(region.condition)]
        if not reads or not all(_is_safe(x, outside) for x in reads) or len(along) != 1:
            continue
        if _ends_loops(region.condition, axis(output_axes(v.shape)[along[0]])):
            continue
        inputs = tuple(dict.fromkeys(outside[x.value] for x in reads if isinstance(x.value, int)))
        visible = _numbered(call("not", region.condition), {u.id: k for k, u in enumerate(inputs)})
        return _Mask(
            op, region.constant, frozenset(_alternatives(region.condition)), visible, inputs, along[0]
        )
    return None


def _alternatives(condition: Expr) -> list[Expr]:
    """The terms of a disjunction."""
    if condition.op == "or" and condition.dtype is bool_:
        return [t for x in condition.args for t in _alternatives(x)]
    return [condition]


def _is_whole(v: Value) -> bool:
    return v.dtype.kind in (Kind.BOOL, Kind.INT, Kind.UINT)


def _is_safe(x: Expr, outside: Mapping[int, Value]) -> bool:
    """Whether a read is of whole numbers or truth values from outside the kernel, surely within them."""
    v = outside.get(x.value) if isinstance(x.value, int) else None
    return v is not None and all(
        not from_data(i) and inside_of(i, size) is None for i, size in zip(x.args, v.shape, strict=True)
    )


def _numbered(e: Expr, number: Mapping[int, int]) -> Expr:
    """`e` with operand numbers in place of those of values."""

    def change(x: Expr) -> Expr | None:
        return read(number[x.value], x.args, x.dtype) if x.op == "read" and isinstance(x.value, int) else None

    return transform(e, change)


def _ends_loops(condition: Expr, c: Expr) -> bool:
    """Whether all that the condition says of data are comparisons of `c` with numbers that do not change along it."""
    for x in _literals(condition):
        reads = [y for y in walk(x) if y.op == "read"]
        if reads and (slack_of(x, data=True) is None or any(c in axes_of(y) for y in reads)):
            return False
    return True


def _literals(e: Expr) -> list[Expr]:
    if e.op in ("and", "or", "not"):
        return [x for a in e.args for x in _literals(a)]
    return list(conjuncts(e))
