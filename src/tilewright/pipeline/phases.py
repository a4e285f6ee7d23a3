"""The phases behind capture, in order. Each is a function from a state to the next one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tilewright.analysis.fitting_sizes import fitting
from tilewright.analysis.size_hints import SizeHints, representative
from tilewright.analysis.writes.built import decide_built, with_places
from tilewright.errors import UnsupportedError, warn, warn_once
from tilewright.ir.graph import Graph, Share, Value
from tilewright.ir.kernel import Cover
from tilewright.ir.program import TileProgram
from tilewright.library.convolution_layout import lay_channels_innermost
from tilewright.library.fuse_convolutions import fuse_convolutions
from tilewright.library.patch_convolutions import multiply_patches
from tilewright.library.select import drop_unread, select
from tilewright.library.specialise import specialise
from tilewright.library.written.parts import with_written_parts
from tilewright.partition.cover import OutputMemory, cover_unfused, partition
from tilewright.partition.layout import choose_layouts
from tilewright.plan.build import build_plan
from tilewright.plan.coverage import coverage_of
from tilewright.plan.lists import with_lists
from tilewright.plan.overwritten import check_overwritten
from tilewright.plan.work import CoreTime, ops_by_origin
from tilewright.rewrite.algebra.diagonals import share_diagonals
from tilewright.rewrite.normal.frozen_progressions import recognise_progressions
from tilewright.rewrite.normal.frozen_weights import freeze
from tilewright.rewrite.normal.normalise import (
    Evaluate,
    fold_constants,
    interpret,
    normalise,
    simplify,
    without_nothing,
)
from tilewright.rewrite.normal.split_bias import split_biases
from tilewright.rewrite.normal.wide_moments import widen_moments
from tilewright.rewrite.normal.wide_powers import widen_powers
from tilewright.rewrite.normal.wide_scans import widen_scans
from tilewright.rewrite.split.reduction import split_reductions
from tilewright.runtime.cuda.convolutions import ConvolutionTimer
from tilewright.runtime.own.product import maker
from tilewright.runtime.own.timer import Timer
from tilewright.runtime.stats import STATS
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.runtime.store.decisions import Decisions
from tilewright.runtime.store.tuned import Tuned, tuned_for
from tilewright.schedule.mask_windows import with_windows
from tilewright.schedule.solver import Solver, kernel_key
from tilewright.tuning.thresholds import SIZES

from .build import (
    Clock,
    JoinedKernelRefused,
    KernelBuilder,
    Kernels,
    ProductRefused,
    in_silence,
    names_of,
    number_kernels,
)
from .loops import Bodies, Looping, compile_loops
from .place import DevicePlace
from .products import choose_products, choose_untimed
from .region_kernels import RegionTrial, choose_attention, choose_region_kernels
from .state import CompileRequest, State
from .timed.kernel_fronts import join_fronts
from .timed.kernel_ways import choose_ways

LOG = logging.getLogger("tilewright")


@dataclass(frozen=True, slots=True)
class Phase:
    """One step of compilation: `run` where it is `needed`. What is `shown` of the state that it gives goes into the
    trace; nothing does of a phase that records its own parts. One that only makes a graph `faster` is left out where it
    fails."""

    name: str
    run: Callable[[State], State]
    needed: Callable[[State], bool] = lambda state: True
    shown: Callable[[State], object] | None = lambda state: state.graph
    faster: bool = False

    def tried(self, state: State) -> State:
        """The state behind this phase."""
        try:
            return self.run(state)
        except ProductRefused:  # the graph is compiled again without it
            raise
        except Exception as error:
            if not self.faster:
                raise
            LOG.info("phase %s failed", self.name, exc_info=True)
            warn(
                f"[{self.name}] {type(error).__name__}: {error}. This phase is left out: results are right without it,"
                " and may be slower. Hint: report it with the log of `tilewright` at level INFO"
            )
            return state


def begin(asked: CompileRequest, graph: Graph, solver: Solver, store: ContentStore | None = None) -> State:
    """Before the first phase. The `solver` decides at sizes that are typical for the graph; `store` stands in for the
    one of the options."""
    typical = fitting(graph, typical_sizes(graph, asked.traced), asked.traced)
    usual, rest = solver.at(typical), without_nothing(graph)
    raised = typical.raised(SIZES.assumed_size, rest.symbols())
    grown = usual.at(fitting(graph, raised, typical))
    memory = ContentStore(default_root(asked.options)) if store is None else store
    decisions = Decisions(solver.target, memory, asked.options, typical.sizes)
    where = asked.place.backend.timing_key(asked.place.device, asked.options)
    # who wants nothing timed wants what is expected to be the fastest, whatever was found before
    tuned = tuned_for(asked.options, where) if asked.options.measure else Tuned()
    return State(asked, usual, grown, decisions, graph, rest, tuned=tuned)


def typical_sizes(graph: Graph, traced: SizeHints) -> SizeHints:
    """Sizes of a graph's symbols to decide at, if it was `traced` with those."""
    values = [*graph.inputs, *(v for op in graph.ops for v in op.outputs)]
    return representative((v.numel for v in values if isinstance(v, Value)), traced)


