"""Models whose control flow depends on data: cut at the nodes that read it. Those run eagerly, the rest is compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tilewright.capture.exported import Exported
from tilewright.capture.trace import fits, hints, trace
from tilewright.errors import ModelError, UnsupportedError
from tilewright.plan.coverage import Coverage, total
from tilewright.runtime.plan.arguments import deliver
from tilewright.tuning.input_limits import GRAPHS

from .exported import ProgramWay
from .fallback import EagerRegion
from .reports import Reports, ReportsOfParts

Compile = Callable[[Exported], ProgramWay]


class ModelSegment(Protocol):
    """Part of a model: its nodes `labels`; with `library` it must run eagerly because of `nodes`."""

    @property
    def module(self) -> torch.nn.Module: ...
    @property
    def library(self) -> bool: ...
    @property
    def nodes(self) -> tuple[str, ...]: ...
    @property
    def labels(self) -> tuple[str, ...]: ...


class Split(Protocol):
    """A model as segments, which it runs in order through the calls that are given."""

    @property
    def segments(self) -> Sequence[ModelSegment]: ...

    def run(self, inputs: Sequence[Tensor], calls: Sequence[Callable[..., object]]) -> tuple[Tensor, ...]:
        """The outputs of the model."""
        ...


class Pieces(ReportsOfParts):
    """The segments of `cut` in order, those without control flow through `build`."""

    def __init__(self, cut: Split, build: Compile) -> None:
        self._cut = cut
        self._parts = [
            EagerRegion(s.module, s.nodes) if s.library else GraphPart(s, build) for s in cut.segments
        ]

    @property
    def coverage(self) -> Coverage:
        """Of what was compiled so far, and of the regions that run eagerly."""
        return total([p.coverage for p in self._parts]) or Coverage(0, 0, 0)

    def reporting(self) -> Sequence[Reports]:
        """The regions."""
        return self._parts

    def admits(self, leaves: Sequence[object]) -> bool:
        """Any inputs: each piece finds out what fits."""
        del leaves
        return True

    def run(self, leaves: Sequence[object], out: Sequence[Tensor] | None) -> object:
        """The model's result for its inputs: a tensor, or a tuple of several."""
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        results = self._cut.run(tensors, [_caller(p) for p in self._parts])
        result = results[0] if len(results) == 1 else results
        return result if out is None else deliver(result, out, tensors)


def _caller(part: EagerRegion | GraphPart) -> Callable[..., object]:
    return lambda *given: part.run(given, None)


class GraphPart(ReportsOfParts):
    """One part without control flow: a graph for all sizes for which what the trace relied on holds, else one more."""

    def __init__(self, segment: ModelSegment, build: Compile) -> None:
        self._module, self._labels = segment.module, segment.labels
        self._build = build
        self._ways: list[tuple[Exported, ProgramWay]] = []
        self._eager: EagerRegion | None = None
        self._lock = threading.Lock()

    @property
    def coverage(self) -> Coverage:
        """Of the graphs compiled so far, and of the piece itself where it could not be."""
        found = total([w.coverage for _, w in self._ways]) or Coverage(0, 0, 0)
        return found if self._eager is None else found + self._eager.coverage

    def reporting(self) -> Sequence[Reports]:
        """The graphs."""
        return [way for _, way in self._ways]

    def run(self, leaves: Sequence[object], out: Sequence[Tensor] | None) -> object:
        """The values that the piece writes."""
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if len(tensors) < len(leaves):  # sequences pass between the pieces
            return self._eagerly("a sequence of tensors").run(leaves, out)
        with self._lock:
            way = self._chosen(tensors)
        return way.run(leaves, out)

    def _chosen(self, tensors: Sequence[Tensor]) -> ProgramWay | EagerRegion:
        for program, way in self._ways:
            if fits(program, tensors) and way.admits(tensors):
                return way
        if self._eager is not None or len(self._ways) >= GRAPHS.max_per_piece:
            return self._eagerly("sizes that keep changing")
        free = [dict.fromkeys(range(t.dim())) for t in tensors]
        fixed = [{d: None for d, n in enumerate(t.shape) if n > 1} for t in tensors]
        for dims, examples in ((free, hints(tensors, free)), (fixed, tensors)):
            try:
                program = trace(self._module, examples, [list(d) for d in dims])
            except (UnsupportedError, ModelError):
                continue
            if fits(program, tensors):
                self._ways.append((program, self._build(program)))
                return self._ways[-1][1]
        return self._eagerly("a part that cannot be traced as one graph")

    def _eagerly(self, why: str) -> EagerRegion:
        if self._eager is None:
            self._eager = EagerRegion(self._module, self._labels, why)
        return self._eager
