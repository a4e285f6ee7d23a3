"""`explain`: what runs, in order; what it costs against what it must; and why each kernel ends where it does."""

from __future__ import annotations

import statistics
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from torch import Tensor, fx

from tilewright import measure
from tilewright.artifact.way import LoadedWay
from tilewright.capture.described import Signature
from tilewright.errors import InputError
from tilewright.ir.kernel import Cover, Kernel, LibraryStep, Scheduled
from tilewright.options import Options
from tilewright.partition.choose_kernels import ChosenRegions
from tilewright.pipeline.compiler import Compiled as BuiltGraph
from tilewright.pipeline.compiler import watch_compilations
from tilewright.plan import Copy, Launches, Plan, View
from tilewright.runtime.call.model import CompiledModel
from tilewright.runtime.plan.bound import intermediate_bytes
from tilewright.runtime.plan.clocked import StepClock, clocked
from tilewright.runtime.plan.executable import Executable
from tilewright.tilegraph.connect import connect
from tilewright.tilegraph.edge import TileGraph
from tilewright.tilegraph.traffic import traffic
from tilewright.tuning.search_limits import MEASUREMENT
from tilewright.tuning.text_limits import TEXTS

from .request import CommandRequest, ExitCode
from .show import Cell, Json, size
from .work import (
    CallRecord,
    Compiled,
    GraphWork,
    KernelRecord,
    call_facts,
    compiled_and_run,
    kernel_facts,
    microseconds,
    prepared,
    result_of,
    show_compiled,
    threads_of,
)


@dataclass(frozen=True, slots=True)
class ExplainedStep:
    """One kernel or call in the order of execution, and the seconds that it took (None: not measured)."""

    record: KernelRecord | CallRecord
    is_kernel: bool
    measured: float | None = None


def explain_model(request: CommandRequest, *, everything: bool, timed: bool, source: bool) -> int:
    """`explain`: one table of kernels and calls, the bytes at each memory level, the regions that were chosen."""
    clocks: dict[int, StepClock] = {}
    with request.progress(f"compiling {request.model}"), measure.settings(threads_of(request)):
        model, chosen = prepared(request)
        if timed and isinstance(model.target, CompiledModel) and isinstance(model.target.way, LoadedWay):
            clocks |= {id(g): g.clocked() for g in model.target.way.graphs}
        with _clocks(clocks if timed else None):
            compiled, _ = compiled_and_run(request, model, chosen.inputs)
        if timed:
            if not clocks:
                raise InputError(
                    "only graphs on the CPU are timed",
                    phase="cli",
                    op="--time",
                    hint="use `tilewright bench`",
                )
            _repeat(compiled, chosen.inputs, list(clocks.values()))
    show_compiled(request, compiled)
    _show_sizes(request, compiled)
    entries = [e for g in compiled.compilations for e in _entries(g, clocks.get(id(g)))]
    _show_entries(request, entries, everything=everything, timed=timed)
    for graph in compiled.compilations:
        _show_memory(request, graph)
        _show_levels(request, graph)
        _show_regions(request, graph)
    kernels = [cast(KernelRecord, e.record) for e in entries if e.is_kernel]
    request.screen.facts["kernels"] = [kernel_facts(k, source) for k in kernels]
    if source:
        _show_source(request, kernels)
    return ExitCode.OK


@contextmanager
def _clocks(found: dict[int, StepClock] | None) -> Generator[None]:
    """Graphs on the CPU that are compiled inside have a clock around each step, by the identity of their record."""
    if found is None:
        yield
        return

    def watched(
        gm: fx.GraphModule, frozen: Mapping[str, Tensor], done: BuiltGraph, options: Options
    ) -> BuiltGraph:
        del gm, frozen, options
        if type(done.executable) is not Executable or done.executable.plan.device != "cpu":
            return done
        runs, clock = clocked(done.executable)
        found[id(done.compilation)] = clock
        return BuiltGraph(runs, done.compilation)

    with watch_compilations(watched):
        yield


def _repeat(compiled: Compiled, inputs: Sequence[Tensor], clocks: Sequence[StepClock]) -> None:
    """Calls that are counted, behind those that warm up."""
    for rounds in (MEASUREMENT.step_warm_calls, MEASUREMENT.step_calls):
        for clock in clocks:
            clock.forget()
        for _ in range(rounds):
            compiled(*inputs)


