"""Times covers against each other by replaying CUDA graphs of them, so that small kernels are seen as they run in one.

`pipeline/trial` times covers with what launches cost the host, also for typical values of unknown sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import TypeVar

import torch
from torch import Tensor

from tilewright.analysis.fitting_sizes import fit
from tilewright.analysis.size_hints import SizeHints
from tilewright.errors import TilewrightError, warn_once
from tilewright.ir.graph import Layout, Op, Value
from tilewright.ir.kernel import Cover, Kernel
from tilewright.ir.schedule import Schedule
from tilewright.plan.build import build_plan
from tilewright.rewrite.normal.normalise import interpret
from tilewright.runtime.plan.arguments import Argument
from tilewright.runtime.plan.known_sizes import Result
from tilewright.target import MemoryKind
from tilewright.tuning.input_limits import MODELS
from tilewright.tuning.timing_limits import PRODUCTS

from .backends.executables import executable
from .build import (
    Clock,
    JoinedKernelRefused,
    KernelBuilder,
    Kernels,
    ProductRefused,
    RefusedKernels,
    names_of,
    number_kernels,
)
from .state import PlannedGraph
from .trial import operands

LOG = logging.getLogger("tilewright")
Run = Callable[[list[Argument]], list[Result]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class ReplayContestant:
    """A contestant: its cover, and the schedules of those of its kernels that are not solved."""

    cover: Cover
    schedules: Mapping[Kernel, Schedule] = field(default_factory=dict[Kernel, Schedule])
    prepared_once: tuple[Op, ...] = ()
    """What made some of its inputs of others, which are frozen tensors, before anything is timed."""

    @property
    def kernels(self) -> list[Kernel]:
        """In order."""
        return [step for step in self.cover.steps if isinstance(step, Kernel)]


Contest = Sequence[ReplayContestant]
"""Ways to compute the same, of the same values."""


@dataclass(frozen=True, slots=True)
class ReplayTrial:
    """Builds covers of known sizes with `builder`, and times them on `device` by `clock`."""

    builder: KernelBuilder
    device: str
    clock: Clock

    def __call__(self, contests: Sequence[Contest]) -> list[list[float | None]]:
        """Seconds of each way of each contest, all of which are built at once; None for one that does not build, whose
        results are not those of the first, or where nothing could be timed."""
        every = [way for contest in contests for way in contest]
        with torch.no_grad():
            runs = self._tried(lambda: dict(self._runs(every)))
            found = [
                self._tried(partial(self._contest, c, runs))
                if runs and self.builder.tuned.seconds()
                else None
                for c in contests
            ]
        return [f or [None] * len(c) for f, c in zip(found, contests, strict=True)]

    def _tried(self, do: Callable[[], T]) -> T | None:
        """What `do` gives; None where it fails, of which others know nothing, unless other kernels are wanted now."""
        try:
            return do()
        except (JoinedKernelRefused, ProductRefused):
            raise
        except (TilewrightError, RuntimeError, MemoryError) as refused:
            warn_once(f"kernels are not timed, the library is taken: {refused}")
        except Exception:
            LOG.exception("timing kernels failed in a way that nobody expects; the library is taken")
        return None

    def fits(self, ways: Contest) -> bool:
        """Whether memory can be spared for two sets of what they read and make."""
        return 2 * self._bytes(ways, self.builder.hints) <= MODELS.max_timed_region_bytes

    def _contest(self, ways: Contest, runs: Mapping[ReplayContestant, Run]) -> list[float | None]:
        """Seconds at typical sizes. Where sizes may be others, what is faster than the first way there and slower at
        some of these has none."""
        found = self._at(self.builder.hints, ways, runs)
        faster = [w for w, t in zip(ways[1:], found[1:], strict=True) if found[0] and t and t < found[0]]
        left = faster
        for hints in self._other_sizes(ways[0]):
            theirs, *times = self._at(hints, [ways[0], *left], runs) if left else [None]
            left = [w for w, t in zip(left, times, strict=True) if theirs and t and t <= theirs]
        return [None if w in faster and w not in left else t for w, t in zip(ways, found, strict=True)]

    def _other_sizes(self, way: ReplayContestant) -> Iterator[SizeHints]:
        """Some that all unknown sizes may have as well, as far as their ranges, the program and memory allow."""
        graph, hints = way.cover.graph, self.builder.hints
        symbols = graph.symbols()
        for factor in PRODUCTS.other_sizes if symbols else ():
            wanted = {repr(s): max(1, round(hints.estimate(s) * factor)) for s in symbols}
            free = {s: n for s, n in wanted.items() if fit(graph, hints.also({s: n}), hints)}
            other = hints.also(free)
            within = 2 * self._bytes([way], other) <= MODELS.max_timed_region_bytes
            if free and within and fit(graph, other, hints):
                yield other

    def _at(
        self, hints: SizeHints, ways: Contest, runs: Mapping[ReplayContestant, Run]
    ) -> list[float | None]:
        """Seconds of each at some sizes; None for one whose results are not those of the first."""
        sets = self._sets(ways, hints)
        for op in dict.fromkeys(op for way in ways for op in way.prepared_once):
            for tensors in sets:
                tensors |= self._prepared_once(op, tensors)
        found: list[float | None] = []
        expected: list[Result] | None = None
        for way in ways:
            seconds = None
            if way in runs:
                try:
                    expected, seconds = self._beside(way, runs[way], sets, expected)
                except (TilewrightError, RuntimeError, MemoryError) as refused:
                    if expected is None:
                        raise  # nothing to hold the others against
                    # As text: the traceback of an error that a log keeps would hold the operands.
                    LOG.info("a way is dropped: %s: %s", self._told(way, None), str(refused))
            LOG.debug("%s", self._told(way, seconds))
            found.append(seconds)
        return found

    def _beside(
        self, way: ReplayContestant, run: Run, sets: Sequence[Mapping[Value, Tensor]],
        expected: list[Result] | None,
    ) -> tuple[list[Result], float | None]:  # fmt: skip
        """What is expected of every way, its own results where nothing is yet; and its seconds."""
        results = run(self._given(way, sets[0]))
        if expected is not None and not agree(expected, results):
            LOG.warning("a kernel that differs from the library is not taken: %s", self._told(way, None))
            return expected, None
        return results if expected is None else expected, self._seconds(way, run, sets)

    def _prepared_once(self, op: Op, tensors: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
        made = interpret(op, [tensors[v].cpu() for v in op.inputs])
        return {v: t.to(self.device) for v, t in zip(op.outputs, made, strict=True) if isinstance(t, Tensor)}

    def _given(self, way: ReplayContestant, tensors: Mapping[Value, Tensor]) -> list[Argument]:
        return [tensors[v] for v in way.cover.graph.inputs if isinstance(v, Value)]

    def _told(self, way: ReplayContestant, seconds: float | None) -> str:
        time = "not timed" if seconds is None else f"{seconds * 1e6:.3g} us"
        how = ", ".join(map(str, way.schedules.values())) or f"{len(way.cover.steps)} steps"
        return f"{time}: {how}"

    def _seconds(self, way: ReplayContestant, run: Run, sets: Sequence[Mapping[Value, Tensor]]) -> float:
        turns = cycle([self._given(way, tensors) for tensors in sets])
        return self.clock(lambda: run([*next(turns)]))

    def _runs(self, ways: Sequence[ReplayContestant]) -> Iterator[tuple[ReplayContestant, Run]]:
        """What runs each way that builds."""
        left = list(ways)
        symbols = sorted({s for way in ways for s in way.cover.graph.symbols()}, key=repr)
        while True:
            given = {kernel: schedule for way in left for kernel, schedule in way.schedules.items()}
            try:
                built = replace(self.builder, given=given).built(
                    [w.cover for w in left], symbols, only_timed=True
                )
                break
            except RefusedKernels as refused:
                kept = [w for w in left if not set(refused.kernels) & set(w.kernels)]
                if len(kept) == len(left):
                    raise
                LOG.info("%d ways do not build: %s", len(left) - len(kept), refused)
                left = kept
        yield from self._bound(left, built, names_of(symbols))

    def _bound(
        self, ways: Sequence[ReplayContestant], built: Kernels, symbols: Sequence[str]
    ) -> Iterator[tuple[ReplayContestant, Run]]:
        options = self.builder.solver.options.replace(cuda_graphs=False, verify=False)
        numbers = iter(built.numbers)
        for way in ways:
            kernels = number_kernels(way.cover, [next(numbers) for _ in way.kernels])
            try:
                plan = build_plan(way.cover, kernels, symbols).on(self.device)
            except TilewrightError as refused:  # a part of a program alone need not tell all of its sizes
                LOG.info("a way is left out: %s: %s", self._told(way, None), refused)
                continue
            yield way, executable(PlannedGraph(way.cover, plan, built.unit), options)

    def _sets(self, ways: Contest, hints: SizeHints) -> list[dict[Value, Tensor]]:
        """Sets of operands, so many that those of a run have left the last cache when their turn comes again."""
        cache = self.builder.solver.target.level(MemoryKind.L2)
        size = max(1, self._bytes(ways, hints))
        count = 1 if cache is None else 1 + -(-PRODUCTS.min_caches_between_turns * cache.capacity // size)
        count = max(1, min(count, PRODUCTS.max_sets, MODELS.max_timed_region_bytes // size))
        laid, graph = _operands(ways), ways[0].cover.graph
        return [operands(graph, laid, hints, self.device, seeded=True) for _ in range(count)]

    def _bytes(self, ways: Contest, hints: SizeHints) -> int:
        """Of all operands and results at these sizes."""
        values = {*_operands(ways), *(v for v in ways[0].cover.graph.outputs if isinstance(v, Value))}
        return sum(hints.estimate(v.numel) * v.dtype.bytes for v in values)


def agree(expected: Sequence[Result], given: Sequence[Result]) -> bool:
    """Whether results are the same but for rounding, wherever the expected ones are finite: no element differs by more
    than a part of the largest. What a kernel mixes up, or leaves out, differs by as much as elements do."""
    for a, b in zip(expected, given, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point():
            wide, other = a.float(), b.float()
            finite = wide[wide.isfinite()]
            most = PRODUCTS.max_difference_ratio * (finite.abs().max() if finite.numel() else 0.0)
            if a.shape != b.shape or not bool(((wide - other).abs() <= most)[wide.isfinite()].all()):
                return False
    return True


def _operands(ways: Contest) -> dict[Value, Layout | None]:
    """What any way reads that nothing made of other operands, and how it lies."""
    prepared_once = {v for way in ways for op in way.prepared_once for v in op.outputs}
    return {
        v: way.cover.graph.layouts.get(v)
        for way in ways
        for v in way.cover.graph.inputs
        if isinstance(v, Value) and v not in prepared_once
    }
