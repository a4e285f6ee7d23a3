"""Windows: for each row, the first and last place that a mask made of data lets through, found by a kernel before.

    s[i, j] = x[i, j] where visible(i, j), else c          visible reads ids of documents, flags of blocks, ...
 => first[i] = min over j of (j where visible(i, j)),  last[i] = max over j of (j where visible(i, j))
    s[i, j] = (x[i, j] where visible(i, j), else c) where implied(first[i] <= j <= last[i]), else c

It changes no result, and tells the loop over j where to start and to end (see `lower.data_bounds`): over a block of
rows, at the least first and the greatest last place. That is exact where each row sees one run of places, and more than
it sees otherwise. Masks that are known from data only by numbers that a loop can end at anyway (lengths) need no
windows.

Where there may be holes between those ends, a list of tiles takes the place of the window (see `block_lists`) on
machines whose threads share a grid point; where each thread runs alone, it jumps over hidden steps (see
`lower.skip_tiles`). No shape of data is proved by that: a mask by equality of ids or by flags gets a list though its
documents may be sorted, one that only compares in order a window though its places may not be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from tilewright.errors import IllegalSchedule
from tilewright.ir.dtype import i32, i64
from tilewright.ir.expr import Axis, Expr, axis, call, cast, implied, read, substitute, walk, where
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.program import Loop
from tilewright.ir.reduction import Reduction, maximum, minimum
from tilewright.ir.schedule import Schedule
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes
from tilewright.rewrite.data_masks.block_lists import BlockList, MaskTiles, block_list, cuts, with_list
from tilewright.rewrite.data_masks.find import Mask, masks
from tilewright.rewrite.split.policy import fastest
from tilewright.rewrite.split.reduction import list_splits
from tilewright.tuning.thresholds import MASKS

from .solver import Solver


def with_windows(graph: Graph, solver: Solver) -> Graph:
    """The graph with windows for the kernels that are chosen in it and skip whole tiles with them, where finding
    them is cheap beside the kernel at the sizes of the `solver`. Equal masks share windows. Values behind masks are
    trusted to be finite: where the options do not, the graph stays as it is."""
    if solver.options.trim == "exact" or not any(op.kernel >= 0 for op in graph.ops):
        return graph
    made = _Windows(graph, solver)
    chosen: dict[int, list[Op]] = {}
    for op in graph.ops:
        if op.kernel >= 0:
            chosen.setdefault(op.kernel, []).append(op)
    changed: dict[Op, Op] = {}
    for ops in chosen.values():
        changed |= made.trimmed(ops)
    if not changed:
        return graph
    return graph.with_ops([x for op in graph.ops for x in (*made.before.get(op, ()), changed.get(op, op))])


@dataclass
class _Windows:
    graph: Graph
    solver: Solver
    before: dict[Op, list[Op]] = field(default_factory=dict[Op, list[Op]])
    """Ops that find windows or lists, by the op that they stand before."""
    known: dict[tuple[Expr, tuple[Value, ...], int, tuple[Expr, ...]], tuple[Op, Op]] = field(
        default_factory=dict[tuple[Expr, tuple[Value, ...], int, tuple[Expr, ...]], tuple[Op, Op]]
    )

    lists: dict[tuple[object, ...], BlockList | None] = field(
        default_factory=dict[tuple[object, ...], "BlockList | None"]
    )
    listed_before: set[BlockList] = field(default_factory=set[BlockList])
    """Lists whose ops stand in the graph."""

    def __post_init__(self) -> None:
        self.fresh = self.graph.fresh_id()
        self.kernels = 1 + max(op.kernel for op in self.graph.ops)
        self.kept = self.graph.kept()
        self.consumers = self.graph.consumers()

    def trimmed(self, ops: Sequence[Op]) -> dict[Op, Op]:
        """The ops of a kernel that change; none if nothing is won."""
        found = masks(ops)
        kernel = self.kernel(ops)
        if not found or kernel is None:
            return {}
        if self.solver.scheduler.follows_lists and any(m.has_holes for m in found):
            changed = self.by_lists(kernel, found)
            if changed:
                return changed
        return self.by_windows(kernel, found)

    def by_lists(self, kernel: Kernel, found: Sequence[Mask]) -> dict[Op, Op]:
        """The masked ops with lists of tiles; none if no loop of the kernel runs by them, or that does not pay."""
        try:
            schedule = self.solver.solve(kernel, self.graph.layouts).schedule
        except IllegalSchedule:
            return {}
        assert isinstance(schedule, Schedule)
        for with_rows in (False, True):
            for chosen in product(*(tuple(cuts(m, schedule)) for m in found)):
                made = [self.listed(m, cut, with_rows) for m, cut in zip(found, chosen, strict=True)]
                lists = [x for x in made if x is not None]
                if not lists or len(lists) < len(made):
                    continue
                pairs = zip(found, chosen, lists, strict=True)
                changed = {m.op: with_list(m, cut, x) for m, cut, x in pairs}
                fresh = [x for x in dict.fromkeys(lists) if x not in self.listed_before]
                kernels = [ops for x in fresh for ops in self.kernels_of(x)]
                if self.has_room(kernel, fresh) and self.pays(kernel, kernels, changed, _by_list):
                    self.listed_before.update(fresh)
                    self.before.setdefault(found[0].op, []).extend(self.numbered(kernels))
                    return changed
        return {}

    def kernels_of(self, made: BlockList) -> Sequence[tuple[Op, ...]]:
        """The kernels of a list; the reduction over whole rows in parts, if that is modelled as faster."""
        if made.sees is None:
            return made.kernels
        return [*self.in_fastest_parts(made.kernels[0]), *made.kernels[1:]]

    def listed(self, m: Mask, cut: MaskTiles, with_rows: bool) -> BlockList | None:
        """The list of a mask, the same one for equal masks."""
        key = (*_key(m), cut, with_rows)
        if key not in self.lists:
            self.lists[key] = block_list(m, cut, self.make_reduction, with_rows)
        return self.lists[key]

    def has_room(self, kernel: Kernel, lists: Sequence[BlockList]) -> bool:
        """Whether lists are small beside what the kernel reads and writes."""
        used = (*kernel.inputs, *kernel.outputs)
        held = sum(self.solver.hints.estimate(v.numel) * v.dtype.bytes for v in used)
        return MASKS.min_times_as_large * sum(self.solver.hints.estimate(x.bytes) for x in lists) <= held

    def by_windows(self, kernel: Kernel, found: Sequence[Mask]) -> dict[Op, Op]:
        """The masked ops with windows; none if nothing is won."""
        fresh: list[tuple[Mask, tuple[Op, Op]]] = []
        changed: dict[Op, Op] = {}
        for m in found:
            pair = self.known.get(_key(m))
            if pair is None:
                pair = next((p for n, p in fresh if _key(n) == _key(m)), None)
            if pair is None:
                pair = self.search(m)
                fresh.append((m, pair))
            changed[m.op] = _bounded(m, pair[0].output, pair[1].output)
        kernels = [(m, pair, self.in_fastest_parts(pair)) for m, pair in fresh]
        if not self.pays(kernel, [ops for *_, both in kernels for ops in both], changed, _by_data):
            return {}
        for m, pair, both in kernels:
            self.known[_key(m)] = pair
            self.before.setdefault(m.op, []).extend(self.numbered(both))
        return changed

    def in_fastest_parts(self, ops: tuple[Op, ...]) -> list[tuple[Op, ...]]:
        """Reductions as one kernel, or as two that reduce in parts, if that is modelled as faster."""
        target, policy, hints = self.solver.target, self.solver.scheduler.splits, self.solver.hints
        halves = [list_splits(op, self.fresh + k, target, policy, hints) for k, op in enumerate(ops)]
        self.fresh += len(ops)
        pairs = [list(zip(*both, strict=True)) for both in zip(*halves, strict=True)]
        ways = ((pair, sum(map(self.seconds, pair))) for pair in pairs)
        return fastest(ways, self.seconds(ops)) or [ops]

    def numbered(self, kernels: Sequence[tuple[Op, ...]]) -> list[Op]:
        """Ops as kernels of their own."""
        self.kernels += len(kernels)
        first = self.kernels - len(kernels)
        return [replace(op, kernel=first + k) for k, ops in enumerate(kernels) for op in ops]

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

    def pays(
        self,
        kernel: Kernel,
        fresh: Sequence[tuple[Op, ...]],
        changed: Mapping[Op, Op],
        serves: Callable[[Loop], bool],
    ) -> bool:
        """Whether a loop of the kernel is `serves` then, and the kernel long enough."""
        bounded = replace(kernel, ops=tuple(changed.get(op, op) for op in kernel.ops))
        layouts = self.graph.layouts
        try:
            if sum(map(self.seconds, fresh)) * MASKS.min_times_as_long > self.solver.price(kernel, layouts):
                return False
            program = self.solver.solve(bounded, layouts).program
        except IllegalSchedule:
            return False
        return any(map(serves, program.loops()))

    def search(self, m: Mask) -> tuple[Op, Op]:
        """The ops that find the first and last visible places."""
        shape = m.op.output.shape
        own = output_axes(shape)
        kept = m.kept
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
            pair.append(self.make_reduction(name, m.inputs, TensorExpr(axes, (body,), (r,), reduction)))

        return pair[0], pair[1]

    def make_reduction(self, name: str, inputs: tuple[Value, ...], expr: TensorExpr) -> Op:
        assert isinstance(expr.reduction, Reduction)
        result = Value(self.fresh, expr.shape, expr.reduction.results[0])
        self.fresh += 1
        return Op(name, inputs, (result,), expr=expr)


def _key(m: Mask) -> tuple[Expr, tuple[Value, ...], int, tuple[Expr, ...]]:
    return m.visible, m.inputs, m.along, m.op.output.shape


def _bounded(m: Mask, first: Value, last: Value) -> Op:
    """The masked op, which knows its windows."""
    expr = m.op.expr
    assert expr is not None
    index = [axis(expr.axes[d]) for d in m.kept]
    count = len(m.op.inputs)
    place = axis(expr.axes[m.along])
    low, high = (cast(read(count + k, index, i32), i64) for k in (0, 1))
    window = implied(call("and", call("ge", place, low), call("le", place, high)))
    body = where(window, expr.body[0], m.constant)
    return replace(m.op, inputs=(*m.op.inputs, first, last), expr=replace(expr, body=(body,)))


def _by_data(s: Loop) -> bool:
    """Whether a loop ends at numbers from memory."""
    return any(x.op == "var" for e in (s.start, s.stop) for x in walk(e))


def _by_list(s: Loop) -> bool:
    """Whether a loop is one step at a place from memory."""
    return _by_data(s) and dims.static(dims.sub(s.stop, s.start)) == s.tile
