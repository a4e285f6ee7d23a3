"""The pipeline: the only file that knows all phases. Each phase's name, time and result is kept in a `Trace`."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from torch import Tensor, fx
from torch._dispatch.python import no_python_dispatcher

from tilewright.analysis.size_hints import raise_sizes, representative, seen_sizes
from tilewright.capture.aliasing.shares import output_shares, placed_by_size
from tilewright.capture.autograd.saved import first_saved
from tilewright.capture.environment import shape_env, traced_sizes
from tilewright.capture.fx import from_fx
from tilewright.capture.placement.moved import moved
from tilewright.capture.symbols import Ranges
from tilewright.emit.cpp.unit import emit_unit
from tilewright.emit.triton.kernel import emit_triton
from tilewright.errors import BuildError, CompilerMissing, IllegalSchedule, UnsupportedError, VerifyError
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Graph, Op, Share, Shares, Value
from tilewright.ir.kernel import Cover, LibraryStep
from tilewright.ir.program import TileProgram
from tilewright.library.cost import call_seconds
from tilewright.library.select import keep_as_calls, library_cover, select
from tilewright.library.specialise import specialise
from tilewright.lower.variants import variants
from tilewright.options import Options
from tilewright.partition.choose_kernels import ChosenRegions
from tilewright.partition.cover import partition
from tilewright.partition.layout import choose_layouts
from tilewright.plan import Home, Plan, build_plan
from tilewright.plan.coverage import Coverage, coverage_of
from tilewright.plan.reports import CallReport, KernelReport, calls_of, report_of
from tilewright.plan.work import CoreTime, ops_by_origin
from tilewright.rewrite.normal.frozen_weights import freeze
from tilewright.rewrite.normal.normalise import (
    fold_constants,
    interpret,
    normalise,
    simplify,
    without_nothing,
)
from tilewright.rewrite.normal.split_bias import split_biases
from tilewright.rewrite.normal.wide_moments import widen_moments
from tilewright.rewrite.normal.wide_scans import widen_scans
from tilewright.rewrite.split.reduction import split_reductions
from tilewright.runtime.call.compilations import Compilations
from tilewright.runtime.call.fallback import Captured, captured_coverage
from tilewright.runtime.cpu.kernels import NativeUnit
from tilewright.runtime.cuda.executable import CudaExecutable
from tilewright.runtime.cuda.graph import Graphs
from tilewright.runtime.cuda.kernels import CudaUnit
from tilewright.runtime.own.product import maker
from tilewright.runtime.own.timer import Timer
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.stats import STATS
from tilewright.runtime.store.cache import Store, default_root
from tilewright.runtime.store.decisions import Decisions
from tilewright.schedule.mask_windows import with_windows
from tilewright.schedule.solver import Solver
from tilewright.target import Target
from tilewright.tuning.search_limits import BUILDING
from tilewright.tuning.thresholds import SIZES

from .build import Builder, Refused, executable, names_of, number_kernels
from .loops import Bodies, compile_loops
from .phases import Recorder, Trace
from .place import Place, find_missing, machine_of, place_of
from .prices import choose_region_kernels

T = TypeVar("T")
LOG = logging.getLogger("tilewright")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Compilation:
    """How one graph was compiled; prints as a line.

    `kind` is inference, forward or backward; `calls` are what runs besides `kernels`.
    """

    kind: str
    coverage: Coverage
    trace: Trace
    kernels: tuple[KernelReport, ...] = ()
    calls: tuple[CallReport, ...] = ()
    graphs: Graphs | None = None

    @property
    def cuda_graphs(self) -> tuple[str, ...]:
        """How many CUDA graphs replay, or why none does, in one line; nothing without the option."""
        return () if self.graphs is None else (self.graphs.report,)

    def __repr__(self) -> str:
        return "; ".join((f"{self.kind} graph: {self.coverage}", *self.cuda_graphs))


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
    conditions: Sequence[Expr] = (),
    ranges: Ranges | None = None,
    kind: str = "inference",
) -> Compiled:
    """Compile a captured graph whose nodes carry fake values. Placeholders named in `frozen` become constants.

    `trusted` says that the caller checks sizes, types and frozen tensors on each call; else sizes must fulfil
    `conditions`, and are in `ranges` where these name them. A graph that some phase refuses runs as it was captured
    (with a warning if the refusal is a defect of ours), and without a C++ compiler every op runs as a library call; the
    coverage says so. Raises UnsupportedError under `strict`, and CompilerMissing if the compiler that the options name
    does not work."""
    run = Recorder()
    try:
        with _guard_free(gm), without_collector():
            there = moved(gm)
            place = place_of(there, frozen or {}, kind)
            graph = run("capture", lambda: _on_host(from_fx(there, frozen=frozen, ranges=ranges)))
            with no_python_dispatcher():
                made = _generated(
                    run, graph, options, place, output_shares(there), traced_sizes(there), trusted
                )
                _check_places(made.plan, placed_by_size(there, output_shares(there)))
    except (UnsupportedError, VerifyError, IllegalSchedule, BuildError) as refused:
        if options.strict or isinstance(refused, CompilerMissing):
            raise
        if not isinstance(refused, UnsupportedError):
            warnings.warn(
                f"runs as captured, without generated code: {refused}", RuntimeWarning, stacklevel=2
            )
        STATS.fallbacks += 1
        return as_captured(gm, options, refused.message, frozen=frozen, kind=kind, trace=run.trace)
    STATS.graphs += 1
    runs = executable(
        made.cover, made.plan, made.unit, options, trusted=trusted, conditions=conditions, saves=first_saved(gm),
        kind=kind,
    )  # fmt: skip
    graphs = runs.graphs if isinstance(runs, CudaExecutable) else None
    compilation = Compilation(kind, made.coverage, run.trace, made.kernels, made.calls, graphs)
    return _noted(gm, frozen or {}, runs, compilation, options)


def as_captured(
    gm: fx.GraphModule, options: Options, reason: str, *, frozen: Mapping[str, Tensor] | None = None,
    kind: str = "inference", trace: Trace | None = None,
) -> Compiled:  # fmt: skip
    """A captured graph as it is, all of it library calls by need for one `reason`."""
    made = Compilation(kind, captured_coverage(gm, reason), trace or Trace())
    return _noted(gm, frozen or {}, Captured(gm, frozen or {}), made, options)


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


@dataclass(frozen=True, slots=True)
class _Made:
    """What the phases behind capture hand to the executable."""

    cover: Cover
    plan: Plan
    unit: NativeUnit | CudaUnit | None = None
    kernels: tuple[KernelReport, ...] = ()
    calls: tuple[CallReport, ...] = ()
    bodies: tuple[_Made, ...] = ()
    """Of loops."""

    def beside(self, found: Bodies[_Made]) -> _Made:
        """The same with what the bodies of loops became."""
        kernels = (*self.kernels, *(k for b in (*found.bodies, *found.more) for k in b.kernels))
        calls = (*self.calls, *(c for b in found.bodies for c in b.calls))
        return replace(self, kernels=kernels, calls=calls, bodies=tuple(found.bodies))

    @property
    def coverage(self) -> Coverage:
        """Of the graph and of the bodies of its loops."""
        covered = coverage_of(self.cover)
        for body in self.bodies:
            covered = covered + body.coverage
        return covered


def _on_host(graph: Graph) -> Graph:
    """With its constants where the interpreter can read them; they go to the device when all is compiled."""
    held = {v: t.cpu() if isinstance(t, Tensor) else t for v, t in graph.constants.items()}
    return replace(graph, constants=held)


def _generated(
    run: Recorder, graph: Graph, options: Options, place: Place, shares: tuple[Share, ...], sizes: Mapping[str, int],
    trusted: bool, *, repeated: bool = False,
) -> _Made:  # fmt: skip
    """As `_attempted`, with the ops of kernels that a compiler behind us refuses as library calls (and a warning)."""
    for _ in range(BUILDING.max_graph_attempts):
        try:
            return _attempted(run, graph, options, place, shares, sizes, trusted, repeated=repeated)
        except Refused as refused:
            ops = [op for kernel in refused.kernels for op in kernel.ops]
            left = keep_as_calls(graph, (op.origin for op in ops), "a refused kernel")
            if options.strict or left is graph:
                raise
            names = ", ".join(op.name for op in ops)
            warnings.warn(f"{names} run as library calls: {refused}", RuntimeWarning, stacklevel=2)
            graph = left
    return _attempted(run, graph, options, place, shares, sizes, trusted, repeated=repeated)


def _attempted(
    run: Recorder, graph: Graph, options: Options, place: Place, shares: tuple[Share, ...], sizes: Mapping[str, int],
    trusted: bool, *, repeated: bool = False,
) -> _Made:  # fmt: skip
    """From the captured graph to built kernels and their plan; without a compiler, all of it as library calls. `sizes`
    are those that it was traced with. `repeated`: it runs step by step, many times."""
    planned = partial(build_plan, shares=shares, device=place.device, host=place.host, late=place.late)
    missing = find_missing(options, place.device)
    if missing:
        warnings.warn(f"{missing}: every op runs as a library call", RuntimeWarning, stacklevel=2)
        cover = run("partition", lambda: library_cover(graph))
        _check_strict(cover, options)
        calls = calls_of(cover, graph.ops, sizes, lambda step, ops: None)
        return _Made(cover, run("plan", lambda: planned(cover, {})), calls=calls)
    target = machine_of(place, options)
    solver = Solver(target, options)
    typical = typical_sizes(graph, sizes)
    covers = Decisions(target, Store(default_root(options)), options, typical)
    normal = _normal(
        run, graph, solver, options, typical, covers, sizes, late=trusted, device=place.device,
        repeated=repeated,
    )  # fmt: skip
    normal, bodies = run("loops", lambda: _looped(normal, options, place, sizes))
    with seen_sizes(typical):
        laid = replace(normal, layouts=choose_layouts(normal))
        parted = run("split", lambda: split_reductions(laid, solver.price, target))
        cover = run(
            "partition",
            lambda: partition(
                parted,
                solver.price,
                covers,
                fuse=options.fusion == "full",
                shown=_shown(parted, shares),
                afar=solver.afar,
                # what one step of a loop hands to the next has memory of its own
                storages={} if repeated else _storages(parted, shares),
            ),
        )
        _check_strict(cover, options)
    symbols = normal.symbols()
    names = names_of(symbols)
    planned = partial(
        planned, core_ns=CoreTime(target, ops_by_origin(graph.ops)), alone_ns=round(target.alone_seconds * 1e9),
        handover_ns=round(target.handover_seconds * 1e9),
    )  # fmt: skip
    built = Builder(run, solver, covers, typical, place.ordinal).built([cover], symbols)
    STATS.kernels += built.programs
    kernels = number_kernels(cover, built.numbers)
    with seen_sizes(typical):
        plan = run("plan", lambda: planned(cover, kernels, names))
    printer = _printer(names, target)
    reports = tuple(
        report_of(k, cover, n, sizes, partial(built.scheduled.__getitem__, i), printer)
        for i, (k, (n, _)) in enumerate(kernels.items())
    )
    price = partial(_call_seconds, run.trace["map"], target, typical)
    return _Made(cover, plan, built.unit, reports, calls_of(cover, graph.ops, sizes, price)).beside(bodies)


def _looped(
    graph: Graph, options: Options, place: Place, sizes: Mapping[str, int]
) -> tuple[Graph, Bodies[_Made]]:
    """The graph with the body of each loop compiled, and how."""
    alone = options.replace(measure=False)  # products of ours run without Python between steps

    def made_of(body: Graph) -> tuple[_Made, Executable]:
        kept = tuple(Share(Shares.NOTHING, k) for k in range(len(body.outputs)))
        made = _generated(
            Recorder(), body, alone, replace(place, host=(), late=False), kept, sizes, False, repeated=True
        )
        return made, executable(made.cover, made.plan, made.unit, options, kind="loop")

    return compile_loops(graph, made_of, options, place)


def _call_seconds(
    found: object, target: Target, sizes: Mapping[str, int], step: LibraryStep, ops: Sequence[Op]
) -> float:
    """Modelled seconds of a call that does some captured ops; what was `found` around contractions knows routines."""
    for region in found.regions if isinstance(found, ChosenRegions) else ():
        if region.routine is not None and any(op.call is step.op.call for op in region.routine.ops):
            return region.seconds
    with seen_sizes(sizes):
        return call_seconds(ops, step.op.outputs, target)


def typical_sizes(graph: Graph, traced: Mapping[str, int]) -> Mapping[str, int]:
    """Sizes of a graph's symbols to decide at, if it was `traced` with those."""
    values = [*graph.inputs, *(v for op in graph.ops for v in op.outputs)]
    return representative((v.numel for v in values if isinstance(v, Value)), traced)


