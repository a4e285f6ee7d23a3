"""Which kernels cover a graph: groups of ops from merging, or as an earlier run found them; library calls and views;
all in an order in which they can run."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tilewright.analysis.size_hints import SizeHints
from tilewright.errors import VerifyError
from tilewright.ir.graph import Graph, Op, Value, symbols_in
from tilewright.ir.kernel import Cover, Kernel, LibraryStep, Price, Step, ViewStep, results_of
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import PARTITION

from .greedy import Afar, Group, Merging
from .kernel_ops import GraphParts
from .memo import DecisionCache, Grouping, groupings_of, plain, task_of
from .provenance import filler
from .recompute import is_cheap, round_alike
from .unstored_results import without_recomputed


@dataclass(frozen=True, slots=True)
class OutputMemory:
    """The memory of outputs in the program: `shown` are those that it returns as memory of something else, and
    `storages` numbers their storages, where they are known."""

    shown: frozenset[Value] = frozenset()
    storages: Mapping[Value, int] | None = None


ANY_MEMORY = OutputMemory()


def cover_unfused(graph: Graph, hints: SizeHints, outputs: OutputMemory = ANY_MEMORY) -> Cover:
    """Cover a graph with a kernel for each op, library calls and views."""
    parts = GraphParts(graph, hints, outputs.shown, outputs.storages, fuse=False)
    places = (parts.position[op] for op in parts.generated())
    return _cover(parts, [Group((n,), 0.0, "nothing is fused by choice") for n in places])


def partition(
    graph: Graph, price: Price, hints: SizeHints, cache: DecisionCache | None = None, *,
    outputs: OutputMemory = ANY_MEMORY, afar: Afar | None = None,
) -> Cover:  # fmt: skip
    """Cover a graph with kernels, library calls and views. `price` gives the modelled seconds of a kernel, or raises
    IllegalSchedule; it is not asked about a graph that `cache` knows. `afar` says what kernels cost that find nothing
    in a cache."""
    parts = GraphParts(graph, hints, outputs.shown, outputs.storages, fuse=True)
    if cache is None:
        return _cover(parts, without_recomputed(parts, Merging(parts, price, afar).groups(), price))
    task = task_of(graph, _shows(parts))
    groups = _cached_groups(parts, groupings_of(cache.get(task)))
    if groups is None:
        groups = without_recomputed(parts, Merging(parts, price, afar).groups(), price)
        cache.put(task, plain([Grouping(g.places, why=g.why) for g in groups]))
    return _cover(parts, groups)


def _shows(parts: GraphParts) -> tuple[int, ...]:
    """Places of the views that the caller reads and that are no work, for the key of what is remembered."""
    ops = enumerate(parts.graph.ops)
    return tuple(k for k, op in ops if parts.kept_values.intersection(op.outputs) & parts.views.keys())


def _cached_groups(parts: GraphParts, known: Sequence[Grouping] | None) -> list[Group] | None:
    """Groups that were found before; None if they are not those of this graph. Ops that are in none are inlined."""
    places = [n for g in known or () for n in g.ops]
    wanted = {parts.position[op] for op in parts.generated()}
    if known is None or len(set(places)) != len(places) or not wanted.issuperset(places):
        return None
    left = {parts.graph.ops[n] for n in wanted.difference(places)}
    stored = parts.read_from_memory()
    if not all(is_cheap(op, parts.views) and op.output not in stored for op in left):
        return None
    parts.inlined |= left
    return [Group(tuple(sorted(g.ops)), 0.0, g.why) for g in known]


def _cover(parts: GraphParts, groups: Sequence[Group]) -> Cover:
    graph = parts.graph
    stored = parts.read_from_memory() - parts.views.keys()  # views have steps of their own
    wanted = [op for op in graph.ops if op in parts.inlined and op.output in stored]
    told = filler(graph)
    first = [parts.kernel(places, told(_READ)) for places in _together(parts, wanted)]
    steps: list[Step] = [*first, *(parts.kernel(g.places, told(g.why)) for g in groups)]
    early = {kernel: min(parts.position[op] for op in kernel.ops) for kernel in first}
    for op in graph.ops:
        if op.call is not None:
            origins = tuple(o for o in (op.origin, *op.absorbed) if o >= 0)
            steps.append(LibraryStep(op, bool(origins) and op.call.reason in _CHOICE, origins))
    steps += list(parts.views.values())

    def place(step: Step) -> int:
        found = early.get(step) if isinstance(step, Kernel) else None
        return _place_of(step, parts) if found is None else found

    ordered = _ordered(steps, place, graph.found_by_calls())
    kernels = [step for step in ordered if isinstance(step, Kernel)]
    alike = dict(zip(kernels, round_alike(kernels), strict=True))
    return Cover(graph, tuple(alike[s] if isinstance(s, Kernel) else s for s in ordered), parts.layouts)


_READ = "read by a library call or the caller"


def _together(parts: GraphParts, wanted: Sequence[Op]) -> list[tuple[int, ...]]:
    """The places of ops that become kernels for what others read: each is one, but those of a single number that is
    made of inputs alone (the place in a cache, of each layer) are kernels together."""
    alone = [(parts.position[op],) for op in wanted if not _is_known_at_first(op, parts)]
    first = [parts.position[op] for op in wanted if _is_known_at_first(op, parts)]
    most = PARTITION.max_kernel_ops
    return [*alone, *(tuple(first[k : k + most]) for k in range(0, len(first), most))]


def _is_known_at_first(op: Op, parts: GraphParts) -> bool:
    """Whether an op makes one number of what numbers the inputs hold."""
    todo, seen = [op], {op}
    while todo:
        one = todo.pop()
        if one.expr is None or one not in parts.inlined:
            return False
        if any(v.numel is not dims.ONE for v in (*one.inputs, *one.outputs)):
            return False
        makers = {p for v in one.inputs if (p := parts.producer.get(v)) is not None} - seen
        seen |= makers
        todo += makers
    return True


def _place_of(step: Step, parts: GraphParts) -> int:
    """Where a step stands in the graph: at its last op."""
    match step:
        case Kernel():
            return max(parts.position[op] for op in step.ops)
        case LibraryStep():
            return parts.position[step.op]
        case ViewStep():
            return parts.position[parts.producer[step.value]]


_CHOICE = ("contraction", "convolution", "attention")


def _reads(step: Step) -> tuple[Value, ...]:
    match step:
        case Kernel():
            return step.inputs
        case LibraryStep():
            return step.op.inputs
        case ViewStep():
            return (step.source,)


def _ordered(steps: list[Step], position: Callable[[Step], int], tells: Mapping[str, Op]) -> list[Step]:
    """Producers before consumers, otherwise by `position`; calls with side effects keep their order. Whoever reads a
    size or number consumes what the call makes that `tells` it."""
    maker = {v: n for n, s in enumerate(steps) for v in results_of(s)}
    before: list[set[int]] = [{maker[v] for v in _reads(s) if v in maker} - {n} for n, s in enumerate(steps)]
    if tells:
        calls = {s.op: n for n, s in enumerate(steps) if isinstance(s, LibraryStep)}
        for n, s in enumerate(steps):
            before[n] |= {calls[tells[x]] for x in symbols_in(s) if x in tells} - {n}
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
        raise VerifyError("the cover has a cycle", phase="partition")
    return order


def _pure(op: Op) -> bool:
    return op.call is None or op.call.pure
