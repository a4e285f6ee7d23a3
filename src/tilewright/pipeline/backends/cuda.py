"""Triton for NVIDIA's GPUs: one module for each kernel and variant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch._dispatch.python import no_python_dispatcher

from tilewright.analysis.size_hints import SizeHints
from tilewright.emit.gluon.kernel import emit_kernel
from tilewright.emit.triton.kernel import TritonSource
from tilewright.errors import BuildError, KernelRefused, SharedMemoryExceeded, warn_once
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Loop
from tilewright.ir.kernel import Scheduled
from tilewright.ir.program import TileProgram
from tilewright.ir.sizes.host import number
from tilewright.lower.legalise.gpu import legalise_for_gpu
from tilewright.lower.variants import Variant, variants
from tilewright.options import Options
from tilewright.partition.loops.call import distinct
from tilewright.partition.loops.steps import steps_together, unroll_steps
from tilewright.pipeline.build import (
    Clock,
    KernelBuilder,
    Kernels,
    PlacedKernel,
    RefusedKernels,
    Runnable,
    kernels_behind,
    name_refused,
    names_of,
    programs_of,
)
from tilewright.pipeline.loops import Looping, M
from tilewright.runtime.cuda.build import build_kernels
from tilewright.runtime.cuda.device import (
    gpu_target,
    missing,
    refuses_early_launch,
    singles_may_round,
)
from tilewright.runtime.cuda.driver import Device
from tilewright.runtime.cuda.driver import device as driver_device
from tilewright.runtime.cuda.executable import CudaExecutable
from tilewright.runtime.cuda.graph import Graphs
from tilewright.runtime.cuda.kernels import CudaUnit, VariantCompiler, needed, usual
from tilewright.runtime.cuda.replays import replayed_seconds
from tilewright.runtime.loops.body import LoopBody
from tilewright.runtime.loops.call import LoopRunner
from tilewright.runtime.loops.cuda_graph import recorder
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.schedule.scheduler import Scheduler
from tilewright.schedule.schedulers import scheduler_of
from tilewright.schedule.solver import Solver, kernel_key
from tilewright.target import Target
from tilewright.tuning.input_limits import BUILD_LIMITS
from tilewright.tuning.search_limits import BUILDING


class CudaBackend:
    """See `pipeline.build.Backend`."""

    dense_slices = False

    def missing(self, device: str) -> str:
        """Triton, or a device that it knows."""
        return missing(device)

    def target(self, device: str, options: Options) -> Target:
        """With TF32 where torch's switch, or the option, lets products of fp32 read fewer bits."""
        return as_allowed(gpu_target(torch.device(device).index or 0), options)

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
        """With the schedules that they got: a kernel that needs more shared memory than was estimated, or that Triton
        refuses, gets another."""
        run, solver, names = builder.run, builder.solver, names_of(symbols)
        target, store = solver.target, ContentStore(default_root(solver.options))
        limit = BUILD_LIMITS.max_timed_triton_seconds if only_timed else None
        build = partial(build_kernels, target=target, store=store, processor_seconds=limit)
        scheduled = run("schedule", lambda: builder.solved(steps))
        tries: Counter[str] = Counter()
        while True:
            programs = programs_of(scheduled)
            legal = run("legalise", lambda: [self.legalise(p, target) for p in programs])  # noqa: B023
            printed = _Printer(legal, names)

            wanted = (
                _at_typical_sizes(solver.hints, scheduled, programs)  # which must know all sizes
                if only_timed
                else _variants(scheduled, programs, [kernel in builder.listed for kernel, _ in steps])
            )
            sources = run("emit", lambda: [printed(k, v) for k, v in wanted])  # noqa: B023
            try:
                built = run("build", lambda: build(sources))  # noqa: B023
            except KernelRefused as refused:
                behind = [programs[wanted[k][0]] for k in refused.kernels]
                of = {kernel_key(*step): step for step in kernels_behind(steps, scheduled, behind)}
                named = name_refused(refused, steps, scheduled, behind)
                if any(kernel in builder.given for kernel, _ in of.values()):
                    raise named from refused
                theirs = isinstance(named, RefusedKernels)
                if theirs or isinstance(refused, SharedMemoryExceeded):
                    of = _without_forgotten(solver, of, named)
                tries.update(list(of))
                if of and not _shrink_shared_memory(solver, of, tries, refused, theirs):
                    raise named from refused
                scheduled = builder.solved(steps)
                continue
            known = dict(zip(wanted, zip(sources, built, strict=True), strict=True))
            gpu = run("load", lambda: _device(builder.ordinal, store, solver.options))
            number_of = {id(p): k for k, p in enumerate(programs)}
            places = [number_of[id(s.program)] for s in scheduled]
            buckets = {k: [(b.condition, number_of[id(b.program)]) for b in s.buckets]
                       for k, s in zip(places, scheduled, strict=True)}  # fmt: skip
            unit = CudaUnit(programs, names, VariantCompiler(printed, build), gpu, known, buckets)
            return Kernels(scheduled, unit, places, len(programs))

    def legalise(self, program: TileProgram, target: Target) -> TileProgram:
        """For threads that share a grid point."""
        return legalise_for_gpu(program, target)

    def show_source(self, program: TileProgram, symbols: Sequence[str], target: Target) -> str:
        """Its first variant."""
        legal = self.legalise(program, target)
        return emit_kernel(legal, symbols, variants(program)[0], "kernel").text

    def executable(self, parts: Runnable) -> Executable:
        """Through CUDA graphs where the options ask for them."""
        gpu = parts.unit.device if isinstance(parts.unit, CudaUnit) else None
        checks = parts.checks
        # no step of a replay can be looked at
        replays = parts.options.cuda_graphs and (checks is None or not checks.values)
        graphs = Graphs(parts.plan, gpu, parts.saves) if replays else None
        return CudaExecutable(
            parts.plan, parts.held, parts.unit, guards=parts.guards,
            graphs=graphs, checks=checks,
        )  # fmt: skip

    def loop_runner(self, loop: Loop, meaning: Callable[..., object] | None, found: Looping[M]) -> LoopRunner:
        """As graphs of some steps; with a body that does a few at once, where that takes fewer kernels than one by
        one."""
        _, order, made, runs = found.step(loop)
        bodies = [LoopBody(tuple(order), runs)]
        unit = made.unit
        count = 1 if found.options.verify is True else steps_together(loop, found.target)
        if count > 1:
            body, each = distinct(unroll_steps(loop, count))
            more, run_several = found.made_of(body)
            if len(more.kernels) < count * len(made.kernels):
                found.bodies.more.append(more)
                unit = more.unit
                bodies.append(LoopBody(each, run_several, count))
        records = recorder(made.unit or unit, found.ordinal)
        return LoopRunner(loop, bodies, recorder=records, meaning=meaning)

    def clock(self, device: str) -> Clock | None:
        """Events of the current stream."""
        if not torch.cuda.is_available():
            return None

        def seconds(run: Callable[[], object]) -> float:
            with torch.cuda.device(device):
                return _seconds(run)

        return seconds

    def replay_clock(self, device: str) -> Clock | None:
        """By captured graphs. Where a program asks for results that are the same each time, no clock decides: it may
        say something else the next time."""
        if not torch.cuda.is_available() or torch.are_deterministic_algorithms_enabled():
            return None

        def seconds(run: Callable[[], object]) -> float:
            with torch.cuda.device(device):
                return replayed_seconds(run)

        return seconds

    def timing_key(self, device: str, options: Options) -> str:
        """The name of the device, and whose calls are timed there."""
        if not torch.cuda.is_available():
            return device
        name = torch.cuda.get_device_name(device)
        return f"{name}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"