Check = Callable[[str, State], None]
_CHECKS: list[Check] = []


@contextmanager
def check_phases(by: Check) -> Generator[None]:
    """What each phase gives meanwhile, on any thread, is shown to `by`, with the phase's name."""
    _CHECKS.append(by)
    try:
        yield
    finally:
        _CHECKS.remove(by)


def run_phases(state: State, phases: Sequence[Phase]) -> State:
    """The state after all phases that are needed, one after the other."""
    for phase in phases:
        if not phase.needed(state):
            continue
        before, record = state, state.request.recorder
        if phase.shown is None:
            state = phase.tried(before)
        else:
            state = record(phase.name, lambda phase=phase, before=before: phase.tried(before), phase.shown)
        for check in tuple(_CHECKS):
            check(phase.name, state)
    return state


def _evaluator(state: State) -> Evaluate | None:
    """What computes with constants, where there are some."""
    return interpret if state.captured.constants else None


def _freeze(state: State) -> State:
    folded = fold_constants(simplify(state.graph), interpret)
    return state.with_graph(freeze(recognise_progressions(folded)))


def _is_timed(state: State) -> bool:
    """Whether what runs on the device may be timed there."""
    asked = state.request
    return asked.options.measure and asked.place.backend.clock(asked.place.device) is not None


def _choose_region_kernels(state: State) -> State:
    asked = state.request
    builder = replace(_quiet_builder(state), solver=state.grown)
    trial = _region_trial(state, builder) if _times_products(state) else None
    found = choose_region_kernels(state.graph, builder, state.solver, asked.place, trial)
    return replace(state, graph=found.graph, regions=found)


IMPROVES_CALLS = frozenset({"fuse_convolutions", "split_biases", "normalise"})
"""Phases behind `products` that give a library's calls the form in which they run on a GPU."""


def _times_products(state: State) -> bool:
    """Whether products of matrices and attention may become kernels of our own by the clock."""
    options, place = state.request.options, state.request.place
    wanted = options.contractions == "modelled" and options.fusion == "full" and options.measure
    return wanted and place.backend.replay_clock(place.device) is not None


def _may_have_product_kernels(state: State) -> bool:
    """Whether products may become kernels of our own: by the clock, by a table of what was measured, or, where they
    unpack operands, by the model."""
    options = state.request.options
    wanted = options.contractions == "modelled" and options.fusion == "full"
    return _times_products(state) or (wanted and state.target.language == "triton")


def _quiet_builder(state: State) -> KernelBuilder:
    """What builds kernels that are only timed."""
    place = state.request.place
    return KernelBuilder(
        in_silence, place.backend, state.solver, state.decisions, place.ordinal, tuned=state.tuned
    )


def _region_trial(state: State, builder: KernelBuilder) -> RegionTrial:
    asked = state.request
    clock = asked.place.backend.replay_clock(asked.place.device)
    assert clock is not None, "asked before (`_times_products`)"
    return RegionTrial(builder, asked.place.device, asked.options, clock)


def _choose_attention(state: State) -> State:
    found = choose_attention(state.graph, _region_trial(state, _quiet_builder(state)))
    earlier = state.regions.regions if state.regions is not None else ()
    return replace(state, graph=found.graph, regions=replace(found, regions=(*earlier, *found.regions)))


def _choose_products(state: State) -> State:
    asked = state.request

    def improved(graph: Graph) -> Graph:
        """With calls as they run later, or a library would be timed below its worth."""
        for phase in (p for p in PHASES if p.name in IMPROVES_CALLS):
            before = state.with_graph(graph)
            graph = phase.run(before).graph if phase.needed(before) else graph
        return graph

    builder = _quiet_builder(state)
    if _times_products(state):
        seconds = asked.options.tune_seconds
        found = choose_products(state.graph, builder, asked.place.device, seconds, improved, asked.refused)
    else:
        found = choose_untimed(state.graph, builder.solver, asked.refused)
    return replace(state, graph=found.graph, products=found)


def _select(state: State) -> State:
    if state.request.options.contractions == "inside":
        return state.with_graph(drop_unread(state.graph))
    return state.with_graph(
        select(state.graph, repeated=state.request.repeated, small=state.target.small_product)
    )


