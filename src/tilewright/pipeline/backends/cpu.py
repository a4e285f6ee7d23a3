"""C++ for CPUs: one shared library for all kernels of a graph."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from tilewright.emit.cpp.unit import emit_unit, emit_units
from tilewright.emit.source import Source
from tilewright.errors import BuildError, KernelRefused
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Loop
from tilewright.ir.kernel import Scheduled
from tilewright.ir.program import TileProgram
from tilewright.lower.legalise.cpu import legalise_for_cpu
from tilewright.options import Options
from tilewright.partition.loops.rows import part_of, parts_for, rows_of
from tilewright.partition.memo import ranged
from tilewright.pipeline.build import (
    Clock,
    KernelBuilder,
    Kernels,
    PlacedKernel,
    Runnable,
    name_refused,
    names_of,
    programs_of,
)
from tilewright.pipeline.loops import Looping, M
from tilewright.runtime.cpu.kernels import NativeUnit
from tilewright.runtime.cpu.native_plan import join
from tilewright.runtime.cpu.toolchain import build, build_texts, host_target
from tilewright.runtime.loops.body import LoopBody
from tilewright.runtime.loops.call import LoopRunner
from tilewright.runtime.loops.native import loop_function
from tilewright.runtime.own.timer import processor
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.stats import STATS
from tilewright.runtime.store.built_libraries import BuiltLibraries, Later
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.schedule.scheduler import Scheduler
from tilewright.schedule.schedulers import scheduler_of
from tilewright.schedule.solver import kernel_key
from tilewright.target import Target
from tilewright.tuning.search_limits import BUILDING

EMPTY_UNIT = 'extern "C" int answer() { return 42; }\n'


class CpuBackend:
    """See `pipeline.build.Backend`."""

    dense_slices = True

    def missing(self, device: str) -> str:
        """Nothing: whoever looks for a compiler looks for both kinds of devices."""
        return ""

    def target(self, device: str, options: Options) -> Target:
        """This machine."""
        return host_target()

    def scheduler(self, target: Target) -> Scheduler:
        """The one that serves such machines."""
        return scheduler_of(target)

    def built(
        self,
        builder: KernelBuilder,
        steps: Sequence[PlacedKernel],
        symbols: Sequence[Expr],
        *,
        only_timed: bool,
    ) -> Kernels:
        """Their library is recalled by the kernels' identities and the ranges of their sizes, or they are solved,
        printed and built."""
        run, target, options = builder.run, builder.solver.target, builder.solver.options
        store, names, ranges = builder.decisions.store, names_of(symbols), sorted(map(ranged, symbols))
        keys = [kernel_key(kernel, layouts) for kernel, layouts in steps]
        order = {key: n for n, key in enumerate(dict.fromkeys(keys))}

        def recalled() -> tuple[BuiltLibraries, Path | None]:
            libraries = BuiltLibraries(target, store, options, builder.decisions)
            return libraries, libraries.get([*ranges, *order])

        libraries, known = run("recall", recalled)
        solved = partial(builder.solved, steps)
        scheduled = run("schedule", solved if known is None else lambda: Later(solved))
        legalised = partial(self._legalised, scheduled, target)
        programs = run("legalise", legalised if known is None else lambda: Later(legalised))
        printed = partial(emit_units, programs, names, target)
        sources = run("emit", printed if known is None else lambda: Later(printed))
        start = time.time()
        try:
            path = run("build", lambda: known or build(sources, target, store, options))
        except KernelRefused as refused:
            behind = _refused_programs(programs, names, target, options)
            of = dict(zip(map(id, programs), programs_of(scheduled), strict=True))
            raise name_refused(refused, steps, scheduled, [of[id(p)] for p in behind]) from refused
        if known is None:
            libraries.put([*ranges, *order], path)
        if known is not None or not _is_new(path, start):
            STATS.cache_hits += 1
        else:
            STATS.units += 1
        unit = run("load", lambda: _loaded(path, sources, target, store, options))
        return Kernels(scheduled, unit, [order[key] for key in keys], len(order))

    def legalise(self, program: TileProgram, target: Target) -> TileProgram:
        """For vectors of elements."""
        return legalise_for_cpu(program, target)

    def _legalised(self, scheduled: Sequence[Scheduled], target: Target) -> list[TileProgram]:
        return [self.legalise(p, target) for p in programs_of(scheduled)]

    def show_source(self, program: TileProgram, symbols: Sequence[str], target: Target) -> str:
        """A unit of its own."""
        return emit_unit([self.legalise(program, target)], symbols, target).text

    def executable(self, parts: Runnable) -> Executable:
        """Kernels that follow each other run without Python between them."""
        options = parts.options
        native = partial(join, native=lambda: loop_function(ContentStore(default_root(options)), options))
        return Executable(
            parts.plan, parts.held, parts.unit, guards=parts.guards,
            checks=parts.checks, join=native,
        )  # fmt: skip

    def loop_runner(self, loop: Loop, meaning: Callable[..., object] | None, found: Looping[M]) -> LoopRunner:
        """Without Python between steps; where each row goes its own way, in parts of the rows."""
        body, order, made, runs = found.step(loop)
        single = (LoopBody(tuple(order), runs),)
        native = loop_function(ContentStore(default_root(found.options)), found.options)
        rows = rows_of(loop, body)
        threads = abs(made.unit.threads()) if isinstance(made.unit, NativeUnit) else 1
        parts = parts_for(loop, body, rows, threads, found.target) if rows is not None else 1
        if rows is None or parts < 2:
            return LoopRunner(loop, single, native, meaning=meaning)
        _, part_runs = found.made_of(part_of(loop, body, rows // parts))
        part = LoopRunner(loop, (LoopBody(tuple(order), part_runs),), native)
        return LoopRunner(loop, single, native, meaning=meaning, rows=(parts, rows // parts, part))

    def clock(self, device: str) -> Clock | None:
        """The wall's."""
        return _seconds

    def replay_clock(self, device: str) -> Clock | None:
        """There is none."""
        return None

    def timing_key(self, device: str, options: Options) -> str:
        """The processor, the threads in use, and whose calls are timed."""
        name = " ".join(processor().partition(":")[2].split()) or platform.machine()
        return f"{name} with {options.threads or torch.get_num_threads()} threads, torch {torch.__version__}"


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _refused_programs(
    programs: Sequence[TileProgram], symbols: Sequence[str], target: Target, options: Options
) -> list[TileProgram]:
    """Which of some programs, that together do not compile, are why: by halves. None if the compiler refuses an empty
    unit as well, or if that takes too many builds."""

    def compiles(texts: Sequence[str]) -> bool:
        try:
            build_texts(texts, target.compiler_flags, ContentStore(None), options)
        except KernelRefused:
            return False
        return True

    if not compiles([EMPTY_UNIT]):
        return []
    found: list[TileProgram] = []
    groups, probes = [list(programs)], 0
    while groups:
        group = groups.pop()
        if len(group) == 1:
            found += group
            continue
        for half in (group[: len(group) // 2], group[len(group) // 2 :]):
            probes += 1
            if probes > BUILDING.max_refusal_probes:
                return []
            if not compiles([source.text for source in emit_units(half, symbols, target)]):
                groups.append(half)
    return found


def _is_new(path: Path, start: float) -> bool:
    """Whether a library was built after `start`, in seconds since the epoch, as far as the disk tells."""
    try:
        return path.stat().st_mtime >= start - 1
    except OSError:
        return True


def _loaded(
    path: Path, sources: Sequence[Source], target: Target, store: ContentStore, options: Options
) -> NativeUnit:
    """The built kernels; built once more, for this process, if another one has emptied the cache meanwhile."""
    try:
        return NativeUnit(path, store, options)
    except BuildError:
        if path.exists():
            raise
        return NativeUnit(build(sources, target, ContentStore(None), options), store, options)
