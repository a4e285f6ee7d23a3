"""One compiled graph in every state of its lowering: what its candidates are, and what runs in each state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright.ir.graph import Graph, Op, Share, Value
from tilewright.ir.kernel import Cover, Kernel, LibraryStep, Step, ViewStep
from tilewright.ir.tensor import show_tensor_expr
from tilewright.library.select import drop_unread, keep_as_calls, selected_as
from tilewright.options import Options
from tilewright.partition.choose_kernels import ChosenRegions
from tilewright.pipeline.backends.executables import executable
from tilewright.pipeline.phases import PHASES
from tilewright.pipeline.state import PlannedGraph
from tilewright.pipeline.trace import Trace
from tilewright.plan import Launches, Plan
from tilewright.plan.build import build_plan
from tilewright.plan.reports import KernelReport
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.plan.verified import UNWRITTEN

from .reference import reference_cover, reference_of
from .rules import wrong_rules

_NAMES = [phase.name for phase in PHASES]
BETWEEN = tuple(_NAMES[_NAMES.index("select") : _NAMES.index("partition")])
"""Phases whose results are graphs, from `select` on."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """What may be wrong: a `kind` (capture, declaration, rewrite, call, kernel) of thing that `phase` made in a graph,
    the ops that it stands for, their places in the user's source, and the value that is wrong first."""

    graph: str
    kind: str
    phase: str
    name: str
    ops: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    value: str = ""
    inside: tuple[str, ...] = ()
    """Values that only what it stands for makes and reads."""
    detail: str = field(default="", compare=False)

    def __str__(self) -> str:
        """One line."""
        where = f" at {', '.join(self.places)}" if self.places else ""
        value = f", first wrong value {self.value}" if self.value else ""
        ops = f" of {' '.join(self.ops)}" if self.ops else ""
        return f"{self.kind} {self.name} ({self.phase}, {self.graph}){ops}{where}{value}"


@dataclass(frozen=True, slots=True)
class _Stage:
    """What a phase did: frozen tensors it made (`constants`), then the ops numbered `changed` of `after` which make
    values that `before` has too (the last of those that one op made). Other new ops belong to these that read them."""

    phase: str
    before: Graph
    after: Graph
    constants: tuple[Value, ...]
    changed: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.constants) + len(self.changed)

    def told(self, k: int) -> str:
        """Change `k` in words: the op before and after, and rules that do not keep the meaning."""
        rules = wrong_rules(self.before)
        lines = [f"wrong rule: {text}" for text in rules]
        if k >= len(self.constants):
            new = self.after.ops[self.changed[k - len(self.constants)]]
            old = next((op for op in self.before.ops if set(op.outputs) & set(new.outputs)), None)
            lines += [f"{label}: {_shown(op)}" for label, op in (("before", old), ("after", new)) if op]
        return "\n".join(lines)

    def graph(self, k: int) -> Graph:
        """The graph in which the first `k` changes hold."""
        if k >= self.count:
            return self.after
        number = k - len(self.constants)
        if number <= 0:
            held = {v: self.after.constants[v] for v in self.constants[:k]}
            return _joined(self.before, self.after, held, ())
        ops = self.after.ops[: self.changed[number - 1] + 1]
        return _joined(self.before, self.after, self.after.constants, ops)

    def part(self, number: int) -> list[Op]:
        """Op `number` of `after`, behind those that make what only `after` has and it reads."""
        maker, producer = self.before.producer(), self.after.producer()
        replaced = {maker[v] for v in self.after.ops[number].outputs if v in maker}
        before = {v for v in _values(self.before) if maker.get(v) not in replaced}
        found, todo = {self.after.ops[number]}, [self.after.ops[number]]
        while todo:
            for v in todo.pop().inputs:
                op = producer.get(v)
                if op is not None and v not in before and op not in found:
                    found.add(op)
                    todo.append(op)
        return [op for op in self.after.ops[: number + 1] if op in found]