def _lays_channels(state: State) -> bool:
    """Whether convolutions may be done on images of the other memory format. (In training each pass has a graph of its
    own, and memory formats are part of what one hands to the other.)"""
    asked = state.request
    called = asked.options.contractions != "inside" and not asked.place.lazy_memory
    return called and state.target.fused_convolutions and _is_timed(state)


def _convolution_timer(state: State) -> ConvolutionTimer:
    asked = state.request
    return ConvolutionTimer(
        state.target,
        ContentStore(default_root(asked.options)),
        state.solver.hints,
        asked.place.device,
        state.tuned,
    )


def _fuse_convolutions(state: State) -> State:
    asked, timer = state.request, _convolution_timer(state)
    graph = state.graph if asked.place.lazy_memory else multiply_patches(state.graph, timer)
    # A fused form rounds once.
    return state.with_graph(graph if asked.options.round_intermediates else fuse_convolutions(graph, timer))


def _normalise(state: State) -> State:
    return state.with_graph(normalise(state.graph, _evaluator(state)))


def _specialise(state: State) -> State:
    asked, target = state.request, state.target
    store = ContentStore(default_root(asked.options))
    own = maker(target, store, asked.options, pack_lazily=asked.trusted)
    sizes = asked.traced.sizes
    timer = Timer(target, store, asked.options, sizes, tuned=state.tuned) if asked.options.measure else None
    return state.with_graph(normalise(specialise(state.graph, target, own, timer), _evaluator(state)))


def _compile_loops(state: State) -> State:
    asked = state.request
    found = Looping(
        lambda body: asked.compile_body(asked, body),
        asked.options,
        state.target,
        asked.place.ordinal or 0,
        Bodies(),
    )
    graph, bodies = compile_loops(state.graph, asked.place.backend, found)
    return replace(state, graph=graph, bodies=bodies)


def _split(state: State) -> State:
    laid = replace(state.graph, layouts=choose_layouts(state.graph))
    solver, policy = state.solver, state.solver.scheduler.splits
    return state.with_graph(split_reductions(laid, solver.price, state.target, policy, solver.hints))


def _partition(state: State) -> State:
    asked, graph, solver = state.request, state.graph, state.solver
    # what one step of a loop hands to the next has memory of its own
    storages = {} if asked.repeated else _storages(graph, asked.shares)
    outputs = OutputMemory(_shown(graph, asked.shares), storages)
    if asked.options.fusion == "full":
        cover = partition(
            graph, solver.price, solver.hints, state.decisions, outputs=outputs, afar=solver.afar
        )
    else:
        cover = cover_unfused(graph, solver.hints, outputs)
    check_strict(cover, strict=asked.options.strict)
    return replace(state, cover=cover)


def _join_fronts(state: State) -> State:
    place, where, clock = _clocked(state)
    assert state.cover is not None
    joined = join_fronts(state.cover, _quiet_builder(state), place.device, clock, where)
    return replace(state, cover=joined.cover, joined=joined) if joined.fronts else state


def _choose_places(state: State) -> State:
    assert state.cover is not None
    hints, cover = state.solver.hints, with_places(state.cover, state.solver.hints)
    if _has_lists(state.request):
        cover = with_lists(cover, lambda kernel: kernel_key(kernel, cover.layouts), hints)
    return replace(state, cover=cover)


def _has_lists(asked: CompileRequest) -> bool:
    """Whether kernels that are alike may be one launch: not where each is looked at, nor in the steps of a loop."""
    return asked.options.fusion == "full" and asked.options.verify is not True and not asked.repeated


def _times_kernels(state: State) -> bool:
    """Whether a clock may say how kernels are printed."""
    options, place = state.request.options, state.request.place
    wanted = options.fusion == "full" and options.measure and (options.tune_seconds > 0 or bool(state.tuned))
    return wanted and place.backend.replay_clock(place.device) is not None


def _clocked(state: State) -> tuple[DevicePlace, str, Clock]:
    """Where kernels are timed, what that is called, and the clock."""
    place = state.request.place
    clock = place.backend.replay_clock(place.device)
    assert clock is not None, "asked before (`_times_kernels`)"
    return place, place.backend.timing_key(place.device, state.request.options), clock


def _choose_ways(state: State) -> State:
    place, where, clock = _clocked(state)
    assert state.cover is not None
    try:
        choose_ways(state.cover, _quiet_builder(state), place.device, clock, where)
    except JoinedKernelRefused as refused:
        return _choose_ways(_with_kernels_apart(state, refused))
    return state


def _with_kernels_apart(state: State, refused: JoinedKernelRefused) -> State:
    """With the kernels apart again of which a clock made one that is `refused`: that is raised if there are none."""
    before = state.joined
    after = before.without_forgotten(state.solver) if before is not None else None
    if before is None or after is None or len(after.fronts) == len(before.fronts):
        raise refused
    warn_once(str(refused))
    return _choose_places(replace(state, cover=after.cover, joined=after))


