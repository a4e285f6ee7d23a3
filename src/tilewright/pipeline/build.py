"""From a cover's kernels to code that runs: scheduled, printed, built (or recalled) and loaded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor
from torch._dispatch.python import no_python_dispatcher

from tilewright.analysis.size_hints import seen_sizes
from tilewright.emit.cpp.unit import emit_units
from tilewright.emit.source import Source
from tilewright.emit.triton.kernel import TritonSource, emit_triton
from tilewright.errors import BuildError, KernelRefused, SharedMemoryExceeded
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Layout, Value
from tilewright.ir.kernel import Cover, Kernel, Scheduled
from tilewright.ir.program import TileProgram
from tilewright.ir.sizes.host import number
from tilewright.lower.variants import Variant
from tilewright.options import Options
from tilewright.partition.memo import ranged
from tilewright.plan import Plan
from tilewright.runtime.cpu.kernels import NativeUnit
from tilewright.runtime.cpu.native_plan import join
from tilewright.runtime.cpu.toolchain import build, build_texts
from tilewright.runtime.cuda.build import build_kernels
from tilewright.runtime.cuda.driver import device
from tilewright.runtime.cuda.executable import CudaExecutable
from tilewright.runtime.cuda.graph import Graphs
from tilewright.runtime.cuda.kernels import CudaUnit, needed, usual
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.plan.verified import Level, checks_of
from tilewright.runtime.stats import STATS
from tilewright.runtime.store.built_libraries import BuiltLibraries, Later
from tilewright.runtime.store.cache import Store, default_root
from tilewright.runtime.store.decisions import Decisions
from tilewright.schedule.solver import Solver, kernel_key
from tilewright.target import Target
from tilewright.tuning.search_limits import BUILDING

EMPTY_UNIT = 'extern "C" int answer() { return 42; }\n'

T = TypeVar("T")
_Step = tuple[Kernel, Mapping[Value, Layout]]


class Run(Protocol):
    """Runs a phase under a name."""

    def __call__(self, name: str, phase: Callable[[], T]) -> T:
        """The result of the phase."""
        ...


def in_silence(name: str, phase: Callable[[], T]) -> T:
    """Runs a phase of which nothing is kept."""
    return phase()


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels that are built: how each is scheduled, its number in the unit, and how many programs that has."""

    scheduled: Sequence[Scheduled] = ()
    unit: NativeUnit | CudaUnit | None = None
    numbers: Sequence[int] = ()
    programs: int = 0


class Refused(KernelRefused):
    """`kernels` of a cover that the compiler behind us refuses, in its words."""

    def __init__(self, message: str, kernels: Sequence[Kernel]) -> None:
        super().__init__(message)
        self.kernels = tuple(kernels)