def _normal(
    run: Recorder, graph: Graph, solver: Solver, options: Options, sizes: Mapping[str, int], covers: Decisions,
    traced: Mapping[str, int], *, late: bool = False, device: str = "", repeated: bool = False,
) -> Graph:  # fmt: skip
    """The graph as partition takes it: library calls chosen, constants folded, frozen weights packed (`late`: by the
    first call). `sizes` are typical ones, and library calls are timed at those that were `traced`; kernels are timed on
    `device`, if one is named."""
    target = solver.target
    evaluate = interpret if graph.constants else None
    graph = without_nothing(graph)
    frozen = run("freeze", lambda: freeze(fold_constants(simplify(graph), interpret)) if evaluate else graph)
    found = run("map", lambda: choose_region_kernels(frozen, solver, options, sizes, covers, device))
    chosen = run("select", lambda: select(found.graph, repeated=repeated, small=target.small_product))
    parted = split_biases(chosen) if target.bias_apart else chosen
    parted = widen_scans(parted) if target.wide_scans else parted
    parted = widen_moments(parted) if target.wide_moments else parted
    normal = run("normalise", lambda: normalise(parted, evaluate))
    if target.language == "cpp":
        store = Store(default_root(options))
        own = maker(target, store, options, late=late)
        timer = Timer(target, store, options, traced) if options.measure else None
        plain = normal
        normal = run("specialise", lambda: normalise(specialise(plain, target, own, timer), evaluate))
    grown = raise_sizes(sizes, SIZES.min_region_size, graph.symbols())
    return run("windows", lambda: with_windows(normal, solver, grown))


