"""What kernels around contractions, library calls and routines cost on a machine: joins `partition`, which asks for
prices, with those who know them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.expr import Expr
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Kernel, LibraryStep
from tilewright.library.cost import call_seconds, touch_seconds
from tilewright.library.library_graph import without_operand_makers
from tilewright.library.recognise import as_call, routine_of, routine_seconds
from tilewright.library.select import call_contractions, is_contraction
from tilewright.options import Options
from tilewright.partition.choose_kernels import Prices
from tilewright.partition.cover import partition
from tilewright.partition.memo import DecisionCache
from tilewright.partition.provenance import references
from tilewright.rewrite.algebra.logsumexp import take_logsumexp
from tilewright.rewrite.algebra.search import Search, rearrange
from tilewright.rewrite.normal.normalise import normalise
from tilewright.schedule.solver import Solver
from tilewright.tuning.thresholds import PARTITION


@dataclass(frozen=True, slots=True)
class MeasuredCache:
    """A cache whose decisions hold for one place."""

    cache: DecisionCache
    place: str

    def get(self, task: str) -> object | None:
        return self.cache.get(f"{task}\n{self.place}")

    def put(self, task: str, decision: object) -> None:
        self.cache.put(f"{task}\n{self.place}", decision)


def kernel_prices(solver: Solver, usual: Prices | None = None) -> Prices:
    """Modelled seconds at the sizes of `solver`, and at the `usual` ones where these are others."""
    hints = solver.hints

    def ideal(region: Graph) -> float:
        return call_seconds(region.ops, _values(region.outputs), solver.target, hints, splits=True)

    def guess(k: Kernel) -> float:
        return call_seconds(k.ops, k.outputs, solver.target, hints)

    def routine(region: Graph) -> tuple[float, Graph] | None:
        # A fused routine rounds neither scores nor weights.
        return None if solver.options.round_intermediates else _routine(region, solver)

    def spared(region: Graph, kernels: Sequence[Kernel]) -> float:
        stored = _largest((v for k in kernels for v in k.outputs), region, hints)
        held = _largest((op.output for op in region.ops if is_contraction(op)), region, hints)
        return held / solver.target.device.capacity if held > PARTITION.min_spared_ratio * stored else 0.0

    library = partial(library_seconds, solver=solver)
    return Prices(hints, solver.price, library, ideal, usual, routine, solver.notes, spared, guess)


def rearranged(region: Graph, sizes: Mapping[str, int], options: Options) -> tuple[Graph, tuple[str, ...]]:
    """A region in the form that is best cut into kernels, and which rules led there or were refused, with the ops where
    they were."""
    if not options.rules:
        return region, ()
    found = rearrange(
        region, sizes, Search(round_intermediates=options.round_intermediates), references(region)
    )
    changed, quotients = take_logsumexp(normalise(found.graph))
    applied = [f"rule: {step}" for change in found.changes for step in change.applied]
    refused = [f"refused rule: {rule}" for rule in found.refused]
    return changed, (
        *applied,
        *("rule: quotient leaves elements at reductions across rows",) * quotients,
        *refused,
    )


def _routine(region: Graph, solver: Solver) -> tuple[float, Graph] | None:
    """Seconds of a routine that computes a region, or all of it but what makes its operands, and these as a graph."""
    fresh = region.fresh_id()
    if found := routine_of(region, solver.target):
        return routine_seconds(found, solver.target), as_call(region, found, fresh)
    apart = without_operand_makers(region)
    found = routine_of(apart[1], solver.target) if apart is not None else None
    if apart is None or found is None:
        return None
    makers, core = apart
    operands = tuple(v for op in makers for v in op.outputs if v in core.inputs)
    first = Graph(region.inputs, makers, operands, region.origins, region.layouts)
    seconds = routine_seconds(found, solver.target) + library_seconds(first, solver)
    return seconds, region.with_ops((*makers, *as_call(core, found, fresh).ops))


def _largest(values: Iterable[Value], region: Graph, hints: SizeHints) -> int:
    """Bytes of the largest of some values that are no results of a region."""
    return max(
        (hints.estimate(v.numel) * v.dtype.bytes for v in values if v not in region.outputs), default=0
    )


def _values(outputs: Sequence[Value | Expr | None]) -> list[Value]:
    return [v for v in outputs if isinstance(v, Value)]


def library_seconds(region: Graph, solver: Solver) -> float:
    """Modelled seconds of a region whose contractions are library calls, and all else of their nodes kernels."""
    return way_seconds(region, normalise(call_contractions(region)), solver).total


@dataclass(frozen=True, slots=True)
class WaySeconds:
    """Modelled seconds of a region: of its library calls, and in `total`."""

    calls: float
    total: float


def way_seconds(region: Graph, called: Graph, solver: Solver) -> WaySeconds:
    """Modelled seconds of a region that is computed as `called` does: an equal graph with library calls."""
    cover = partition(called, solver.price, solver.hints, afar=solver.afar)
    kernels = calls = 0.0
    between: list[Value] = []
    for step in cover.steps:
        if isinstance(step, Kernel):
            kernels += solver.price(step, cover.layouts)
            between += step.outputs
        elif isinstance(step, LibraryStep):
            done = [op for op in region.ops if op.origin in step.origins]
            calls += call_seconds(done, step.op.outputs, solver.target, solver.hints)
            between += step.op.outputs
    touched = [v for v in between if v not in region.outputs]
    return WaySeconds(calls, calls + kernels + touch_seconds(touched, solver.target, solver.hints))