def _make_kernels(state: State) -> State:
    assert state.cover is not None
    asked = state.request
    builder = KernelBuilder(
        asked.recorder, asked.place.backend, state.solver, state.decisions, asked.place.ordinal,
        listed=state.cover.lists.keys(),
    )  # fmt: skip
    try:
        return replace(state, kernels=builder.built([state.cover], state.graph.symbols()))
    except JoinedKernelRefused as refused:
        return _make_kernels(_with_kernels_apart(state, refused))


def _plan(state: State) -> State:
    assert state.cover is not None and state.kernels is not None
    asked, target, cover = state.request, state.target, state.cover
    in_place = decide_built(cover, state.kernels.scheduled)
    cover = replace(cover, in_place=in_place)
    STATS.writes_in_place += sum(v.reason is None for v in in_place.verdicts)
    STATS.writes_copied += sum(v.reason is not None for v in in_place.verdicts)
    plan = build_plan(
        cover,
        number_kernels(cover, state.kernels.numbers),
        names_of(state.graph.symbols()),
        asked.shares,
        core_ns=CoreTime(target, ops_by_origin(state.captured.ops)),
        lazy_hints=state.solver.hints if asked.place.lazy_memory else None,
    ).on(asked.place.device, asked.place.host)
    check_overwritten(plan, _programs_by_number(state.kernels))
    alone, handover = (round(s * 1e9) for s in (target.alone_seconds, target.handover_seconds))
    return replace(state, plan=replace(plan, alone_ns=alone, handover_ns=handover), cover=cover)


def _programs_by_number(kernels: Kernels) -> Callable[[int], Sequence[TileProgram]]:
    """The programs of a kernel by its number in the unit."""
    numbers = list(kernels.numbers)
    return lambda number: kernels.scheduled[numbers.index(number)].programs


PHASES: tuple[Phase, ...] = (
    Phase("freeze", _freeze, lambda s: bool(s.captured.constants)),
    Phase("diagonals", lambda s: s.with_graph(share_diagonals(s.graph, s.grown.hints)), faster=True),
    Phase("map", _choose_region_kernels, shown=lambda s: s.regions),
    Phase(
        "lay_channels",
        lambda s: s.with_graph(lay_channels_innermost(s.graph, _convolution_timer(s))),
        _lays_channels,
        faster=True,
    ),
    Phase("attention", _choose_attention, _times_products, lambda s: s.regions, faster=True),
    Phase("products", _choose_products, _may_have_product_kernels, lambda s: s.products, faster=True),
    Phase("select", _select),
    Phase("fuse_convolutions", _fuse_convolutions, lambda s: s.target.fused_convolutions and _is_timed(s)),
    Phase("split_biases", lambda s: s.with_graph(split_biases(s.graph)), lambda s: s.target.bias_apart),
    Phase("widen_powers", lambda s: s.with_graph(widen_powers(s.graph))),
    Phase("widen_scans", lambda s: s.with_graph(widen_scans(s.graph)), lambda s: s.target.wide_scans),
    Phase("widen_moments", lambda s: s.with_graph(widen_moments(s.graph)), lambda s: s.target.wide_moments),
    Phase("normalise", _normalise),
    Phase("specialise", _specialise, lambda s: s.target.language == "cpp"),
    Phase("windows", lambda s: s.with_graph(with_windows(s.graph, s.grown))),
    Phase("loops", _compile_loops),
    Phase("parts", lambda s: s.with_graph(with_written_parts(s.graph)), lambda s: bool(s.graph.writes)),
    Phase("split", _split),
    Phase("partition", _partition, shown=lambda s: s.cover),
    Phase("fronts", _join_fronts, _times_kernels, lambda s: s.cover, faster=True),
    Phase("places", _choose_places, shown=lambda s: s.cover),
    Phase("ways", _choose_ways, _times_kernels, lambda s: s.cover, faster=True),
    Phase("kernels", _make_kernels, shown=None),
    Phase("plan", _plan, shown=lambda s: s.plan),
)
"""From the captured graph to built kernels and their plan. (`kernels` records its own parts: schedule, emit, build and
load, again where a kernel is refused.)"""


def phases_before(name: str) -> tuple[Phase, ...]:
    """Those that run before phase `name`."""
    names = [phase.name for phase in PHASES]
    return PHASES[: names.index(name)]


def check_strict(cover: Cover, *, strict: bool) -> None:
    """Under `strict`, raise UnsupportedError if a library call is there by need and of no kind that is admitted."""
    bad = coverage_of(cover).refused() if strict else ()
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
