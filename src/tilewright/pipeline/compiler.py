"""Compiles a captured graph: capture, the phases, and what runs their plan. Name, time and result of each phase are
kept in a `Trace`."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, fx
from torch._dispatch.python import no_python_dispatcher

from tilewright.analysis.size_hints import NO_HINTS, SizeHints
from tilewright.capture.aliasing.shares import output_shares, placed_by_size
from tilewright.capture.autograd.saved import first_saved
from tilewright.capture.environment import shape_env, traced_sizes
from tilewright.capture.exported import Exported
from tilewright.capture.fx import from_fx
from tilewright.capture.placement.moved import moved
from tilewright.errors import (
    BuildError,
    CompilerMissing,
    IllegalSchedule,
    UnsupportedError,
    VerifyError,
    warn,
)
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Graph, Op, Share, Shares, Value
from tilewright.ir.kernel import LibraryStep
from tilewright.ir.program import TileProgram
from tilewright.library.cost import call_seconds
from tilewright.library.select import keep_as_calls, library_cover
from tilewright.options import Options
from tilewright.plan import Home, Plan
from tilewright.plan.build import build_plan
from tilewright.plan.coverage import Coverage
from tilewright.plan.reports import CallReport, KernelReport, calls_of, report_of
from tilewright.runtime.call.asked import tracing_ends
from tilewright.runtime.call.compilations import Compilations
from tilewright.runtime.call.fallback import Captured, captured_coverage
from tilewright.runtime.cuda.executable import CudaExecutable
from tilewright.runtime.cuda.graph import Graphs
from tilewright.runtime.plan.executable import Executable, Guards
from tilewright.runtime.stats import STATS
from tilewright.schedule.solver import Solver
from tilewright.target import Target
from tilewright.tuning.search_limits import BUILDING
from tilewright.tuning.text_limits import TEXTS

from .backends.executables import executable
from .build import ProductRefused, RefusedKernels, names_of, number_kernels
from .phases import PHASES, begin, check_strict, run_phases
from .place import DevicePlace, find_missing, machine_of, place_of
from .state import CapturedProgram, CompileRequest, PlannedGraph, State
from .trace import PhaseRecorder, Trace

LOG = logging.getLogger("tilewright")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Compilation:
    """How one graph was compiled; prints as a line.

    `kind` is inference, forward or backward; `calls` are what runs besides `kernels`.
    """

    kind: str
    coverage: Coverage
    recorder: PhaseRecorder
    kernels: tuple[KernelReport, ...] = ()
    calls: tuple[CallReport, ...] = ()
    graphs: Graphs | None = None
    machine: Target | None = None
    """What kernels were generated for, if any were."""
    captured: CapturedProgram | None = None
    """None for what runs as it was captured."""

    @property
    def trace(self) -> Trace:
        """Every phase."""
        return self.recorder.trace

    @property
    def cuda_graphs(self) -> tuple[str, ...]:
        """How many CUDA graphs replay, or why none does, in one line; nothing without the option."""
        return () if self.graphs is None else (self.graphs.report,)

    @property
    def takes(self) -> str:
        """Types and sizes of its inputs, which tell graphs of one model apart; empty for what runs as captured."""
        inputs = () if self.captured is None else self.captured.graph.inputs
        given = [f"{v.dtype}[{', '.join(map(repr, v.shape))}]" for v in inputs if isinstance(v, Value)]
        more = len(given) - TEXTS.max_listed_inputs
        return ", ".join((*given[: TEXTS.max_listed_inputs], *([f"{more} more"] if more > 0 else ())))

    def __repr__(self) -> str:
        takes = f"takes {self.takes}" if self.takes else ""
        return "; ".join(filter(None, (f"{self.kind} graph: {self.coverage}", takes, *self.cuda_graphs)))


COMPILATIONS: Compilations[Compilation] = Compilations()
"""Those whose graphs can still run."""


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A graph that can run, with how it came about."""

    executable: Executable | Captured
    compilation: Compilation

    @property
    def coverage(self) -> Coverage:
        """How much is generated."""
        return self.compilation.coverage

    @property
    def trace(self) -> Trace:
        """Every phase."""
        return self.compilation.trace

    @property
    def compilations(self) -> tuple[Compilation, ...]:
        """The one."""
        return (self.compilation,)

    @property
    def kernels(self) -> tuple[KernelReport, ...]:
        """One entry per generated kernel."""
        return self.compilation.kernels

    @property
    def calls(self) -> tuple[CallReport, ...]:
        """One entry per call that is not a generated kernel."""
        return self.compilation.calls

    @property
    def cuda_graphs(self) -> tuple[str, ...]:
        """As in `Compilation`."""
        return self.compilation.cuda_graphs