@dataclass(frozen=True, slots=True, eq=False)
class Builder:
    """Builds the kernels of covers for one machine, with typical `sizes` of their symbols. `ordinal` is that of a
    GPU."""

    run: Run
    solver: Solver
    memory: Decisions
    sizes: Mapping[str, int]
    ordinal: int = 0

    def built(self, covers: Sequence[Cover], symbols: Sequence[Expr], *, once: bool = False) -> Kernels:
        """All kernels of some covers in one unit, those of each cover in its order. `once`: calls of the typical sizes
        are all that it is for. Raises Refused for one that does not build, BuildError where none would."""
        steps = [(step, c.layouts) for c in covers for step in c.steps if isinstance(step, Kernel)]
        names = names_of(symbols)
        if not steps:
            return Kernels()
        if self.solver.target.language == "triton":
            return self._on_gpu(steps, names, once)
        return self._on_cpu(steps, names, list(map(ranged, symbols)))

    def _solved(self, steps: Sequence[_Step]) -> list[Scheduled]:
        with seen_sizes(self.sizes), no_python_dispatcher():
            return [self.solver.solve(kernel, layouts) for kernel, layouts in steps]

    def _on_cpu(self, steps: Sequence[_Step], symbols: Sequence[str], ranges: Sequence[str]) -> Kernels:
        """Kernels in C++. Their library is recalled by their identities and the ranges of their sizes, or they are
        solved, printed and built."""
        run, target, options, store = self.run, self.solver.target, self.solver.options, self.memory.store
        keys = [kernel_key(kernel, layouts) for kernel, layouts in steps]
        order = {key: n for n, key in enumerate(dict.fromkeys(keys))}
        libraries = BuiltLibraries(target, store, options, self.memory)
        known = libraries.recall([*sorted(ranges), *order])
        solved = partial(self._solved, steps)
        scheduled = run("schedule", solved if known is None else lambda: Later(solved))
        printed = partial(_printed, scheduled, symbols, target)
        sources = run("emit", printed if known is None else lambda: Later(printed))
        start = time.time()
        try:
            path = run("build", lambda: known or build(sources, target, store, options))
        except KernelRefused as refused:
            programs = _refused_programs(_programs(scheduled), symbols, target, options)
            raise _naming(refused, steps, scheduled, programs) from refused
        if known is None:
            libraries.keep([*sorted(ranges), *order], path)
        if known is not None or not _is_new(path, start):
            STATS.cache_hits += 1
        else:
            STATS.units += 1
        unit = run("load", lambda: _loaded(path, sources, target, store, options))
        return Kernels(scheduled, unit, [order[key] for key in keys], len(order))

    def _on_gpu(self, steps: Sequence[_Step], symbols: Sequence[str], once: bool) -> Kernels:
        """Kernels in Triton, and the schedules that they got: one that needs more shared memory than was estimated, or
        that Triton refuses, gets another."""
        run, target, options = self.run, self.solver.target, self.solver.options
        store = Store(default_root(options))
        builder = partial(build_kernels, target=target, store=store)
        scheduled = run("schedule", lambda: self._solved(steps))
        tries: Counter[str] = Counter()
        while True:
            programs = _programs(scheduled)

            def printed(
                kernel: int, variant: Variant, programs: list[TileProgram] = programs
            ) -> TritonSource:
                return emit_triton(programs[kernel], symbols, target, variant, f"k{kernel}")

            wanted = self._at_typical_sizes(scheduled, programs) if once else _variants(scheduled, programs)
            sources = run("emit", lambda: [printed(k, v) for k, v in wanted])  # noqa: B023
            try:
                built = run("build", lambda: builder(sources))  # noqa: B023
            except KernelRefused as refused:
                behind = [programs[wanted[k][0]] for k in refused.kernels]
                of = {kernel_key(*step): step for step in _behind(steps, scheduled, behind)}
                tries.update(list(of))
                named = _naming(refused, steps, scheduled, behind)
                if not self._cramped(of, tries, refused, isinstance(named, Refused)):
                    raise named from refused
                scheduled = self._solved(steps)
                continue
            known = dict(zip(wanted, zip(sources, built, strict=True), strict=True))
            gpu = run("load", lambda: device(self.ordinal, store, options))
            number_of = {id(p): k for k, p in enumerate(programs)}
            places = [number_of[id(s.program)] for s in scheduled]
            buckets = {k: [(when, number_of[id(p)]) for when, p in s.buckets]
                       for k, s in zip(places, scheduled, strict=True)}  # fmt: skip
            unit = CudaUnit(programs, symbols, printed, builder, gpu, known, buckets)
            return Kernels(scheduled, unit, places, len(programs))

    def _at_typical_sizes(
        self, scheduled: Sequence[Scheduled], programs: Sequence[TileProgram]
    ) -> list[tuple[int, Variant]]:
        """What calls of typical sizes run."""
        number_of = {id(p): k for k, p in enumerate(programs)}
        runs = [next((p for when, p in s.buckets if number(when, self.sizes)), s.program) for s in scheduled]
        return list(dict.fromkeys((number_of[id(p)], v) for p in runs for v in needed(p, self.sizes)))

    def _cramped(
        self, refused: Mapping[str, _Step], tries: Mapping[str, int], why: KernelRefused, theirs: bool
    ) -> bool:  # fmt: skip
        """Whether all kernels that were `refused` have other schedules now, with less shared memory: they want too much
        of it, or it is `theirs` what Triton refused, and may go with it, which is tried once."""
        exceeds = isinstance(why, SharedMemoryExceeded)
        share, most = (why.limit / why.needed, BUILDING.max_kernel_attempts - 1) if exceeds else (1 / 2, 1)
        if not (refused and (exceeds or theirs)):
            return False
        with seen_sizes(self.sizes), no_python_dispatcher():
            return all(tries[k] <= most and self.solver.cramp(*step, share) for k, step in refused.items())