def _joined(before: Graph, after: Graph, constants: Mapping[Value, object], ops: Sequence[Op]) -> Graph:
    """The first `ops` of `after`, and what they leave of `before`."""
    held = {**before.constants, **constants}
    made = {*held, *(v for op in ops for v in op.outputs)}
    bound = {e for op in ops for e in op.binds}
    calls = {id(op.call) for op in ops if not op.outputs}
    rest: list[Op] = []
    for op in before.ops:
        known = [v in made for v in op.outputs]
        if (op.outputs and all(known) and set(op.binds) <= bound) or (
            not op.outputs and id(op.call) in calls
        ):
            continue
        outputs = tuple(
            Value(v.id, v.shape, v.dtype) if old else v for v, old in zip(op.outputs, known, strict=True)
        )
        rest.append(replace(op, outputs=outputs) if any(known) else op)
    return drop_unread(
        replace(
            before, ops=(*ops, *rest), constants=held, layouts={**before.layouts, **after.layouts},
            origins=after.origins,
        )
    )  # fmt: skip


def _stage(phase: str, before: Graph, after: Graph) -> _Stage:
    known = {op.outputs: op for op in before.ops}
    constants = [v for v, t in after.constants.items() if before.constants.get(v) is not t]
    values = _values(before) | after.kept()
    maker = before.producer()
    changed = [
        k
        for k, op in enumerate(after.ops)
        if not _is_same(op, known.get(op.outputs)) and (not op.outputs or not values.isdisjoint(op.outputs))
    ]
    # What one op made is made anew as a whole: half of it would leave the op there for the rest.
    last = {maker.get(v, v): k for k in changed for v in after.ops[k].outputs}
    ends = sorted({k for k in changed if not after.ops[k].outputs} | set(last.values()))
    return _Stage(phase, before, after, tuple(constants), tuple(ends))


def _values(graph: Graph) -> set[Value]:
    """All that a graph knows."""
    given = {v for v in graph.inputs if isinstance(v, Value)}
    return {*given, *graph.constants, *(v for op in graph.ops for v in op.outputs)}


def _is_same(op: Op, other: Op | None) -> bool:
    return other is not None and op.inputs == other.inputs and op.call is other.call and op.expr == other.expr


def _shown(op: Op) -> str:
    what = show_tensor_expr(op.expr) if op.expr is not None else op.call.name if op.call is not None else ""
    return f"{op.name} {what} of {' '.join(map(repr, op.inputs))}"


def _graphs(trace: Trace) -> list[tuple[str, Graph]]:
    """What the phases made of a captured graph, in order. In front of `select` those nodes run as calls too that
    come to be some."""
    made = {phase.name: phase.result for phase in trace.phases}  # the last attempt counts
    captured, frozen, found = made["capture"], made.get("freeze"), made.get("map")
    selected = made["select"]
    assert isinstance(captured, Graph) and isinstance(selected, Graph)
    origins = [o.id for o in captured.origins]
    graphs = [
        ("", keep_as_calls(captured, origins, "reference")),
        ("capture", selected_as(captured, selected)),
    ]
    if isinstance(frozen, Graph):
        graphs.append(("freeze", selected_as(frozen, selected)))
    if isinstance(found, ChosenRegions):
        graphs.append(("map", selected_as(found.graph, selected)))
    for name in BETWEEN:
        graph = made.get(name)
        if isinstance(graph, Graph):
            graphs.append((name, graph))
    cover = made["partition"]
    assert isinstance(cover, Cover)
    graphs.append(("partition", cover.graph))
    return graphs