Watcher = Callable[[fx.GraphModule, Mapping[str, Tensor], Compiled, Options], Compiled]
"""Is shown each captured graph with its frozen tensors and what it became, and gives what is to run."""

_WATCHERS: list[Watcher] = []


def is_watched() -> bool:
    """Whether captured graphs are shown to somebody now."""
    return bool(_WATCHERS)


@contextmanager
def watch_compilations(by: Watcher) -> Generator[None]:
    """What is compiled meanwhile, on any thread, is shown to `by`."""
    _WATCHERS.append(by)
    try:
        yield
    finally:
        _WATCHERS.remove(by)


def compile_fx(
    gm: fx.GraphModule,
    options: Options,
    *,
    frozen: Mapping[str, Tensor] | None = None,
    trusted: bool = False,
    program: Exported | None = None,
    kind: str = "inference",
) -> Compiled:
    """Compile a captured graph whose nodes carry fake values. Placeholders named in `frozen` become constants.

    `trusted` says that the caller checks sizes, types and frozen tensors on each call; else sizes must fulfil the
    conditions of the `program` that the graph is of, and are in its ranges. A graph that some phase refuses runs as it
    was captured (with a warning if the refusal is a defect of ours), and without a C++ compiler every op runs as a
    library call; the coverage says so. Raises UnsupportedError under `strict`, and CompilerMissing if the compiler that
    the options name does not work."""
    run = PhaseRecorder()
    with without_collector(), tracing_ends(run):
        guards = Guards(trusted, program.conditions if program is not None else ())
        ranges = program.ranges if program is not None else None
        try:
            with _guard_free(gm):
                there = moved(gm)
                place = place_of(there, frozen or {}, kind)
                graph = run("capture", lambda: _on_host(from_fx(there, frozen=frozen, ranges=ranges)))
                with no_python_dispatcher():
                    shares, traced = output_shares(there), SizeHints(traced_sizes(there))
                    asked = CompileRequest(run, options, place, shares, traced, _compile_body, trusted)
                    made = _generated(asked, graph)
                    _check_places(made.plan, placed_by_size(there, shares))
        except (UnsupportedError, VerifyError, IllegalSchedule, BuildError) as refused:
            if options.strict or isinstance(refused, CompilerMissing):
                raise
            if not isinstance(refused, UnsupportedError):
                warn(f"runs as captured, without generated code: {refused}", RuntimeWarning)
            STATS.fallbacks += 1
            return as_captured(gm, options, refused.message, frozen=frozen, kind=kind, recorder=run)
        STATS.graphs += 1
        make = partial(executable, made, options, guards=guards, saves=first_saved(gm), kind=kind)
        runs = run("bind", make, _nothing)
        graphs = runs.graphs if isinstance(runs, CudaExecutable) else None
        compilation = Compilation(
            kind, made.coverage, run, made.kernels, made.calls, graphs, made.machine,
            CapturedProgram(graph, shares, traced, options),
        )  # fmt: skip
        return _noted(gm, frozen or {}, runs, compilation, options)


def compile_graph(program: CapturedProgram, conditions: Sequence[Expr] = (), device: str = "cpu") -> Compiled:
    """Compile a graph that was captured before, perhaps by another process, for inference on a device. Sizes must
    fulfil the `conditions`. What a phase refuses runs as library calls; the coverage says so. Raises UnsupportedError
    under `strict`, and CompilerMissing if the compiler that the options name does not work."""
    run, options = PhaseRecorder(), program.options
    with without_collector(), tracing_ends(run):
        with no_python_dispatcher():
            asked = CompileRequest(
                run, options, DevicePlace(device), program.shares, program.traced, _compile_body, False
            )
            try:
                made = _generated(asked, program.graph)
            except (UnsupportedError, VerifyError, IllegalSchedule, BuildError) as refused:
                if options.strict or isinstance(refused, CompilerMissing):
                    raise
                warn(f"runs without generated code: {refused}", RuntimeWarning)
                STATS.fallbacks += 1
                made = _as_calls(asked, program.graph)
        STATS.graphs += 1
        runs = run(
            "bind", lambda: executable(made, options, guards=Guards(False, tuple(conditions))), _nothing
        )
        made_of = Compilation(
            "inference", made.coverage, run, made.kernels, made.calls, None, made.machine, program
        )
        COMPILATIONS.add(runs, made_of)
        LOG.info("%s", made_of)
        return Compiled(runs, made_of)


