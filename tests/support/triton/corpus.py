"""The corpus of kernels, scheduled for a GPU, as jobs for the interpreter and sources for the builder."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tests.support.corpus import CASES, Case
from tests.support.one_kernel import capture, one_kernel, sizes_of
from tests.support.triton.harness import NARROW, Job, Outcome

from tilewright.interp.algebra import to_numpy
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Scheduled
from tilewright.ir.sizes import dims
from tilewright.lower.variants import Variant
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.schedule.table import Tuning
from tilewright.target import preset

BY_NAME = {c.name: c for c in CASES}


@dataclass(frozen=True)
class Entry:
    """A case of the corpus with its graph and its kernel."""

    case: Case
    graph: Graph
    scheduled: Scheduled

    @property
    def symbols(self) -> tuple[str, ...]:
        """The plan's order of sizes."""
        return tuple(repr(s) for s in self.graph.symbols())

    def job(self, scale: int = 1, variant: Variant = NARROW) -> Job:
        """A run of the kernel on random inputs."""
        arrays = [to_numpy(t) for t in self.case.inputs(scale)]
        of = dict(zip([v for v in self.graph.inputs if isinstance(v, Value)], arrays, strict=True))
        sizes = sizes_of(self.graph, arrays)
        given = [of.get(v) for v in self.scheduled.params]
        return Job(self.scheduled.program, given, sizes, self.symbols, variant, self.case.name)

    def compare(self, job: Job, outcome: Outcome, scale: int = 1) -> None:
        """Raise AssertionError unless the outputs are those of the torch function."""
        want = self.case.run(*self.case.inputs(scale))
        found = dict(zip(self.scheduled.params, outcome.arrays, strict=True))
        assert outcome.error == 0, f"{job.name}: error {outcome.error}"
        for v, w in zip(self.graph.outputs, want if isinstance(want, tuple) else (want,), strict=True):
            assert isinstance(v, Value)
            shape = [dims.evaluate(e, job.sizes) for e in v.shape]
            strides = [dims.evaluate(e, job.sizes) for e in self.graph.layouts[v].strides]
            flat = found[v]
            got = np.lib.stride_tricks.as_strided(flat, shape, [s * flat.itemsize for s in strides])
            np.testing.assert_allclose(got, to_numpy(w), rtol=2e-5, atol=2e-5, err_msg=job.name)


GRAPHS: dict[tuple[int, bool], tuple[Case, Graph]] = {}
"""What has been captured, by the case (kept alive here) and whether sizes are dynamic."""


def entry(case: Case, dynamic: bool, target: str = "sm_90", tuning: Tuning | None = None) -> Entry:
    """Capture a case as one kernel and schedule it for a target, by another table if one is given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        key = (id(case), dynamic)
        _, graph = GRAPHS[key] = GRAPHS.get(key) or (case, capture(case, dynamic))
        scheduled = Solver(preset(target), Options(), tuning).solve(one_kernel(graph), graph.layouts)
    return Entry(case, graph, scheduled)


def entries(names: Sequence[str] | None = None) -> list[Entry]:
    """Static and dynamic entries of the cases named (None: all)."""
    chosen = CASES if names is None else [BY_NAME[n] for n in names]
    return [entry(c, d) for c in chosen for d in ((False, True) if c.dynamic else (False,))]
