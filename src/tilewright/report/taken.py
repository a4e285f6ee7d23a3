"""The facts of something compiled, read off its records: nothing is computed here that a room below knows."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from tilewright.analysis.dependence.properties import size as size_of
from tilewright.capture.signature import Signature
from tilewright.errors import shown
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Cover, Kernel, LibraryStep, Scheduled, Step, ViewStep
from tilewright.ir.sizes.host import size
from tilewright.partition.choose_kernels import ChosenRegions
from tilewright.plan import CallStep, Copy, Launches, Plan, View
from tilewright.runtime.plan.clocked import StepClock
from tilewright.runtime.plan.layouts import intermediate_bytes, live_bytes
from tilewright.target import MemoryKind
from tilewright.tilegraph.connect import connect
from tilewright.tilegraph.edge import Node, TileGraph
from tilewright.tilegraph.traffic import traffic
from tilewright.tuning.text_limits import TEXTS

from .environment import environment, now
from .facts import EdgeFacts, GraphFacts, LevelFacts, MachineFacts, PhaseFacts, ReportFacts, StepFacts
from .records import CallRecord, GraphWork, KernelRecord, result_of

Clocks = Mapping[int, StepClock]
"""Clocks of graphs whose steps were timed, by the identity of their record."""


@dataclass(frozen=True, slots=True)
class ExplainedStep:
    """One kernel or call in the order of execution, the step of the cover (None: of the body of a loop), and the
    seconds that it took (None: not measured)."""

    record: KernelRecord | CallRecord
    is_kernel: bool
    measured: float | None = None
    step: Step | None = None

    @property
    def bytes(self) -> tuple[int | None, int | None]:
        """Bytes moved, and the least; a call moves each operand and result once."""
        moved = self.record.bytes_moved
        return moved, cast(KernelRecord, self.record).bytes_lower_bound if self.is_kernel else moved


def explained_steps(graph: GraphWork, clock: StepClock | None = None) -> list[ExplainedStep]:
    """Kernels and calls in the order of the cover; those of loops' bodies, which run within a call, behind."""
    order = _order(graph)
    kernels, calls = list(graph.kernels), list(graph.calls)
    count = sum(is_kernel for is_kernel, _ in order)
    times = {
        True: _seconds(clock and clock.launches, count),
        False: _seconds(clock and clock.called, len(order) - count),
    }
    found: list[ExplainedStep] = []
    for is_kernel, step in order:
        records: list[KernelRecord] | list[CallRecord] = kernels if is_kernel else calls
        if records:
            found.append(ExplainedStep(records.pop(0), is_kernel, times[is_kernel].pop(0), step))
    return [*found, *(ExplainedStep(k, True) for k in kernels), *(ExplainedStep(c, False) for c in calls)]


def _order(graph: GraphWork) -> list[tuple[bool, Step | None]]:
    """Whether each step is a kernel or a call, and the step of the cover; what was loaded has a plan alone."""
    cover, plan = result_of(graph, "partition"), result_of(graph, "plan")
    planned = [s for segment in plan.segments for s in segment.steps] if isinstance(plan, Plan) else []
    if not isinstance(cover, Cover):
        kinds = [
            [(True, None)] * len(s.launches) if isinstance(s, Launches) else [(False, None)]
            for s in planned
            if not isinstance(s, View | Copy)
        ]
        return [kind for group in kinds for kind in group]
    called = [s.call for s in planned if isinstance(s, CallStep)] if planned else None
    order: list[tuple[bool, Step | None]] = []
    for step in cover.steps:
        if isinstance(step, Kernel):
            order.append((True, step))
        elif isinstance(step, LibraryStep) and step.op.call is not None:
            if step.op.call.part is None or called is None or step.op.call in called:
                order.append((False, step))  # else a kernel stores the lines where they belong
    return order


def _seconds(timed: Mapping[int, list[float]] | None, count: int) -> list[float | None]:
    """The median of each; nothing where the plan has other steps than the cover."""
    if timed is None or len(timed) != count:
        return [None] * count
    return [statistics.median(seconds) if seconds else None for seconds in timed.values()]


def sizes_of(graph: GraphWork) -> Mapping[str, int]:
    """The numbers that figures are for."""
    return next((record.sizes for record in (*graph.kernels, *graph.calls)), {})


def named_sizes(known: Mapping[str, int], signature: object) -> dict[str, int]:
    """Those of the numbers behind free sizes that a signature names; torch also tells of symbols that it found equal to
    these."""
    named = {s.symbol for s in signature.sizes} if isinstance(signature, Signature) else set[str]()
    return {symbol: number for symbol, number in known.items() if symbol in named or not named}


