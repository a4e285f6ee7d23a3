"""What shares a kernel: start with one op each, merge along edges while the modelled time does not grow.

One rule serves T+T, T+R, R+R and R+T: a merge saves a launch and the bytes of the edge, and costs what it recomputes
and the parallelism it loses; the price of the merged form says which is more. What has no legal form is not merged, and
the reason is kept for the report.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import IllegalSchedule
from ..ir import dims
from ..ir.expr import Expr, axes_of, axis, cost, substitute
from ..ir.graph import Graph, Layout, Op, Value
from ..ir.kernel import Cover, Kernel, LibraryStep, Step, ViewStep
from .layout import kernel_layouts
from .recall import Grouping, Memory, groupings_of, plain, task_of
from .sites import filled

Price = Callable[[Kernel, Mapping[Value, Layout]], float]

INLINE_COST = 8
"""A pointwise op of one memory operand that costs less than this is computed again in every kernel that reads it."""

TINY = 2e-6
"""Seconds of a kernel up to which starting it may be a good part of its time."""

LEAST_SAVED = 0.1
"""Share of the time of two kernels that share nothing which one launch less must save."""

LARGEST = 48
"""Ops in one kernel: beyond this the generated loop no longer fits the registers and instruction cache of a core."""


@dataclass(eq=False)
class _Group:
    """Ops that will share a kernel; `why` says what stopped it from growing. A `settled` one does not grow."""

    ops: set[Op]
    price: float
    why: str = ""
    settled: bool = False
    tried: set[int] = field(default_factory=set)


def partition(
    graph: Graph, price: Price, memory: Memory | None = None, *, fuse: bool = True,
    shown: frozenset[Value] = frozenset(),
) -> Cover:  # fmt: skip
    """Cover a graph with kernels, library calls and views. `price` gives the modelled seconds of a kernel, or raises
    IllegalSchedule; it is not asked about a graph that `memory` knows. Unless they may `fuse`, each op is a kernel.
    `shown` are outputs that the program returns as memory of something else."""
    parted = _Partition(graph, price, fuse, shown)
    if not fuse:
        parted.separate()
        return parted.finish()
    if memory is None:
        parted.merge()
        return parted.finish()
    task = task_of(graph, parted.shows())
    known = groupings_of(memory.recall(task))
    if known is None or not parted.regroup(known):
        parted.merge()
        memory.keep(task, plain(parted.groupings()))
    return parted.finish()


class _Partition:
    def __init__(
        self, graph: Graph, price: Price, fuse: bool = True, shown: frozenset[Value] = frozenset()
    ) -> None:
        self.graph, self.price, self.shown = graph, price, shown
        self.position = {op: n for n, op in enumerate(graph.ops)}
        self.producer = graph.producer()
        self.consumers = graph.consumers()
        self.followers = _followers(graph, self.consumers)
        self.horizons: list[int] | None = None
        self.layouts: dict[Value, Layout] = dict(graph.layouts)
        for op in graph.ops:
            if op.call is not None:
                for v, strides in zip(op.outputs, op.call.strides, strict=False):
                    self.layouts[v] = Layout(strides)
        self.layouts |= kernel_layouts(graph, self.layouts)
        self.kept_values = graph.kept()
        self.views = self.strided_views()
        self.inlined = self.cheap() if fuse else set[Op]()
        self.group: dict[Op, _Group] = {}

    # -- what is no kernel

    def strided_views(self) -> dict[Value, ViewStep]:
        """Views that a library call or the caller reads, where strides can say them."""
        found: dict[Value, ViewStep] = {}
        kept = self.graph.kept()
        held = kept.union(v for v in self.graph.inputs if isinstance(v, Value))
        for op in self.graph.ops:
            if (
                op.expr is None
                or op.kernel >= 0
                or not op.expr.is_view()
                or len(op.inputs) != 1
                or op.inputs[0].dtype != op.output.dtype
            ):
                continue
            readers = self.consumers.get(op.output, [])
            returned = op.output in self.shown and op.inputs[0] in held
            if not returned and (op.output in kept or not readers):
                continue
            if not all(r.call is not None for r in readers):
                continue
            step = self.view_step(op)
            if step is not None:
                found[op.output] = step
                self.layouts[op.output] = step.layout
        return found

    def shows(self) -> tuple[int, ...]:
        """Places of the views that the caller reads and that are no work, for the key of what is remembered."""
        return tuple(
            k
            for k, op in enumerate(self.graph.ops)
            if self.shown.intersection(op.outputs) & self.views.keys()
        )

    def view_step(self, op: Op) -> ViewStep | None:
        expr = op.expr
        assert expr is not None
        source = op.inputs[0]
        layout = self.layouts.get(source) or Layout(dims.dense_strides(source.shape))
        offset = dims.add(*(dims.mul(i, s) for i, s in zip(expr.body[0].args, layout.strides, strict=True)))
        strides = [dims.coefficient(offset, axis(a)) for a in expr.axes]
        base = substitute(offset, {axis(a): dims.ZERO for a in expr.axes})
        known = [s for s in strides if s is not None and dims.at_least(s, 0)]
        if len(known) != len(strides) or axes_of(base):
            return None
        whole = dims.add(base, *(dims.mul(axis(a), s) for a, s in zip(expr.axes, known, strict=True)))
        return ViewStep(op.output, source, Layout(tuple(known)), base) if whole is offset else None

    def cheap(self) -> set[Op]:
        """Pointwise ops that every reader computes for itself: nothing, or one value that is in memory anyway,
        is read."""
        found: set[Op] = set()
        for op in self.graph.ops:
            if op.expr is None or op.kernel >= 0 or not op.expr.is_pointwise or op.output in self.views:
                continue
            stored = [v for v in op.inputs if v.numel is not dims.ONE]
            in_memory = all(self.in_memory(v) or self.producer[v] in found for v in stored)
            few = len(stored) <= 1 and len(self.consumers.get(op.output, [])) > 1
            if (not stored or (few and in_memory)) and cost(op.expr.body[0]) < INLINE_COST:
                found.add(op)
        return found

    def in_memory(self, v: Value) -> bool:
        op = self.producer.get(v)
        return op is None or op.call is not None

    # -- merging

    def generated(self) -> list[Op]:
        """Ops that need a kernel."""
        return [
            op
            for op in self.graph.ops
            if op.expr is not None and op not in self.inlined and op.outputs[0] not in self.views
        ]

    def merge(self) -> None:
        self.settle()
        for op in self.generated():
            if op in self.group:
                continue
            self.group[op] = _Group({op}, self.cost_of({op}))
        for op in list(self.group):
            for producer in self.producers(op):
                self.try_merge(self.group[producer], self.group[op])
        self.merge_siblings()
        self.merge_strangers()

    def separate(self) -> None:
        """Every op by itself."""
        self.group |= {op: _Group({op}, 0.0, "nothing is fused by choice") for op in self.generated()}

    def groups(self) -> list[_Group]:
        return list({id(g): g for g in self.group.values()}.values())

    def groupings(self) -> list[Grouping]:
        places = self.position.__getitem__
        return [Grouping(tuple(sorted(map(places, g.ops))), why=g.why) for g in self.groups()]

    def regroup(self, known: Sequence[Grouping]) -> bool:
        """Take groups that were found before; False if they are not those of this graph."""
        wanted = self.generated()
        if sorted(n for g in known for n in g.ops) != [self.position[op] for op in wanted]:
            return False
        for g in known:
            group = _Group({self.graph.ops[n] for n in g.ops}, 0.0, g.why)
            self.group |= dict.fromkeys(group.ops, group)
        return True

    def settle(self) -> None:
        """The kernels that were chosen before."""
        members: dict[int, set[Op]] = {}
        for op in self.graph.ops:
            if op.kernel >= 0:
                members.setdefault(op.kernel, set()).add(op)
        for ops in members.values():
            group = _Group(ops, self.cost_of(ops), "chosen with its region", settled=True)
            self.group |= dict.fromkeys(ops, group)

    def producers(self, op: Op) -> list[Op]:
        """Ops in kernels that `op` reads, also through inlined ones; nearest first."""
        found: dict[Op, None] = {}
        todo = list(op.inputs)
        while todo:
            p = self.producer.get(todo.pop())
            if p is None:
                continue
            if p in self.inlined:
                todo += p.inputs
            elif p in self.group:
                found[p] = None
        return sorted(found, key=lambda p: -self.position[p])

    def try_merge(self, a: _Group, b: _Group, saved: float = 0.0) -> bool:
        """Merge two groups if that saves at least a share `saved` of their time."""
        if a is b or a.settled or b.settled or id(a) in b.tried or len(a.ops) + len(b.ops) > LARGEST:
            return False
        if self.cyclic(a, b):
            b.why = b.why or "another kernel or library call stands between"
            return False
        kernel = self.kernel(a.ops | b.ops)
        try:
            together = self.price(kernel, self.layouts)
        except IllegalSchedule as refused:
            b.why = self.reason(refused, kernel)
            together = math.inf
        if together > (1 - saved) * (a.price + b.price):
            b.tried.add(id(a))
            b.why = b.why or "separate kernels are faster"
            return False
        merged = _Group(a.ops | b.ops, together)
        self.horizons = None
        for op in merged.ops:
            self.group[op] = merged
        return True

    def reason(self, refused: IllegalSchedule, kernel: Kernel) -> str:
        """Why a kernel has no legal form, with marks for ops."""
        if refused.fold < 0:
            return str(refused)
        return refused.about(f"@{self.position[kernel.ops[refused.fold]]}")

    def cyclic(self, a: _Group, b: _Group) -> bool:
        """Whether a path leaves one group and enters the other, or itself, through ops outside both."""
        inside = a.ops | b.ops
        last = self.horizon(max(self.position[op] for op in inside))
        seen: set[int] = set()
        todo = [r for op in inside for r in self.followers[op] if r not in inside]
        while todo:
            op = todo.pop()
            group = self.group.get(op)
            key = id(op) if group is None else id(group)
            if key in seen:
                continue
            seen.add(key)
            for m in (op,) if group is None else group.ops:
                for r in self.followers[m]:
                    if r in inside:
                        return True
                    if self.position[r] <= last:
                        todo.append(r)
        return False

    def horizon(self, place: int) -> int:
        """The place in the graph from beyond which no path, also one that enters a group by one op and leaves it by an
        earlier one, leads back to `place` or before."""
        if self.horizons is None:
            ends = list(range(len(self.graph.ops)))  # of all groups that begin at a place or before
            for g in self.groups():
                places = [self.position[op] for op in g.ops]
                ends[min(places)] = max(ends[min(places)], *places)
            self.horizons = list(itertools.accumulate(ends, max))
        while self.horizons[place] > place:
            place = self.horizons[place]
        return place

    def merge_siblings(self) -> None:
        """Small independent kernels that read a value in common share a launch."""
        for readers in list(self.consumers.values()):
            groups = list({id(self.group[r]): self.group[r] for r in readers if r in self.group}.values())
            for other in groups[1:]:
                first = self.group[next(iter(groups[0].ops))]
                self.try_merge(first, self.group[next(iter(other.ops))])

    def merge_strangers(self) -> None:
        """Tiny kernels that share nothing but the shape of what they make share a launch, where it is a good part of
        their time."""
        alike: dict[tuple[Expr, ...], _Group] = {}
        for op in self.graph.ops:
            group = self.group.get(op)
            if group is None or group.price > TINY:
                continue
            shape = self.sorted(group.ops)[-1].outputs[0].shape
            other = alike.get(shape)
            if other is not None and other is not group:
                why = group.why
                if not self.try_merge(other, group, LEAST_SAVED):
                    group.why = why  # nobody expects these two together
            alike[shape] = self.group[op]

    def cost_of(self, ops: Iterable[Op]) -> float:
        kernel = self.kernel(set(ops))
        return self.price(kernel, self.layouts)

    def kernel(self, ops: set[Op], why: str = "") -> Kernel:
        """The kernel of a group, with the cheap ops that it computes for itself."""
        inside = set(ops)
        todo = list(ops)
        while todo:
            for v in todo.pop().inputs:
                p = self.producer.get(v)
                if p in self.inlined and p not in inside:
                    assert p is not None
                    inside.add(p)
                    todo.append(p)
        outputs = [v for op in self.sorted(ops) for v in op.outputs if self.leaves(v, inside)]
        return Kernel(tuple(self.sorted(inside)), tuple(outputs), why)

    def sorted(self, ops: Iterable[Op]) -> list[Op]:
        return sorted(ops, key=lambda op: self.position[op])

    def leaves(self, v: Value, inside: set[Op]) -> bool:
        return (
            v in self.kept_values
            or any(r not in inside for r in self.consumers.get(v, []) if r not in self.inlined)
            or (any(r in self.inlined and self.wanted_outside(r, inside) for r in self.consumers.get(v, [])))
        )

    def wanted_outside(self, op: Op, inside: set[Op]) -> bool:
        """Whether an inlined op is computed by some kernel other than this one."""
        return any(
            r not in inside and (r not in self.inlined or self.wanted_outside(r, inside))
            for r in self.consumers.get(op.output, [])
        ) or (op.output in self.kept_values)

    # -- the steps in order

    def finish(self) -> Cover:
        groups = self.groups()
        stored = {v for op in self.graph.ops if op.call is not None for v in op.inputs} | self.kept_values
        stored |= {s.source for s in self.views.values()}
        for op in self.inlined:
            if op.output in stored:
                groups.append(_Group({op}, 0.0, "read by a library call or the caller"))
        steps: list[Step] = [self.kernel(g.ops, filled(g.why, self.graph)) for g in groups]
        for op in self.graph.ops:
            if op.call is not None:
                origins = tuple(o for o in (op.origin, *op.absorbed) if o >= 0)
                steps.append(LibraryStep(op, bool(origins) and op.call.reason in _CHOICE, origins))
        steps += list(self.views.values())
        return Cover(self.graph, tuple(_ordered(steps, self.place_of)), self.layouts)

    def place_of(self, step: Step) -> int:
        """Where a step stands in the graph: at its last op."""
        match step:
            case Kernel():
                return max(self.position[op] for op in step.ops)
            case LibraryStep():
                return self.position[step.op]
            case ViewStep():
                return self.position[self.producer[step.value]]


_CHOICE = ("contraction", "convolution", "attention")


def _reads(step: Step) -> tuple[Value, ...]:
    match step:
        case Kernel():
            return step.inputs
        case LibraryStep():
            return step.op.inputs
        case ViewStep():
            return (step.source,)


def _makes(step: Step) -> tuple[Value, ...]:
    match step:
        case Kernel():
            return step.outputs
        case LibraryStep():
            return step.op.outputs
        case ViewStep():
            return (step.value,)


def _ordered(steps: list[Step], position: Callable[[Step], int]) -> list[Step]:
    """Producers before consumers, otherwise by `position`; calls with side effects keep their order."""
    maker = {v: n for n, s in enumerate(steps) for v in _makes(s)}
    before: list[set[int]] = [{maker[v] for v in _reads(s) if v in maker} - {n} for n, s in enumerate(steps)]
    effects = sorted(
        (position(s), n) for n, s in enumerate(steps) if isinstance(s, LibraryStep) and not _pure(s.op)
    )
    for (_, first), (_, second) in zip(effects, effects[1:], strict=False):
        before[second].add(first)
    after: dict[int, list[int]] = {}
    for n, sources in enumerate(before):
        for m in sources:
            after.setdefault(m, []).append(n)
    waiting = [len(sources) for sources in before]
    ready = [(position(s), n) for n, s in enumerate(steps) if not waiting[n]]
    heapq.heapify(ready)
    order: list[Step] = []
    while ready:
        _, n = heapq.heappop(ready)
        order.append(steps[n])
        for m in after.get(n, []):
            waiting[m] -= 1
            if not waiting[m]:
                heapq.heappush(ready, (position(steps[m]), m))
    if len(order) != len(steps):
        raise ValueError("the cover has a cycle")
    return order


def _pure(op: Op) -> bool:
    return op.call is None or op.call.pure


def _followers(graph: Graph, consumers: Mapping[Value, Sequence[Op]]) -> dict[Op, list[Op]]:
    """Which ops cannot start before an op is done: those that read its results, and, as calls with side effects keep
    their order, the next such call."""
    found = {op: [r for v in op.outputs for r in consumers.get(v, ())] for op in graph.ops}
    for first, second in itertools.pairwise(op for op in graph.ops if not _pure(op)):
        found[first].append(second)
    return found
