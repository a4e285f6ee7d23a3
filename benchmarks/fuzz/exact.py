"""The exact oracle: each kernel under random decisions, run by the interpreter over the exact element type.

What is decided at random: the machine, which ops share a kernel (prices are multiplied by chance), tiles, roles,
what is kept and how sums are cut. None of it may change what a kernel computes, to the last residue; no compiler and
no device is needed.
"""

from __future__ import annotations

import random
import signal
import time
import warnings
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, fx

from benchmarks.fuzz.judge import REFUSED, Failure, Setting
from benchmarks.fuzz.outcome import ran
from benchmarks.fuzz.program import Program, function
from tilewright.analysis.size_hints import SizeHints
from tilewright.capture.environment import traced_sizes
from tilewright.capture.fx import from_fx
from tilewright.errors import IllegalSchedule, IndexOutOfRange, UnsupportedError
from tilewright.interp import EXACT, ResidueError, equal, exact_random, run_program
from tilewright.interp.algebra import STORAGE, Array
from tilewright.interp.evaluate import TensorEvaluator
from tilewright.ir.expr import Expr
from tilewright.ir.form import Form
from tilewright.ir.graph import Graph, Layout, Value
from tilewright.ir.kernel import Kernel, Scheduled, Step, ViewStep
from tilewright.ir.schedule import Role, Schedule
from tilewright.ir.sizes import dims
from tilewright.lower.legality import check_roles
from tilewright.options import Options
from tilewright.partition.cover import cover_unfused, partition
from tilewright.pipeline.phases import begin, phases_before, run_phases
from tilewright.pipeline.place import DevicePlace
from tilewright.pipeline.state import CompileRequest
from tilewright.pipeline.trace import PhaseRecorder
from tilewright.runtime.call.fallback import Captured
from tilewright.schedule.cpu.scheduler import VectorScheduler
from tilewright.schedule.solver import Solver
from tilewright.schedule.table import Tuning
from tilewright.target import PRESETS, Target
from tilewright.ways.traced import Session

MACHINES = tuple(PRESETS)
LARGEST = 1 << 14
"""Elements of a kernel's values up to which it is run: the exact interpreter is slow."""
SECONDS = 25.0
"""Of processor time, after which no further kernel of a program is run, and one that runs is left undecided."""