def size_texts(known: Mapping[str, int], signature: object) -> list[str]:
    """Which numbers stand behind free sizes: symbol, the user's name, the inputs and dims that have it."""
    named = {s.symbol: s for s in signature.sizes} if isinstance(signature, Signature) else {}
    texts: list[str] = []
    for symbol, number in known.items():
        s = named.get(symbol)
        places = " ".join(f"{_short(name)}:{dim}" for name, dim in s.places) if s is not None else ""
        name = symbol if s is None or s.name == symbol else f"{symbol} ({_short(s.name)})"
        texts.append(f"{name} = {number}" + (f" at {places}" if places else ""))
    return texts


def _short(name: str) -> str:
    return shown(name, TEXTS.max_name_characters)


def tilegraph_of(graph: GraphWork) -> TileGraph | None:
    """The tile-graph of what was compiled, without the bodies of loops; None if it has no cover. (Of a phase that ran
    again, the last result counts.)"""
    cover, schedules = result_of(graph, "partition"), result_of(graph, "schedule")
    plan = result_of(graph, "plan")
    if not isinstance(cover, Cover) or not isinstance(schedules, Sequence | None):
        return None
    known = cast(Sequence[Scheduled], schedules or ())
    return connect(cover, known, plan.host if isinstance(plan, Plan) else ())


def levels_of(graph: GraphWork, found: TileGraph) -> tuple[LevelFacts, ...]:
    """At which level of memory edges are, and the bytes that move there."""
    try:
        moved = traffic(found, sizes_of(graph))
    except KeyError:  # a size that comes from data
        moved = {}
    return tuple(LevelFacts(level.name, len(found.at(level)), moved.get(level)) for level in found.levels())


def regions_of(graph: GraphWork) -> tuple[str, ...]:
    """What was decided about contractions whose large results are folded again."""
    found = result_of(graph, "map")
    return tuple(str(region) for region in found.regions) if isinstance(found, ChosenRegions) else ()


def memory_of(graph: GraphWork) -> int | None:
    """Bytes that one call has between its kernels and calls at a time."""
    plan = result_of(graph, "plan")
    return intermediate_bytes(plan, sizes_of(graph)) if isinstance(plan, Plan) else None


# --- as facts --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reported:
    """A graph to report, under a title of its own."""

    title: str
    graph: GraphWork
    signature: object = None


class SourceTexts:
    """Texts, each once, by number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The number of a text."""
        return self.numbers.setdefault(text, len(self.numbers))


def report_facts(title: str, graphs: Sequence[Reported], clocks: Clocks | None = None) -> ReportFacts:
    """The facts of some graphs, with measured times where there are clocks."""
    texts = SourceTexts()
    made = tuple(_graph(each, (clocks or {}).get(id(each.graph)), texts) for each in graphs)
    told = tuple((name, str(value)) for name, value in environment().items())
    return ReportFacts(title, now(), told, made, tuple(texts.numbers))


def reported(compilations: Sequence[object], signature: object = None) -> list[Reported]:
    """The graphs of a compiled model; those of one kind are told apart by number."""
    graphs = cast(Sequence[GraphWork], compilations)
    count, seen = Counter(g.kind for g in graphs), Counter[str]()
    found: list[Reported] = []
    for g in graphs:
        seen[g.kind] += 1
        title = f"{g.kind} {seen[g.kind]}" if count[g.kind] > 1 else g.kind
        found.append(Reported(title, g, signature))
    return found


def _graph(told: Reported, clock: StepClock | None, texts: SourceTexts) -> GraphFacts:
    graph = told.graph
    steps = explained_steps(graph, clock)
    tilegraph = tilegraph_of(graph)
    cover, plan = result_of(graph, "partition"), result_of(graph, "plan")
    sizes = sizes_of(graph)
    number = {e.step: k for k, e in enumerate(steps) if e.step is not None}
    edges: tuple[EdgeFacts, ...] = ()
    kept: Mapping[int, list[int]] = {}
    if tilegraph is not None and isinstance(cover, Cover):
        reading = _Edges(cover, number, sizes)
        edges, kept = reading.between(tilegraph), reading.inside(tilegraph)
    live: tuple[int, ...] = ()
    if isinstance(plan, Plan) and isinstance(cover, Cover):
        found = live_bytes(plan, sizes, len(cover.steps))
        live = tuple(found[k] for k, step in enumerate(cover.steps) if step in number) if found else ()
    phases: dict[str, float] = {}
    for phase in graph.trace.phases:
        phases[phase.name] = phases.get(phase.name, 0.0) + phase.seconds
    return GraphFacts(
        title=told.title,
        kind=graph.kind,
        coverage=str(graph.coverage),
        sizes=tuple(size_texts(named_sizes(sizes, told.signature), told.signature)),
        machine=_machine(graph),
        steps=tuple(_step(e, kept.get(k, []), texts) for k, e in enumerate(steps)),
        edges=edges,
        levels=() if tilegraph is None else levels_of(graph, tilegraph),
        phases=tuple(PhaseFacts(name, seconds) for name, seconds in phases.items()),
        live_bytes=live,
        intermediate_bytes=memory_of(graph),
        regions=regions_of(graph),
    )