def plan_graph(program: CapturedProgram, device: str, machine: Target) -> PlannedGraph:
    """Kernels and a plan for a kind of `device` and a `machine` that need not be here: nothing is timed, and nothing
    can run. Raises what a phase raises, and UnsupportedError where no compiler for it is here."""
    options = program.options.replace(measure=False, verify=False)
    place = DevicePlace(device, machine=machine)
    missing = find_missing(options, device)
    if missing:
        raise UnsupportedError(missing, phase="build", hint="save it where that is installed")
    with without_collector(), no_python_dispatcher():
        asked = CompileRequest(
            PhaseRecorder(), options, place, program.shares, program.traced, _compile_body, False
        )
        return _generated(asked, program.graph)


def _nothing(made: object) -> None:
    """What is kept of a phase whose result the record must not refer to."""
    del made


def as_captured(
    gm: fx.GraphModule, options: Options, reason: str, *, frozen: Mapping[str, Tensor] | None = None,
    kind: str = "inference", recorder: PhaseRecorder | None = None,
) -> Compiled:  # fmt: skip
    """A captured graph as it is, all of it library calls by need for one `reason`."""
    made = Compilation(kind, captured_coverage(gm, reason), recorder or PhaseRecorder())
    return _noted(gm, frozen or {}, Captured(gm, frozen or {}), made, options)


def as_program(gm: fx.GraphModule, reason: str) -> tuple[Compiled, Callable[..., object]]:
    """A program as Dynamo captured it, all of it library calls by need for one `reason`; and what runs it in eager
    mode, with its own gradients."""
    made = Compilation("program", captured_coverage(gm, reason), PhaseRecorder())
    STATS.fallbacks += 1
    done = Compiled(Captured(gm, {}), made)
    COMPILATIONS.add(done.executable, made)
    LOG.info("%s", made)
    return done, partial(_run_program, done, gm)


def _run_program(compiled: Compiled, gm: fx.GraphModule, *args: object) -> object:
    """Run in eager mode what is `compiled` among the compilations meanwhile."""
    del compiled
    return gm(*args)


def _noted(
    gm: fx.GraphModule, frozen: Mapping[str, Tensor], executable: Executable | Captured, made: Compilation,
    options: Options,
) -> Compiled:  # fmt: skip
    """Write down and say what was compiled, and show it to those who watch."""
    COMPILATIONS.add(executable, made)
    LOG.info("%s", made)
    done = Compiled(executable, made)
    for watcher in tuple(_WATCHERS):
        done = watcher(gm, frozen, done, options)
    return done


def _on_host(graph: Graph) -> Graph:
    """With its constants where the interpreter can read them; they go to the device when all is compiled."""
    held = {v: t.cpu() if isinstance(t, Tensor) else t for v, t in graph.constants.items()}
    return replace(graph, constants=held)


def _generated(asked: CompileRequest, graph: Graph) -> PlannedGraph:
    """As `_attempted`, with the ops of kernels that a compiler behind us refuses as library calls (and a warning), and
    with the library's products where those that were measured as faster do not build."""
    refusals = 0
    while True:
        try:
            return _attempted(asked, graph)
        except ProductRefused as refused:
            if refused.key in asked.refused:  # it was left to the library, so that something else is wrong
                raise
            warn(f"the library computes it: {refused}", RuntimeWarning)
            asked = replace(asked, refused=asked.refused | {refused.key})
        except RefusedKernels as refused:
            ops = [op for kernel in refused.kernels for op in kernel.ops]
            left = keep_as_calls(graph, (op.origin for op in ops), "a refused kernel")
            refusals += 1
            if asked.options.strict or left is graph or refusals > BUILDING.max_graph_attempts:
                raise
            names = ", ".join(op.name for op in ops)
            warn(f"{names} run as library calls: {refused}", RuntimeWarning)
            graph = left


def _attempted(asked: CompileRequest, graph: Graph) -> PlannedGraph:
    """From the captured graph to built kernels and their plan; without a compiler, all of it as library calls."""
    run = asked.recorder
    missing = run("machine", lambda: find_missing(asked.options, asked.place.device))
    if missing:
        warn(f"{missing}: every op runs as a library call", RuntimeWarning)
        return _as_calls(asked, graph)
    state = run_phases(run("begin", lambda: _begun(asked, graph), _nothing), PHASES)
    assert state.kernels is not None
    STATS.kernels += state.kernels.programs
    return run("report", lambda: _reported(state), _nothing)