def _entries(graph: GraphWork, clock: StepClock | None) -> list[ExplainedStep]:
    """Kernels and calls in the order of the cover; those of loops' bodies, which run within a call, behind."""
    cover = result_of(graph, "partition")
    order: list[bool] = [] if isinstance(cover, Cover) else _order(result_of(graph, "plan"))
    for step in cover.steps if isinstance(cover, Cover) else ():
        if isinstance(step, Kernel):
            order.append(True)
        elif isinstance(step, LibraryStep) and step.op.call is not None:
            order.append(False)
    kernels, calls = list(graph.kernels), list(graph.calls)
    times = {
        True: _seconds(clock and clock.launches, order.count(True)),
        False: _seconds(clock and clock.called, order.count(False)),
    }
    found: list[ExplainedStep] = []
    for is_kernel in order:
        records: list[KernelRecord] | list[CallRecord] = kernels if is_kernel else calls
        if records:
            found.append(ExplainedStep(records.pop(0), is_kernel, times[is_kernel].pop(0)))
    return [*found, *(ExplainedStep(k, True) for k in kernels), *(ExplainedStep(c, False) for c in calls)]


def _order(plan: object) -> list[bool]:
    """Whether each step of a plan is a kernel or a call, in their order."""
    steps = [step for s in plan.segments for step in s.steps] if isinstance(plan, Plan) else []
    kinds = [
        [True] * len(s.launches) if isinstance(s, Launches) else [False]
        for s in steps
        if not isinstance(s, View | Copy)
    ]
    return [kind for group in kinds for kind in group]


def _seconds(timed: Mapping[int, list[float]] | None, count: int) -> list[float | None]:
    """The median of each; nothing where the plan has other steps than the cover."""
    if timed is None or len(timed) != count:
        return [None] * count
    return [statistics.median(seconds) if seconds else None for seconds in timed.values()]


def _show_sizes(request: CommandRequest, compiled: Compiled) -> None:
    """Which numbers stand behind free sizes in what follows."""
    known: dict[str, int] = {}
    for graph in compiled.compilations:
        for record in (*graph.kernels, *graph.calls):
            known |= record.sizes
    signature = compiled.signature
    named = {s.symbol: s for s in signature.sizes} if isinstance(signature, Signature) else {}
    if named:  # torch also tells of symbols that it found equal to these
        known = {symbol: number for symbol, number in known.items() if symbol in named}
    texts: list[str] = []
    for symbol, number in known.items():
        s = named.get(symbol)
        places = " ".join(f"{name}:{dim}" for name, dim in s.places) if s is not None else ""
        name = symbol if s is None or s.name == symbol else f"{symbol} ({s.name})"
        texts.append(f"{name} = {number}" + (f" at {places}" if places else ""))
    if texts:
        request.screen.line(f"figures are for {'; '.join(texts)}")
    request.screen.facts["figures_for"] = known


def _show_entries(
    request: CommandRequest, entries: Sequence[ExplainedStep], *, everything: bool, timed: bool
) -> None:
    screen = request.screen
    total = sum(e.record.seconds or 0.0 for e in entries)
    costs = [e.measured if timed and e.measured is not None else e.record.seconds or 0.0 for e in entries]
    most = sorted(range(len(entries)), key=lambda k: -costs[k])
    kept = set(most if everything else most[: TEXTS.max_explained_steps])
    rows = [_row(k, e, total, timed) for k, e in enumerate(entries) if k in kept]
    columns = ("#", "runs", "whose", "share", "modelled us", *(("measured us",) if timed else ()))
    columns += ("bytes moved", "lower bound", "ratio", "why it ends there", "ops")
    title = "kernels and calls, in order"
    if len(kept) < len(entries):
        title += f" (the {len(kept)} that cost most of {len(entries)}; --all shows all)"
    screen.table(title, columns, rows)
    moved, bound = (sum(_bytes(e)[k] or 0 for e in entries) for k in (0, 1))
    count = sum(e.is_kernel for e in entries)
    screen.line(
        f"{count} kernels and {len(entries) - count} calls move {size(moved)}; lower bound {size(bound)}; "
        f"modelled {total * 1e6:,.1f} us"
    )
    if timed:
        measured = sum(e.measured or 0.0 for e in entries)
        screen.line(
            f"measured {measured * 1e6:,.1f} us: each step by the clock, the median of {MEASUREMENT.step_calls} calls "
            "of the whole model; steps that one native call runs otherwise are launched apart"
        )
    screen.facts["steps"] = [_facts(k, e, total) for k, e in enumerate(entries)]