def _machine(graph: GraphWork) -> MachineFacts | None:
    target = graph.machine
    if target is None:
        return None
    cache = target.level(MemoryKind.L2)
    return MachineFacts(
        target.name, target.device.bandwidth, None if cache is None else cache.bandwidth, target.flops
    )


def _step(e: ExplainedStep, kept: Sequence[int], texts: SourceTexts) -> StepFacts:
    record = e.record
    moved, bound = e.bytes
    kernel = cast(KernelRecord, record) if e.is_kernel else None
    call = cast(CallRecord, record)
    return StepFacts(
        name=record.name,
        how="generated" if kernel else call.how,
        ops=tuple(str(op)[: TEXTS.max_place_characters] for op in record.ops),
        bytes_moved=moved,
        bytes_lower_bound=bound,
        flops=record.flops,
        exps=record.exps,
        modelled=record.seconds,
        measured=e.measured,
        boundary=kernel.boundary.value if kernel else "",
        reason=record.reason,
        schedule=kernel.schedule if kernel else "",
        source=texts.number(kernel.source) if kernel else None,
        results=() if kernel else tuple(call.results),
        notes=() if kernel else tuple(call.refused),
        kept=len(kept),
        kept_bytes=sum(kept),
        looped=e.step is None,
    )


class _Edges:
    """Reads the edges of steps off those of ops: a view is the tensor that it shows."""

    def __init__(self, cover: Cover, number: Mapping[Step, int], sizes: Mapping[str, int]) -> None:
        self.number, self.sizes = number, sizes
        self.given = {v: f"input {k}" for k, v in enumerate(cover.graph.inputs) if isinstance(v, Value)}
        self.frozen = set(cover.graph.constants)
        self.shown = {s.value: s.source for s in cover.steps if isinstance(s, ViewStep)}
        self.maker: dict[Value, int] = {}
        for step, k in number.items():
            made = (
                step.outputs
                if isinstance(step, Kernel)
                else step.op.outputs
                if isinstance(step, LibraryStep)
                else ()
            )
            self.maker |= dict.fromkeys(made, k)

    def between(self, tilegraph: TileGraph) -> tuple[EdgeFacts, ...]:
        """The tensors between steps, each once for a reader; without frozen ones, of which there are many."""
        found: dict[tuple[Value, int | None, str], EdgeFacts] = {}
        for e in tilegraph.edges:
            if e.on_chip or (e.consumer is not None and e.consumer.is_view):
                continue
            shown = self._memory(e.value)
            start, end = self.maker.get(shown), self._of(e.consumer)
            known = (e.consumer is None or end is not None) and shown not in self.frozen
            if known and not (start is None and end is None):
                text = repr(e.value).partition(":")[2]
                text = f"{self.given[shown]}: {text}" if start is None and shown in self.given else text
                edge = EdgeFacts(start, end, text, self._bytes(e.value), e.level.name.lower())
                found.setdefault((shown, end, edge.level), edge)
        return tuple(found.values())

    def inside(self, tilegraph: TileGraph) -> dict[int, list[int]]:
        """Bytes of each value that stays on chip, by step."""
        found: dict[int, dict[Value, int]] = {}
        for e in tilegraph.edges:
            k = self._of(e.producer)
            if e.on_chip and k is not None:
                found.setdefault(k, {})[e.value] = self._bytes(e.value) or 0
        return {k: list(values.values()) for k, values in found.items()}

    def _memory(self, v: Value) -> Value:
        while v in self.shown:
            v = self.shown[v]
        return v

    def _of(self, node: Node | None) -> int | None:
        return None if node is None else self.number.get(node.step)

    def _bytes(self, v: Value) -> int | None:
        try:
            return size(size_of(v).bytes, self.sizes)
        except KeyError:  # a size that comes from data
            return None