class CompiledStates:
    """A graph that was compiled, and can run in any state: in state k the first k of its `candidates` hold."""

    def __init__(
        self, name: str, trace: Trace, compiled: Executable, options: Options, shares: Sequence[Share]
    ) -> None:
        self.compiled = compiled
        self.options = options
        self.shares = tuple(shares)
        cover, plan = trace["partition"], trace["plan"]
        assert isinstance(cover, Cover) and isinstance(plan, Plan)
        self.cover, self.plan = cover, plan
        graphs = _graphs(trace)
        self.captured = graphs[0][1]
        pairs = zip(graphs, graphs[1:], strict=False)
        self.stages = [_stage(phase, before, after) for (_, before), (phase, after) in pairs]
        self.units = [k for k, step in enumerate(cover.steps) if not isinstance(step, ViewStep)]
        self.name = name
        self.candidates = tuple(self._candidates())

    def state(self, k: int) -> Executable:
        """What runs in state `k`. Raises VerifyError for a state that is no plan."""
        if k >= len(self.candidates):
            return self.compiled
        for stage in self.stages:
            if k < stage.count:
                return self._planned(reference_cover(stage.graph(k)), {})
            k -= stage.count
        border = self.units[k] if k < len(self.units) else len(self.cover.steps)
        steps = (
            step if n < border else reference_of(step, self.cover) for n, step in enumerate(self.cover.steps)
        )
        return self._planned(replace(self.cover, steps=tuple(steps)), self._numbers())

    def detail(self, k: int, kernels: Sequence[KernelReport]) -> str:
        """More of candidate `k`: a kernel's source, or the op before and after a phase and the wrong rules."""
        candidate = self.candidates[k]
        if candidate.kind == "kernel":
            number = sum(c.kind == "kernel" for c in self.candidates[:k])
            return kernels[number].source if number < len(kernels) else ""
        for stage in self.stages:
            if k < stage.count:
                return stage.told(k)
            k -= stage.count
        return ""

    def _numbers(self) -> dict[Kernel, tuple[int, tuple[Value, ...]]]:
        """The number of each kernel in what was built, as the plan has it."""
        launches = [
            launch for segment in self.plan.segments for step in segment.steps if isinstance(step, Launches)
            for launch in step.launches
        ]  # fmt: skip
        kernels = [step for step in self.cover.steps if isinstance(step, Kernel)]
        return {
            k: (launch.kernel, (*k.inputs, *k.outputs)) for k, launch in zip(kernels, launches, strict=True)
        }

    def _planned(self, cover: Cover, kernels: Mapping[Kernel, tuple[int, tuple[Value, ...]]]) -> Executable:
        plan = build_plan(cover, kernels, self.plan.symbols, self.shares)
        plan = plan.on(self.plan.device, self.plan.host)
        made = PlannedGraph(cover, plan, self.compiled.unit)  # pyright: ignore[reportArgumentType]  (the unit that this graph was built with)
        return executable(made, self.options, checked=UNWRITTEN)

    # --- names ---

    def _candidates(self) -> list[Suspect]:
        found: list[Suspect] = []
        for stage in self.stages:
            kind = "declaration" if stage.phase == "capture" else "rewrite"
            for v in stage.constants:
                found.append(Suspect(self.name, "rewrite", stage.phase, "folded", value=repr(v)))
            for k in stage.changed:
                ops = stage.part(k)
                call = ops[-1].call
                name = call.name if call is not None else ops[-1].name
                found.append(self._candidate(stage.after, "call" if call else kind, stage.phase, name, ops))
        for k in self.units:
            found.append(self._unit(self.cover.steps[k]))
        return found

    def _unit(self, step: Step) -> Suspect:
        graph = self.cover.graph
        if isinstance(step, Kernel):
            number = sum(isinstance(s, Kernel) for s in self.cover.steps[: self.cover.steps.index(step)])
            return self._candidate(graph, "kernel", "plan", f"k{number}", step.ops, step.outputs)
        assert isinstance(step, LibraryStep)
        return self._candidate(graph, "call", "plan", step.op.name, [step.op])

    def _candidate(
        self, graph: Graph, kind: str, phase: str, name: str, ops: Sequence[Op], values: Sequence[Value] = ()
    ) -> Suspect:
        origins = [graph.origins[op.origin] for op in ops if op.origin >= 0]
        places = dict.fromkeys(o.place for o in origins if o.place)
        shown = " ".join(map(repr, values or ops[-1].outputs))
        inside = [repr(v) for op in ops for v in op.outputs if v not in values and op is not ops[-1]]
        names = tuple(op.name for op in ops)
        return Suspect(self.name, kind, phase, name, names, tuple(places), shown, tuple(inside))