def _begun(asked: CompileRequest, graph: Graph) -> State:
    machine = machine_of(asked.place, asked.options)
    return begin(
        asked, graph, Solver(machine, asked.options, scheduler=asked.place.backend.scheduler(machine))
    )


def _reported(state: State) -> PlannedGraph:
    """What the phases made, with reports of each kernel and call."""
    asked = state.request
    assert state.cover is not None and state.kernels is not None and state.plan is not None
    kernels = number_kernels(state.cover, state.kernels.numbers)
    sizes, scheduled = asked.traced.sizes, state.kernels.scheduled
    names, backend, target = names_of(state.graph.symbols()), asked.place.backend, state.target

    def printer(program: TileProgram) -> str:
        return backend.show_source(program, names, target)

    reports = tuple(
        report_of(k, state.cover, n, sizes, partial(scheduled.__getitem__, i), printer)
        for i, (k, (n, _)) in enumerate(kernels.items())
    )
    if not _decided_as_traced(state):
        seconds_at, layouts, traced = state.solver.seconds_at, state.cover.layouts, asked.traced
        reports = tuple(
            replace(r, modelled=partial(seconds_at, k, layouts, traced))
            for r, k in zip(reports, kernels, strict=True)
        )
    calls = calls_of(state.cover, state.captured.ops, sizes, partial(_call_seconds, state))
    planned = PlannedGraph(state.cover, state.plan, state.kernels.unit, reports, calls, machine=target)
    return planned.beside(state.bodies)


def _as_calls(asked: CompileRequest, graph: Graph) -> PlannedGraph:
    """Every op as a library call."""
    run, place = asked.recorder, asked.place
    cover = run("partition", lambda: library_cover(graph))
    check_strict(cover, strict=asked.options.strict)
    lazy_hints = NO_HINTS if place.lazy_memory else None
    plan = run(
        "plan",
        lambda: build_plan(cover, {}, (), asked.shares, lazy_hints=lazy_hints).on(place.device, place.host),
    )
    return PlannedGraph(
        cover, plan, calls=calls_of(cover, graph.ops, asked.traced.sizes, lambda step, ops: None)
    )


def _compile_body(asked: CompileRequest, body: Graph) -> tuple[PlannedGraph, Executable]:
    """The body of a loop of a graph that is `asked` for."""
    options = asked.options
    made = _generated(
        replace(
            asked,
            recorder=PhaseRecorder(),
            options=options.replace(measure=False),  # products of ours run without Python between steps
            place=replace(asked.place, host=(), lazy_memory=False),
            shares=tuple(Share(Shares.NOTHING, k) for k in range(len(body.outputs))),
            trusted=False,
            repeated=True,
        ),
        body,
    )
    return made, executable(made, options, kind="loop")


def _decided_as_traced(state: State) -> bool:
    """Whether kernels were decided at the sizes that the graph was traced with (others, where those are tiny)."""
    return state.solver.hints == state.request.traced


def _call_seconds(state: State, step: LibraryStep, ops: Sequence[Op]) -> float:
    """Modelled seconds of a call that does some captured ops, at the sizes that the graph was traced with; what was
    found around contractions knows routines, at sizes that kernels are decided at."""
    if not _decided_as_traced(state):
        return call_seconds(ops, step.op.outputs, state.target, state.request.traced)
    for region in state.regions.regions if state.regions is not None else ():
        if region.routine is not None and any(op.call is step.op.call for op in region.routine.ops):
            return region.seconds
    return call_seconds(ops, step.op.outputs, state.target, state.solver.hints)


def _check_places(plan: Plan, outputs: Sequence[int]) -> None:
    """Raise UnsupportedError unless these outputs are tensors in the memory that they share: whoever reads their place
    off a copy finds a wrong one."""
    for k in outputs:
        b = plan.outputs[k]
        if isinstance(b, int) and plan.buffers[b].home in (Home.OUTPUT, Home.ARENA):
            raise UnsupportedError(
                f"output {k} is a view whose strides or place are not proved", phase="plan", place=f"output {k}",
                hint="return a copy of it: .clone()",
            )  # fmt: skip


@contextmanager
def without_collector() -> Generator[None]:
    """Without the cycle collector: phases make many objects that live to their end, and each full collection looks at
    everything that torch and the model have made before (0.2 s after the usual imports)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _guard_free(gm: fx.GraphModule) -> AbstractContextManager[object]:
    """Under it, any attempt to add a guard is an error (from torch 2.12 on)."""
    guarded = getattr(shape_env(gm), "error_on_new_guards", None)
    return guarded() if guarded is not None else nullcontext()
