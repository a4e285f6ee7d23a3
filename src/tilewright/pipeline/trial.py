"""Times covers of one region against each other: kernels are built all at once, then the covers run in turns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.analysis.compared_integers import middle_places
from tilewright.analysis.size_hints import SizeHints
from tilewright.errors import TilewrightError, shown
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Graph, Layout, Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.sizes import dims
from tilewright.partition.cover import partition
from tilewright.partition.memo import task_of
from tilewright.plan.build import build_plan
from tilewright.runtime.plan.tensors import drawn, torch_dtype
from tilewright.runtime.stats import STATS
from tilewright.tuning.input_limits import MODELS
from tilewright.tuning.text_limits import TEXTS
from tilewright.tuning.timing_limits import COMPARISON, TRIAL

from .backends.executables import executable
from .build import Clock, KernelBuilder, names_of, number_kernels
from .state import PlannedGraph

LOG = logging.getLogger("tilewright")


@dataclass(frozen=True, slots=True, eq=False)
class CoverTrial:
    """Times covers with kernels by `builder` on `device`, for its typical sizes."""

    builder: KernelBuilder
    device: str

    def __call__(self, covers: Sequence[Graph]) -> list[float] | None:
        """The best time of each graph, whose ops have the numbers of their kernels, in seconds; None where they cannot
        be built, or run, here."""
        tuned, key = self.builder.tuned, self.builder.decisions.clock_key("\n".join(map(task_of, covers)))
        match tuned.get("cover", key):
            case {"seconds": [*known]} if len(known) == len(covers):
                found = [float(seconds) for seconds in known]
            case {"seconds": None}:
                found = None
            case _ if not tuned.seconds():
                tuned.leave("cover", key)
                return None
            case _:
                found = self._timed(covers)
        tuned.note("cover", key, {"what": told(covers[0]), "seconds": found})
        return found

    def _timed(self, covers: Sequence[Graph]) -> list[float] | None:
        """As a clock says now."""
        clock = self.builder.backend.clock(self.device)
        if clock is None:
            return None
        STATS.timed += 1
        try:
            with torch.no_grad():
                return self._times(covers, clock)
        except (TilewrightError, RuntimeError, MemoryError) as refused:
            LOG.info("covers are not timed: %s", str(refused))  # its traceback would hold the operands
        except Exception:
            LOG.exception("timing covers failed in a way that nobody expects; the model decides")
        return None

    def _times(self, covers: Sequence[Graph], clock: Clock) -> list[float] | None:
        graph = covers[0]
        values = [v for v in (*graph.inputs, *graph.outputs) if isinstance(v, Value)]
        if (
            sum(self.builder.hints.estimate(v.numel) * v.dtype.bytes for v in values)
            > MODELS.max_timed_region_bytes
        ):
            return None
        runs = self._runs(covers)
        start = time.perf_counter()
        first: list[float] = []
        for run in runs:
            if time.perf_counter() - start > TRIAL.max_first_runs_seconds:
                return None
            first.append(clock(run))
        if time.perf_counter() - start > TRIAL.max_first_runs_seconds:
            return first
        taken: list[list[float]] = [[] for _ in runs]
        start = time.perf_counter()
        for done in range(COMPARISON.max_rounds):
            if done >= COMPARISON.min_rounds and time.perf_counter() - start > TRIAL.seconds_per_region:
                break
            for run, times in zip(runs, taken, strict=True):
                times.append(clock(run))
        return [min(times) for times in taken]

    def _runs(self, graphs: Sequence[Graph]) -> list[Callable[[], object]]:
        """What runs each cover once on the same operands."""
        solver = self.builder.solver
        covers = [partition(g, solver.price, self.builder.hints, afar=solver.afar) for g in graphs]
        symbols = graphs[0].symbols()
        built = self.builder.built(covers, symbols, only_timed=True)
        laid = {v: graphs[0].layouts.get(v) for v in graphs[0].inputs if isinstance(v, Value)}
        given = operands(graphs[0], laid, self.builder.hints, self.device, seeded=False)
        tensors = [given[v] for v in graphs[0].inputs if isinstance(v, Value)]
        made: list[Callable[[], object]] = []
        first = 0
        for cover in covers:
            count = sum(isinstance(step, Kernel) for step in cover.steps)
            kernels = number_kernels(cover, built.numbers[first : first + count])
            plan = build_plan(cover, kernels, names_of(symbols)).on(self.device)
            ready = executable(PlannedGraph(cover, plan, built.unit), solver.options)
            made.append(lambda ready=ready: ready([*tensors]))
            first += count
        return made


def told(graph: Graph) -> str:
    """What a graph computes, in words: its ops, and the shapes that it reads and makes."""
    names = " + ".join(dict.fromkeys(op.name for op in graph.ops))
    read, made = (
        ", ".join(_shape(v) for v in vs if isinstance(v, Value)) for vs in (graph.inputs, graph.outputs)
    )
    return shown(f"{names}: {read} -> {made}", TEXTS.max_place_characters)


def _shape(v: Value) -> str:
    return f"{v.dtype.name}[{', '.join(map(str, v.shape))}]"


def operands(
    graph: Graph, layouts: Mapping[Value, Layout | None], hints: SizeHints, device: str, *, seeded: bool
) -> dict[Value, Tensor]:
    """Tensors for inputs of a graph: random numbers where there are floats, the same each time if they are `seeded`;
    the middle of what integers are compared with; else zeros, which are indices of everything."""
    made = {
        v: _operand(v, layout, hints, device, seed if seeded else None)
        for seed, (v, layout) in enumerate(layouts.items())
    }
    for v, place in middle_places(graph, hints).items():
        if v in made:
            made[v].fill_(place)
    return made


def _operand(v: Value, layout: Layout | None, hints: SizeHints, device: str, seed: int | None) -> Tensor:
    strides: Sequence[Expr] = layout.strides if layout is not None else dims.dense_strides(v.shape)
    shape, laid = (list(map(hints.estimate, x)) for x in (v.shape, strides))
    t = torch.empty_strided(shape, laid, dtype=torch_dtype(v.dtype), device=device)
    return drawn(t, seed) if v.dtype.is_float else t.zero_()