def _behind(
    steps: Sequence[_Step], scheduled: Sequence[Scheduled], programs: Sequence[TileProgram]
) -> list[_Step]:
    """The kernels that some of these programs run."""
    wanted = {id(p) for p in programs}
    pairs = zip(steps, scheduled, strict=True)
    return [step for step, s in pairs if wanted & {id(p) for p in (s.program, *(b for _, b in s.buckets))}]


def _naming(
    refused: KernelRefused, steps: Sequence[_Step], scheduled: Sequence[Scheduled],
    programs: Sequence[TileProgram],
) -> BuildError:  # fmt: skip
    """The refusal of the kernels behind some programs. Where these are none, or all of several, it is no fault of
    kernels: the same as it was."""
    kernels = [kernel for kernel, _ in _behind(steps, scheduled, programs)]
    return Refused(refused.message, kernels) if 0 < len(kernels) < max(2, len(steps)) else refused


def _refused_programs(
    programs: Sequence[TileProgram], symbols: Sequence[str], target: Target, options: Options
) -> list[TileProgram]:
    """Which of some programs, that together do not compile, are why: by halves. None if the compiler refuses an empty
    unit as well, or if that takes too many builds."""

    def compiles(texts: Sequence[str]) -> bool:
        try:
            build_texts(texts, target.compiler_flags, Store(None), options)
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
    path: Path, sources: Sequence[Source], target: Target, store: Store, options: Options
) -> NativeUnit:
    """The built kernels; built once more, for this process, if another one has emptied the cache meanwhile."""
    try:
        return NativeUnit(path, store, options)
    except BuildError:
        if path.exists():
            raise
        return NativeUnit(build(sources, target, Store(None), options), store, options)


def names_of(symbols: Iterable[Expr]) -> list[str]:
    """The names of size symbols, in the order in which generated code receives them."""
    return sorted({str(s) for s in symbols})


def _programs(scheduled: Sequence[Scheduled]) -> list[TileProgram]:
    """The distinct programs of kernels."""
    return list({id(p): p for s in scheduled for p in (s.program, *(b for _, b in s.buckets))}.values())


def _variants(scheduled: Sequence[Scheduled], programs: Sequence[TileProgram]) -> list[tuple[int, Variant]]:
    """What is built before calls ask."""
    serves = {id(p): when for s in scheduled for when, p in s.buckets}
    return [(k, v) for k, p in enumerate(programs) for v in usual(p, serves.get(id(p)))]


def _printed(scheduled: Sequence[Scheduled], symbols: Sequence[str], target: Target) -> Sequence[Source]:
    return emit_units(_programs(scheduled), symbols, target)


def number_kernels(cover: Cover, numbers: Sequence[int]) -> dict[Kernel, tuple[int, tuple[Value, ...]]]:
    """The kernels of a cover as `build_plan` takes them."""
    kernels = [step for step in cover.steps if isinstance(step, Kernel)]
    return {k: (n, (*k.inputs, *k.outputs)) for k, n in zip(kernels, numbers, strict=True)}


def executable(
    cover: Cover, plan: Plan, unit: NativeUnit | CudaUnit | None, options: Options, *, trusted: bool = True,
    conditions: Sequence[Expr] = (), saves: int | None = None, kind: str = "inference", checked: Level | None = None,
) -> Executable:  # fmt: skip
    """What runs the plan of a cover on its device. `saves`: the first result that is saved for a backward pass.
    `kind`: which graph of a program it is, for errors. `checked`: another level of checks than the option's."""
    where = plan.device
    held = [t.to(where) for t in cover.graph.constants.values() if isinstance(t, Tensor)]
    checks = checks_of(cover, plan, options.verify if checked is None else checked, kind)
    if where == "cpu":
        return Executable(plan, held, unit, trusted=trusted, conditions=conditions, checks=checks, join=join)
    gpu = unit.device if isinstance(unit, CudaUnit) else None
    replays = options.cuda_graphs and (
        checks is None or not checks.values
    )  # no step of a replay can be looked at
    graphs = Graphs(plan, gpu, saves) if replays else None
    return CudaExecutable(
        plan, held, unit, trusted=trusted, conditions=conditions, graphs=graphs, checks=checks
    )
