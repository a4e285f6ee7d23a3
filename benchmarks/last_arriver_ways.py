"""What `benchmarks.last_arriver` compares: problems, and the ways in which sums of theirs are taken."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from benchmarks import convolutions, gemm
from benchmarks.convolutions import LAYERS, Layer
from benchmarks.gemm import CUBLAS, Kernels, Shape, build_sources, captured, printed
from benchmarks.gpu_clock import Call, Tensors
from benchmarks.last_arriver_tail import Merge, with_tail
from tilewright.ir.graph import Graph, Layout, Value
from tilewright.ir.kernel import Kernel, Scheduled
from tilewright.ir.sizes import dims
from tilewright.options import Options
from tilewright.rewrite.split.products import SplitProduct, even_part_counts, split_product
from tilewright.runtime.store.cache import ContentStore
from tilewright.schedule.solver import Solver
from tilewright.target import Target

CONVOLUTIONS = ("C7", "C8", "C11", "R9")
PRODUCTS = tuple(Shape(m, k, n) for m in (1, 16) for k, n in ((4096, 4096), (4096, 11008), (11008, 4096)))
ROWS: Mapping[str, Layer | Shape] = {
    **{name: LAYERS[name] for name in CONVOLUTIONS},
    **{shape.name: shape for shape in PRODUCTS},
}

WHOLE, TWO, LAST, LAST_SINGLE = "whole", "two", "last", "last32"
"""How a sum is taken: whole; in parts that a second kernel merges; or the last block, in fp64 or in fp32."""

MOST_PARTS = 16
KEPT_COUNTS, KEPT = 3, 3
"""Numbers of parts that are built, the fastest by the model, and of tilings of each kernel."""


@dataclass(frozen=True)
class Problem:
    """What is computed: a convolution of one image, or a product of matrices."""

    of: Layer | Shape

    @property
    def moved(self) -> int:
        """Bytes that are read and written at least."""
        return self.of.moved(1) if isinstance(self.of, Layer) else self.of.moved

    def inputs(self, device: torch.device) -> Tensors:
        """Operands, and where the result goes."""
        return self.of.inputs(1, device) if isinstance(self.of, Layer) else self.of.inputs(device)

    def captured(self) -> tuple[Graph, Kernel]:
        """Its graph, and all of it as one kernel."""
        operands, of = self.inputs(torch.device("meta"))[:-1], self.of
        given = [torch.empty_like(t, device="cpu") for t in operands]
        if isinstance(of, Layer):
            return captured(lambda x, weight, bias: of.convolved(x, weight, bias), given)
        return captured(gemm.multiplied, given)

    def peers(self) -> dict[str, Call]:
        """What it is compared with, as functions of the inputs."""
        return self.of.peers() if isinstance(self.of, Layer) else {CUBLAS: gemm.multiply}

    def errors(self, found: Mapping[str, Call], inputs: Tensors) -> dict[str, float]:
        """The largest error of each result against fp32, as part of the largest element."""
        if isinstance(self.of, Layer):
            return convolutions.errors(self.of, found, inputs)
        return gemm.errors(found, inputs)


@dataclass(frozen=True)
class Way:
    """A way to compute it: kernels in order, each with the places of its parameters among (operands, result, partial
    results, counters); what the model says of it in seconds; how many partial results (fp32) and tiles there are."""

    kind: str
    steps: tuple[tuple[str, tuple[int, ...]], ...]
    modelled: float
    partials: int = 0
    tiles: int = 0
    warps: int = 0
    blocks: int = 0


@dataclass
class Ways:
    """All kernels of a row and the ways to compute it, and why some are missing."""

    kernels: Kernels = field(default_factory=lambda: Kernels({}, ()))
    ways: dict[str, Way] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def build(self, target: Target, store: ContentStore, until: float) -> None:
        """Build the kernels, those of one number of parts after the other, none when the time is `until`."""
        for names in self._groups():
            if time.time() > until:
                self.missing |= dict.fromkeys(names, "no time left to build it")
                continue
            some = Kernels({}, (), {name: self.kernels.sources[name] for name in names})
            build_sources(some, target, store)
            self.kernels.built |= some.built
            self.kernels.missing |= some.missing

    def _groups(self) -> Iterator[list[str]]:
        groups: dict[str, list[str]] = {}
        for name in self.kernels.sources:
            groups.setdefault(name.partition("p")[0].removesuffix("merge"), []).append(name)
        yield from groups.values()

    @property
    def built(self) -> dict[str, Way]:
        """The ways whose kernels are all there."""
        return {n: w for n, w in self.ways.items() if all(k in self.kernels.built for k, _ in w.steps)}


class Proposer:
    """Ways of one problem for one machine, whose kernels wait for those in front."""

    def __init__(self, problem: Problem, target: Target) -> None:
        self._graph, self._kernel = problem.captured()
        operands = (v for v in self._graph.inputs if isinstance(v, Value))
        self._tensors = (*operands, *self._kernel.outputs)
        self._biased = isinstance(problem.of, Layer)
        self._target, self._solver = replace(target, early_launch="own"), Solver(target, Options())
        self.found = Ways()

    def all(self) -> Ways:
        """The whole sum, and parts of the most promising numbers."""
        self._whole()
        halves = [
            (self._modelled(h), count, h)
            for count in even_part_counts(self._kernel, MOST_PARTS)
            if (h := split_product(self._kernel, self._graph.layouts, count, self._graph.fresh_id()))
        ]
        for _, count, h in sorted(halves, key=lambda row: row[:2])[:KEPT_COUNTS]:
            self._in_parts(count, h)
        return self.found

    def _layouts(self, halves: SplitProduct) -> Mapping[Value, Layout]:
        return {**self._graph.layouts, halves.between: halves.layout}

    def _modelled(self, halves: SplitProduct) -> float:
        layouts = self._layouts(halves)
        return self._solver.price(halves.parts, layouts) + self._solver.price(halves.merge, layouts)

    def _tilings(self, kernel: Kernel, layouts: Mapping[Value, Layout]) -> list[tuple[Scheduled, float]]:
        """The kernel under the fastest schedules by the model that differ in tiles or warps, with modelled seconds.
        Those that differ in the order of blocks or in how they load are left out."""
        solver, seen, found = self._solver, set[object](), list[tuple[Scheduled, float]]()
        for proposal in solver.proposals(kernel, layouts):
            s = proposal.schedule
            tiling = frozenset(map(str, s.tiling.classes)), s.launch.warps
            if tiling not in seen and len(found) < KEPT:
                seen.add(tiling)
                found.append((solver.solve(kernel, layouts, s), proposal.seconds))
        return found or [(solver.solve(kernel, layouts), solver.price(kernel, layouts))]

    def _add(self, name: str, scheduled: Scheduled, tensors: Sequence[Value]) -> tuple[int, ...]:
        """A kernel; the places of its parameters."""
        self.found.kernels.scheduled[name] = scheduled
        self.found.kernels.sources[name] = printed(scheduled, self._target)[0]
        return tuple(tensors.index(v) for v in scheduled.params)

    def _whole(self) -> None:
        for k, (scheduled, seconds) in enumerate(self._tilings(self._kernel, self._graph.layouts)):
            places = self._add(f"p{k}", scheduled, self._tensors)
            made = Way(WHOLE, ((f"p{k}", places),), seconds, 0, 0, scheduled.program.warps, blocks(scheduled))
            self.found.ways[f"p{k}"] = made

    def _in_parts(self, count: int, halves: SplitProduct) -> None:
        layouts = self._layouts(halves)
        tensors = (*self._tensors, halves.between)
        result, between, counters = (len(tensors) + k for k in (-2, -1, 0))
        merge = self._solver.solve(halves.merge, layouts)
        last = f"s{count}merge", self._add(f"s{count}merge", merge, tensors)
        seconds, elements = self._solver.price(halves.merge, layouts), dims.static(halves.between.numel) or 0
        for k, (scheduled, own) in enumerate(self._tilings(halves.parts, layouts)):
            name = f"s{count}p{k}"
            places, grid = self._add(name, scheduled, tensors), blocks(scheduled)
            facts = elements, grid // count, scheduled.program.warps, grid
            self.found.ways[f"{name} {TWO}"] = Way(TWO, ((name, places), last), own + seconds, *facts)
            bias = (result - 1,) if self._biased else ()
            more = (*places, result, counters, *bias)
            assert places[-1] == between, "a kernel stores into its last parameter"
            for kind in (LAST, LAST_SINGLE):
                merged = Merge(count, elements // count, grid, self._biased, kind == LAST)
                if self._add_tail(f"{name} {kind}", name, merged):
                    self.found.ways[f"{name} {kind}"] = Way(kind, ((f"{name} {kind}", more),), own, *facts)

    def _add_tail(self, name: str, of: str, merge: Merge) -> bool:
        kernels = self.found.kernels
        try:
            made = with_tail(kernels.sources[of], merge)
        except ValueError as error:
            self.found.missing[name] = str(error)[:200]
            return False
        kernels.scheduled[name], kernels.sources[name] = kernels.scheduled[of], made
        return True


def blocks(scheduled: Scheduled) -> int:
    """Blocks of a grid of known sizes."""
    made = 1
    for g in scheduled.program.grid:
        made *= dims.static(g.extent) or 0
    return made