def _bytes(entry: ExplainedStep) -> tuple[int | None, int | None]:
    """Bytes moved, and the least; a call moves each operand and result once."""
    moved = entry.record.bytes_moved
    return moved, cast(KernelRecord, entry.record).bytes_lower_bound if entry.is_kernel else moved


def _why(entry: ExplainedStep) -> str:
    if entry.is_kernel:
        return cast(KernelRecord, entry.record).boundary.value
    return f"a call ({entry.record.reason})"


def _row(k: int, entry: ExplainedStep, total: float, timed: bool) -> Sequence[Cell]:
    record = entry.record
    moved, bound = _bytes(entry)
    over = f"{moved / bound:.2f}x" if moved is not None and bound else "-"
    share = f"{record.seconds / total:.1%}" if record.seconds is not None and total else "-"
    measured: tuple[Cell, ...] = (None if entry.measured is None else entry.measured * 1e6,) if timed else ()
    whose = "generated" if entry.is_kernel else cast(CallRecord, record).how
    return (
        k, record.name, whose, share, microseconds(record), *measured, size(moved), size(bound), over, _why(entry),
        " ".join(map(str, record.ops)),
    )  # fmt: skip


def _facts(k: int, entry: ExplainedStep, total: float) -> dict[str, Json]:
    told = kernel_facts(cast(KernelRecord, entry.record), False) if entry.is_kernel else None
    facts = told or call_facts(cast(CallRecord, entry.record))
    share = entry.record.seconds / total if entry.record.seconds is not None and total else None
    measured = None if entry.measured is None else entry.measured * 1e6
    return {"number": k, "kernel": entry.is_kernel, **facts, "share": share, "measured_us": measured}


def _show_memory(request: CommandRequest, graph: GraphWork) -> None:
    """What lives between kernels and calls."""
    plan = result_of(graph, "plan")
    needed = intermediate_bytes(plan, _sizes_of(graph)) if isinstance(plan, Plan) else None
    request.screen.line(f"intermediates take {size(needed)}")
    request.screen.facts["intermediate_bytes"] = needed


def _sizes_of(graph: GraphWork) -> Mapping[str, int]:
    return next((record.sizes for record in (*graph.kernels, *graph.calls)), {})


def tilegraph_of(graph: GraphWork) -> TileGraph | None:
    """The tile-graph of what was compiled, without the bodies of loops; None if it has no cover. (Of a phase that ran
    again, the last result counts.)"""
    cover, schedules = result_of(graph, "partition"), result_of(graph, "schedule")
    plan = result_of(graph, "plan")
    if not isinstance(cover, Cover) or not isinstance(schedules, Sequence | None):
        return None
    known = cast(Sequence[Scheduled], schedules or ())
    return connect(cover, known, plan.host if isinstance(plan, Plan) else ())


def _show_levels(request: CommandRequest, graph: GraphWork) -> None:
    """At which level of memory edges are, and the bytes that move there."""
    found = tilegraph_of(graph)
    if found is None:
        return
    try:
        moved = traffic(found, _sizes_of(graph))
    except KeyError:  # a size that comes from data
        moved = {}
    rows = [(level.name, len(found.at(level)), moved.get(level)) for level in found.levels()]
    request.screen.table(
        "levels", ("level", "edges", "bytes moved"), [(name, n, size(b)) for name, n, b in rows]
    )
    on_chip = sum(e.on_chip for e in found.edges)
    request.screen.line(f"{on_chip} of {len(found.edges)} edges stay on chip")
    request.screen.facts["levels"] = [{"level": name, "edges": n, "bytes_moved": b} for name, n, b in rows]


def _show_regions(request: CommandRequest, graph: GraphWork) -> None:
    """What was decided about contractions whose large results are folded again."""
    found = result_of(graph, "map")
    regions = [str(region) for region in found.regions] if isinstance(found, ChosenRegions) else []
    for text in regions:
        request.screen.block(text)
    request.screen.facts["regions"] = regions


def _show_source(request: CommandRequest, kernels: Sequence[KernelRecord]) -> None:
    """Each distinct kernel's text once, as it is."""
    for name, text in {k.name: k.source for k in kernels}.items():
        request.screen.block(f"\n// {name}")
        request.screen.block(text)