def _printer(symbols: Sequence[str], target: Target) -> Callable[[TileProgram], str]:
    """What shows the source of a program."""
    if target.language == "triton":
        return lambda program: emit_triton(program, symbols, target, variants(program)[0], "kernel").text
    return lambda program: emit_unit([program], symbols, target).text


def _check_strict(cover: Cover, options: Options) -> None:
    """Under `strict`, raise UnsupportedError if a library call is there by need and of no kind that is admitted."""
    bad = coverage_of(cover).refused() if options.strict else ()
    if bad:
        raise UnsupportedError(
            f"strict: {', '.join(bad)} would run as library calls", phase="partition",
            hint="compile without strict=True, and read .coverage",
        )  # fmt: skip


def _shown(graph: Graph, shares: Sequence[Share]) -> frozenset[Value]:
    """The outputs that are memory of something else."""
    pairs = zip(graph.outputs, shares, strict=True)
    return frozenset(v for v, share in pairs if share.kind and isinstance(v, Value))


def _storages(graph: Graph, shares: Sequence[Share]) -> dict[Value, int]:
    """The numbers of the outputs' storages in the program, of those that are returned in one only."""
    found: dict[Value, set[int]] = {}
    for v, share in zip(graph.outputs, shares, strict=True):
        if isinstance(v, Value):
            found.setdefault(v, set()).add(share.storage)
    return {v: min(storages) for v, storages in found.items() if len(storages) == 1}


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