def judged_exactly(program: Program, setting: Setting) -> Failure | None:
    """The first kernel whose tile program does not compute what its ops say, bit for bit."""
    torch._dynamo.reset()
    oracle = Oracle(Options(measure=False, cache=False, **setting.options), setting.schedules)
    plain = function(program.source())
    try:
        ran(plain, program.inputs(setting.seed), training=setting.training)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return Failure(REFUSED, f"eager: {str(error)[:600]}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiled = torch.compile(plain, backend=oracle.backend, dynamic=setting.dynamic)
            ran(compiled, program.inputs(setting.seed), training=setting.training)
        except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
            if oracle.found is None:
                return Failure("crash", f"{type(error).__name__}: {str(error)[:600]}")
    return oracle.found


@dataclass
class Oracle:
    """Decides at random, compares, and runs what was captured."""

    options: Options
    seed: int
    found: Failure | None = None
    kernels: int = 0
    undecided: int = 0
    end: float = field(default_factory=lambda: time.process_time() + SECONDS)
    draw: random.Random = field(init=False)
    target: Target = field(init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.target = replace(PRESETS[self.draw.choice(MACHINES)], quick=())

    def backend(self, gm: fx.GraphModule, example_inputs: list[object]) -> Callable[..., object]:
        """A backend of torch.compile."""
        oracle = self

        class Watching(Session):
            def _build(self, gm: fx.GraphModule, kind: str, frozen: Mapping[str, Tensor]) -> Captured:
                oracle.judge(gm, frozen)
                return Captured(gm, frozen)

        return Watching(self.options).backend(gm, example_inputs)

    def judge(self, gm: fx.GraphModule, frozen: Mapping[str, Tensor]) -> None:
        """All kernels of a captured graph."""
        try:
            graph = from_fx(gm, frozen=frozen)
        except UnsupportedError:
            return
        sizes = traced_sizes(gm)
        solver, steps, layouts = self._steps(graph, sizes)
        memory = Memory(layouts, sizes, self.seed)
        for step in steps:
            if isinstance(step, ViewStep):
                memory.view(step)
            elif isinstance(step, Kernel):
                if self.found is not None or time.process_time() > self.end:
                    return
                self._compare(solver, step, memory)

    def _steps(
        self, graph: Graph, sizes: Mapping[str, int]
    ) -> tuple[Solver, tuple[Step, ...], Mapping[Value, Layout]]:
        asked = CompileRequest(
            PhaseRecorder(), self.options, DevicePlace("cpu"), (), SizeHints(sizes), _no_loops
        )
        phases = [phase for phase in phases_before("partition") if phase.name != "loops"]
        state = run_phases(
            begin(asked, graph, Solver(self.target, self.options, scheduler=Changed(self))), phases
        )
        solver = state.solver
        if self.options.fusion == "full":
            cover = partition(state.graph, lambda k, at: solver.price(k, at) * self._chance(k), solver.hints)
        else:
            cover = cover_unfused(state.graph, solver.hints)
        return solver, cover.steps, cover.layouts

    def _chance(self, kernel: Kernel) -> float:
        """A factor that a kernel's price gets, the same each time."""
        text = f"{self.seed} {sorted(op.name for op in kernel.ops)} {len(kernel.outputs)}"
        return 0.3 + 2.0 * random.Random(zlib.crc32(text.encode())).random()

    def changed(self, form: Form, plain: Schedule, target: Target) -> Schedule:
        """A schedule, changed at random as far as that is legal. Exponentials stay such, here and in quick forms:
        powers of two take log2 e as a float, which is no exact number."""
        plain = plain.changed(exp2=False)
        for _ in range(6):
            changed = self._changed(form, plain, target)
            try:
                check_roles(form, changed)
            except IllegalSchedule:
                continue
            return changed
        return plain

    def _changed(self, form: Form, s: Schedule, target: Target) -> Schedule:
        draw = self.draw
        if target.lanes > 1:
            chain = draw.choice([s.reductions.max_chain, 2, 0])
            return s.changed(max_chain=chain, trim=draw.random() < 0.8 and s.reductions.trim)
        classes = list(s.tiling.classes)
        if draw.random() < 0.5:
            inner = [c for c in classes if c.role is not Role.GRID]
            draw.shuffle(inner)
            classes = [c for c in classes if c.role is Role.GRID] + inner
        grid = [c for c in classes if c.role is Role.GRID and c.axis != s.tiling.lane]
        if grid and s.tiling.beside is None and draw.random() < 0.3:
            moved = draw.choice(grid)
            classes.remove(moved)
            streamed = replace(moved, role=Role.STREAMED, tile=1, chunk=0)
            classes.insert(
                next((k for k, c in enumerate(classes) if c.role is not Role.GRID), len(classes)), streamed
            )
        if s.tiling.lane is not None and s.tiling.beside is None and draw.random() < 0.5:
            tile, tiles = draw.choice([1, 4, 8, 16, 32]), draw.choice([1, 2, 64])
            place = next(k for k, c in enumerate(classes) if c.axis == s.tiling.lane)
            lane = classes[place]
            if lane.tile > 1:
                classes[place] = replace(lane, tile=tile, chunk=lane.chunk and tile * tiles)
        return s.changed(
            classes=tuple(classes),
            scratch_cost=draw.choice([s.memory.scratch_cost, 0, 1, 40]),
            max_chain=draw.choice([s.reductions.max_chain, 2, 0]),
        )

    def _compare(self, solver: Solver, kernel: Kernel, memory: Memory) -> None:
        wanted = memory.wanted(kernel)
        if wanted is None:
            self.undecided += 1
            return
        scheduled = solver.solve(kernel, memory.layouts)
        buckets = [(b.condition, b.program) for b in scheduled.buckets]
        for condition, program in ((dims.ONE, scheduled.program), *buckets):
            if condition is not dims.ONE and not dims.evaluate(condition, dict(memory.sizes)):
                continue
            try:
                with _until(self.end):
                    made = memory.made(replace(scheduled, program=program), kernel)
                same = all(equal(made[v], wanted[v]) for v in kernel.outputs)
            except (ResidueError, _Late):
                self.undecided += 1
                continue
            self.kernels += 1
            if not same:
                ops = ", ".join(op.name for op in kernel.ops)
                self.found = Failure(
                    "wrong", f"kernel of {ops} on {solver.target.name} under {scheduled.schedule}\n{program}"
                )
                return


def _no_loops(asked: CompileRequest, body: Graph) -> NoReturn:
    raise AssertionError("loops are not compiled")


class _Late(Exception):
    """The time of a program is over."""


@contextmanager
def _until(end: float) -> Generator[None]:
    """Raises _Late within the block at the processor time `end`: a kernel may take any number of steps."""

    def stop(*_: object) -> None:
        raise _Late

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, max(0.001, end - time.process_time()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Changed(VectorScheduler):
    """The usual scheduler, whose schedules an oracle changes."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle

    def choose(self, form: Form, target: Target, tuning: Tuning, hints: SizeHints) -> Schedule:
        """What is chosen, changed at random."""
        return self.oracle.changed(form, super().choose(form, target, tuning, hints), target)


@dataclass
class Memory:
    """The values of one graph over exact unknowns. A kernel reads what those before it made, as it may rely on that
    (a part of no elements has the sum 0). What libraries make and what comes from outside is unknown."""

    layouts: Mapping[Value, Layout]
    sizes: Mapping[str, int]
    seed: int
    values: dict[Value, Array] = field(default_factory=dict)
    lost: set[Value] = field(default_factory=set)
    """What kernels make that were not computed exactly, and what follows from it."""

    def wanted(self, kernel: Kernel) -> dict[Value, Array] | None:
        """What the ops of a kernel say; None if that is not known."""
        found = None if self.lost.intersection(kernel.inputs) else self._computed(kernel)
        if found is None:
            self.lost |= set(kernel.outputs)
            return None
        self.values |= {v: found[v] for v in kernel.outputs}
        return found

    def _computed(self, kernel: Kernel) -> dict[Value, Array] | None:
        inside = [*kernel.inputs, *(v for op in kernel.ops for v in op.outputs)]
        if max(self._number(v.numel) for v in inside) > LARGEST:
            return None
        values = {v: self.value(v) for v in kernel.inputs}
        try:
            for op in kernel.ops:
                assert op.expr is not None
                given = [values[v] for v in op.inputs]
                results = TensorEvaluator(op.expr, EXACT, given, self.sizes).run()
                values |= dict(zip(op.outputs, results, strict=True))
        except (ResidueError, IndexOutOfRange, ZeroDivisionError):
            return None
        return values

    def made(self, scheduled: Scheduled, kernel: Kernel) -> dict[Value, Array]:
        """What a tile program makes."""
        given = [self._flat(v) if v in kernel.inputs else None for v in scheduled.params]
        flats = run_program(scheduled.program, given, dict(self.sizes), EXACT)
        pairs = zip(scheduled.params, flats, strict=True)
        return {v: self._seen(v, f).copy() for v, f in pairs if v in kernel.outputs}

    def view(self, step: ViewStep) -> None:
        """What a view shows."""
        if step.source in self.lost:
            self.lost.add(step.value)
            return
        flat = self._flat(step.source)[self._number(step.offset) :]
        self.values[step.value] = self._strided(step.value, flat, step.layout.strides).copy()

    def value(self, v: Value) -> Array:
        """What is known of a value, or unknowns in its place."""
        if v not in self.values:
            flat = self._unknown(v)
            self.values[v] = self._seen(v, flat).copy()
        return self.values[v]

    def _unknown(self, v: Value) -> Array:
        """Memory of the extent of a value."""
        lengths = [self._number(n) for n in v.shape]
        count = 1 + sum((n - 1) * self._number(s) for n, s in zip(lengths, self._strides(v), strict=True))
        seed = 100 * self.seed + len(self.values)
        if v.dtype.is_float:
            return exact_random((max(1, count),), seed, -1.5, 2.0)
        return np.random.default_rng(seed).integers(0, 2, max(1, count)).astype(STORAGE[v.dtype.name])

    def _flat(self, v: Value) -> Array:
        """A value in memory."""
        flat, value = self._unknown(v), self.value(v)
        self._seen(v, flat)[...] = value
        return flat

    def _seen(self, v: Value, flat: Array) -> Array:
        return self._strided(v, flat, self._strides(v))

    def _strides(self, v: Value) -> tuple[Expr, ...]:
        layout = self.layouts.get(v)
        return tuple(layout.strides if layout else dims.dense_strides(v.shape))

    def _strided(self, v: Value, flat: Array, strides: tuple[Expr, ...]) -> Array:
        """Memory in the shape of a value."""
        steps = [self._number(e) * flat.itemsize for e in strides]
        return np.lib.stride_tricks.as_strided(flat, [self._number(e) for e in v.shape], steps)

    def _number(self, e: Expr) -> int:
        return dims.evaluate(e, dict(self.sizes))
