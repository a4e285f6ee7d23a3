"""`explain`: what runs, in order; what it costs against what it must; and why each kernel ends where it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

from torch import Tensor, fx

from tilewright import measure
from tilewright.artifact.way import LoadedWay
from tilewright.errors import InputError
from tilewright.options import EarlyLaunch, Options
from tilewright.pipeline.compiler import Compiled as BuiltGraph
from tilewright.pipeline.compiler import watch_compilations
from tilewright.plan import Plan
from tilewright.plan.data import lists_of
from tilewright.report.page import page
from tilewright.report.records import CallRecord, Compiled, GraphWork, KernelRecord, result_of
from tilewright.report.stored import read_facts, to_json
from tilewright.report.taken import (
    ExplainedStep,
    explained_steps,
    levels_of,
    memory_of,
    named_sizes,
    regions_of,
    report_facts,
    reported,
    size_texts,
    sizes_of,
    tilegraph_of,
)
from tilewright.report.texts import size
from tilewright.report.write import check_writable, write
from tilewright.runtime.call.model import CompiledModel
from tilewright.runtime.cuda.device import refuses_early_launch
from tilewright.runtime.cuda.driver import opened
from tilewright.runtime.plan.clocked import StepClock, clocked
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.plan.layouts import copied_bytes
from tilewright.target import Target
from tilewright.tuning.text_limits import TEXTS
from tilewright.tuning.timing_limits import MEASUREMENT

from .request import CommandRequest, ExitCode
from .show import Cell, Json
from .slowest import StepBound, bound_of, seconds_of, slowest_texts
from .work import (
    call_facts,
    compiled_and_run,
    kernel_facts,
    microseconds,
    options_of,
    prepared,
    show_compiled,
    threads_of,
)


def explain_model(request: CommandRequest, *, everything: bool, timed: bool, source: bool) -> int:
    """`explain`: one table of kernels and calls, the bytes at each memory level, the regions that were chosen."""
    compiled, clocks = _compiled(request, timed)
    if timed and not clocks:
        raise InputError(
            "only graphs on the CPU are timed", phase="cli", op="--time", hint="use `tilewright bench`"
        )
    show_compiled(request, compiled)
    _show_sizes(request, compiled)
    threads = threads_of(request)
    found = [
        (e, bound_of(e, g.machine, threads))
        for g in compiled.compilations
        for e in explained_steps(g, clocks.get(id(g)))
    ]
    entries = [e for e, _ in found]
    _show_entries(request, entries, [b for _, b in found], everything=everything, timed=timed)
    for graph in compiled.compilations:
        _show_memory(request, graph)
        _show_lists(request, graph)
        _show_early_launch(request, graph)
        _show_writes(request, graph)
        _show_levels(request, graph)
        _show_regions(request, graph)
    kernels = [cast(KernelRecord, e.record) for e in entries if e.is_kernel]
    request.screen.facts["kernels"] = [kernel_facts(k, source) for k in kernels]
    if source:
        _show_source(request, kernels)
    return ExitCode.OK


def report_model(request: CommandRequest, *, output: str, timed: bool, against: str | None) -> int:
    """`report`: the same and more as one page. A MODEL that is the JSON of an earlier report is not compiled."""
    check_writable(output)
    earlier = None if against is None else read_facts(against)
    if request.model.endswith(".json"):
        facts = read_facts(request.model)
    else:
        compiled, clocks = _compiled(request, timed)
        show_compiled(request, compiled)
        graphs = reported(compiled.compilations, compiled.signature)
        facts = report_facts(request.model, graphs, clocks)
        request.screen.facts |= to_json(facts)
    write(output, page(facts, earlier))
    steps = sum(len(g.steps) for g in facts.graphs)
    request.screen.line(f"report of {steps} kernels and calls: {output}")
    return ExitCode.OK


def _compiled(request: CommandRequest, timed: bool) -> tuple[Compiled, dict[int, StepClock]]:
    """The model, compiled and run; with the clocks of the graphs whose steps were timed, by the identity of their
    record."""
    clocks: dict[int, StepClock] = {}
    with request.progress(f"compiling {request.model}"), measure.settings(threads_of(request)):
        model, chosen = prepared(request)
        if timed and isinstance(model.target, CompiledModel) and isinstance(model.target.way, LoadedWay):
            clocks |= {id(g): g.clocked() for g in model.target.way.graphs}
        with _clocks(clocks if timed else None):
            compiled, _ = compiled_and_run(request, model, chosen.inputs)
        _repeat(compiled, chosen.inputs, list(clocks.values()))
    return compiled, clocks


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
    for rounds in (MEASUREMENT.step_warm_calls, MEASUREMENT.step_calls) if clocks else ():
        for clock in clocks:
            clock.forget()
        for _ in range(rounds):
            compiled(*inputs)


def _show_sizes(request: CommandRequest, compiled: Compiled) -> None:
    """Which numbers stand behind free sizes in what follows."""
    known: dict[str, int] = {}
    for graph in compiled.compilations:
        for record in (*graph.kernels, *graph.calls):
            known |= record.sizes
    known = named_sizes(known, compiled.signature)
    texts = size_texts(known, compiled.signature)
    if texts:
        request.screen.line(f"figures are for {'; '.join(texts)}")
    request.screen.facts["figures_for"] = known


def _show_entries(
    request: CommandRequest,
    entries: Sequence[ExplainedStep],
    bounds: Sequence[StepBound | None],
    *,
    everything: bool,
    timed: bool,
) -> None:
    screen = request.screen
    costs = [seconds_of(e, timed) for e in entries]
    most = sorted(range(len(entries)), key=lambda k: -costs[k])
    kept = set(most if everything else most[: TEXTS.max_explained_steps])
    rows = [_row(k, entries[k], bounds[k], sum(costs), timed) for k in sorted(kept)]
    columns = ("#", "runs", "whose", "share", "modelled us", *(("measured us",) if timed else ()), "bound by")
    columns += ("bytes moved", "lower bound", "ratio", "why it ends there", "ops")
    title = "kernels and calls, in order"
    if len(kept) < len(entries):
        title += f" (the {len(kept)} that cost most of {len(entries)}; --all shows all)"
    screen.table(title, columns, rows)
    slowest = slowest_texts(entries, bounds, timed)
    for text in slowest:
        screen.line(text)
    _show_totals(request, entries, timed)
    total = sum(e.record.seconds or 0.0 for e in entries)
    screen.facts["steps"] = [
        _facts(k, e, total) | {"bound_by": None if b is None else b.name}
        for k, (e, b) in enumerate(zip(entries, bounds, strict=True))
    ]
    screen.facts["slowest"] = list(slowest)


def _show_totals(request: CommandRequest, entries: Sequence[ExplainedStep], timed: bool) -> None:
    """Bytes and times of all together."""
    screen = request.screen
    moved, bound = (sum(e.bytes[k] or 0 for e in entries) for k in (0, 1))
    count = sum(e.is_kernel for e in entries)
    total = sum(e.record.seconds or 0.0 for e in entries)
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


def _why(entry: ExplainedStep) -> str:
    if entry.is_kernel:
        return cast(KernelRecord, entry.record).boundary.value
    return f"a call ({entry.record.reason})"


def _row(k: int, entry: ExplainedStep, limit: StepBound | None, total: float, timed: bool) -> Sequence[Cell]:
    record = entry.record
    moved, bound = entry.bytes
    over = f"{moved / bound:.2f}x" if moved is not None and bound else "-"
    taken = seconds_of(entry, timed)
    share = f"{taken / total:.1%}" if taken and total else "-"
    measured: tuple[Cell, ...] = (None if entry.measured is None else entry.measured * 1e6,) if timed else ()
    whose = "generated" if entry.is_kernel else cast(CallRecord, record).how
    return (
        k, record.name, whose, share, microseconds(record), *measured, "-" if limit is None else limit.name,
        size(moved), size(bound), over, _why(entry), " ".join(map(str, record.ops)),
    )  # fmt: skip


def _facts(k: int, entry: ExplainedStep, total: float) -> dict[str, Json]:
    told = kernel_facts(cast(KernelRecord, entry.record), False) if entry.is_kernel else None
    facts = told or call_facts(cast(CallRecord, entry.record))
    share = entry.record.seconds / total if entry.record.seconds is not None and total else None
    measured = None if entry.measured is None else entry.measured * 1e6
    return {"number": k, "kernel": entry.is_kernel, **facts, "share": share, "measured_us": measured}


def _show_memory(request: CommandRequest, graph: GraphWork) -> None:
    """What lives between kernels and calls."""
    needed = memory_of(graph)
    request.screen.line(f"intermediates take {size(needed)}")
    request.screen.facts["intermediate_bytes"] = needed


def _show_lists(request: CommandRequest, graph: GraphWork) -> None:
    """Which kernels are one launch."""
    plan = result_of(graph, "plan")
    lists = lists_of(plan) if isinstance(plan, Plan) else []
    if lists:
        named = ", ".join(f"k{kernel} x{rows}" for kernel, rows in lists)
        request.screen.line(f"one launch each: {named}")
    request.screen.facts["lists"] = [{"kernel": f"k{kernel}", "rows": rows} for kernel, rows in lists]


def _show_early_launch(request: CommandRequest, graph: GraphWork) -> None:
    """Whether kernels begin before the kernel in front has ended, where that was asked for."""
    text = early_launch_text(graph.machine, options_of(request).early_launch)
    if text:
        request.screen.line(text)
    request.screen.facts["early_launch"] = text or None


def early_launch_text(machine: Target | None, asked: EarlyLaunch) -> str:
    """How kernels for a machine are launched, in one line; empty where nothing else than stream order was asked for."""
    if machine is None or machine.language != "triton" or asked == "none":
        return ""
    why = refuses_early_launch(machine)
    if not why and any(not gpu.driver.launches_early for gpu in opened()):
        why = "the driver is older than CUDA 12.3"
    if why:
        return f"kernels are launched in stream order: {why}"
    behind = "any kernel" if asked == "any" else "a generated one"
    return f"kernels are launched early behind {behind}, for whose end they wait"


def _show_writes(request: CommandRequest, graph: GraphWork) -> None:
    """What is written into inputs where they lie, and why the rest is copied there."""
    plan = result_of(graph, "plan")
    writes = plan.writes if isinstance(plan, Plan) else ()
    if isinstance(plan, Plan) and writes:
        placed = sum(not why for _, why in writes)
        copied = copied_bytes(plan, sizes_of(graph))
        request.screen.line(
            f"{placed} of {len(writes)} writes into inputs are in place; {size(copied)} are copied"
        )
        for why, count in Counter(why for _, why in writes if why).items():
            request.screen.line(f"  {count} by a copy: {why}")
    request.screen.facts["writes"] = [{"input": k, "copied": why or None} for k, why in writes]


def _show_levels(request: CommandRequest, graph: GraphWork) -> None:
    """At which level of memory edges are, and the bytes that move there."""
    found = tilegraph_of(graph)
    if found is None:
        return
    levels = levels_of(graph, found)
    request.screen.table(
        "levels", ("level", "edges", "bytes moved"), [(x.name, x.edges, size(x.bytes_moved)) for x in levels]
    )
    on_chip = sum(e.on_chip for e in found.edges)
    request.screen.line(f"{on_chip} of {len(found.edges)} edges stay on chip")
    request.screen.facts["levels"] = [
        {"level": x.name, "edges": x.edges, "bytes_moved": x.bytes_moved} for x in levels
    ]


def _show_regions(request: CommandRequest, graph: GraphWork) -> None:
    """What was decided about contractions whose large results are folded again."""
    regions = regions_of(graph)
    for text in regions:
        request.screen.block(text)
    request.screen.facts["regions"] = list(regions)


def _show_source(request: CommandRequest, kernels: Sequence[KernelRecord]) -> None:
    """Each distinct kernel's text once, as it is."""
    for name, text in {k.name: k.source for k in kernels}.items():
        request.screen.block(f"\n// {name}")
        request.screen.block(text)