class _Printer:
    """Prints the programs of a unit. Kernels that differ in nothing that is printed have one name, so that they are
    built once."""

    def __init__(self, programs: Sequence[TileProgram], names: Sequence[str]) -> None:
        self.programs, self.names = programs, names
        self.first: dict[TritonSource, int] = {}

    def __call__(self, kernel: int, variant: Variant) -> TritonSource:
        def named(entry: str) -> TritonSource:
            return emit_kernel(self.programs[kernel], self.names, variant, entry)

        return named(f"k{self.first.setdefault(named('k'), kernel)}")


def as_allowed(target: Target, options: Options) -> Target:
    """A GPU as torch's switch, or the option, lets it compute products of fp32, and as options let it launch."""
    rounds = singles_may_round() if options.tf32 is None else options.tf32
    target = target.rounding_singles() if rounds else target
    refused = target.backend != "cuda" or options.early_launch == "none" or refuses_early_launch(target)
    return target if refused else replace(target, early_launch=options.early_launch)


def _device(ordinal: int | None, store: ContentStore, options: Options) -> Device | None:
    return None if ordinal is None else driver_device(ordinal, store, options)


def _seconds(run: Callable[[], object]) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def _variants(
    scheduled: Sequence[Scheduled], programs: Sequence[TileProgram], listed: Sequence[bool]
) -> list[tuple[int, Variant]]:
    """What is built before calls ask; of kernels that are all in lists, only what these need."""
    serves = {id(b.program): b.condition for s in scheduled for b in s.buckets}
    ways: dict[int, set[bool]] = {}
    for s, in_list in zip(scheduled, listed, strict=True):
        for p in s.programs:
            ways.setdefault(id(p), set()).add(in_list)
    return [
        (k, replace(v, listed=way))
        for k, p in enumerate(programs)
        for way in sorted(ways[id(p)])
        for v in usual(p, serves.get(id(p)))
    ]


def _at_typical_sizes(
    hints: SizeHints, scheduled: Sequence[Scheduled], programs: Sequence[TileProgram]
) -> list[tuple[int, Variant]]:
    """What calls of typical sizes run."""
    number_of = {id(p): k for k, p in enumerate(programs)}
    runs = [
        next((b.program for b in s.buckets if number(b.condition, hints.sizes)), s.program) for s in scheduled
    ]
    return list(dict.fromkeys((number_of[id(p)], v) for p in runs for v in needed(p, hints.sizes)))


def _without_forgotten(
    solver: Solver, refused: Mapping[str, PlacedKernel], why: BuildError
) -> dict[str, PlacedKernel]:
    """The kernels that were `refused` under the schedules that the model prefers. Of others the schedule that a clock
    preferred is forgotten, and that is said."""
    left = {key: step for key, step in refused.items() if not solver.forget_preferred(step[0], str(why))}
    if len(left) < len(refused):
        warn_once(f"a schedule that was measured before is not taken: {why}")
    return left


def _shrink_shared_memory(
    solver: Solver, refused: Mapping[str, PlacedKernel], tries: Mapping[str, int], why: KernelRefused, theirs: bool
) -> bool:  # fmt: skip
    """Whether all kernels that were `refused` have other schedules now, with less shared memory: they want too much
    of it, or it is `theirs` what Triton refused, and may go with it, which is tried once."""
    exceeds = isinstance(why, SharedMemoryExceeded)
    share, most = (why.limit / why.needed, BUILDING.max_kernel_attempts - 1) if exceeds else (1 / 2, 1)
    if not (refused and (exceeds or theirs)):
        return False
    with no_python_dispatcher():
        return all(
            tries[k] <= most and solver.shrink_shared_memory(*step, share) for k, step in refused.items()
        )
