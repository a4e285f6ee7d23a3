"""Every kernel of every declared op in all its types, scheduled for a GPU and printed as Triton."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.support.ops.captured_op import capture
from tests.support.ops.more_cases import CASES
from tests.support.triton.harness import NARROW, Job, build, interpret, same_as_interpreter

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.interp.algebra import STORAGE
from tilewright.ir.kernel import Kernel
from tilewright.ir.program import Buffer
from tilewright.ir.sizes import dims
from tilewright.library.select import select
from tilewright.lower.variants import Variant
from tilewright.options import Options
from tilewright.partition.cover import partition
from tilewright.rewrite.normal.normalise import normalise
from tilewright.schedule.solver import Solver
from tilewright.target import preset

SIZES = {"a": 3, "b": 5, "c": 4, "d": 2}
QUICK = 40
"""One in so many kernels is enough for every day."""


def contents(buffer: Buffer, seed: int) -> np.ndarray:
    """What every operation takes: numbers in (0.1, 0.9), integers 0 and 1."""
    made = np.random.default_rng(seed)
    count = dims.evaluate(buffer.size, {})
    numbers = made.uniform(0.1, 0.9, count) if buffer.dtype.is_float else made.integers(0, 2, count)
    return numbers.astype(STORAGE[buffer.dtype.name])


def kernels(every: int) -> list[Job]:
    """A run of each different kernel of each `every`-th case."""
    solver = Solver(preset("sm_90"), Options())
    found: dict[str, Job] = {}
    for case in CASES[:: max(1, every)]:
        for dtype in case.dtypes:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graph = select(normalise(capture(case.fn, [a.make(SIZES, dtype) for a in case.args])))
            cover = partition(graph, solver.price, NO_HINTS)
            for step in cover.steps:
                if isinstance(step, Kernel):
                    s = solver.solve(step, cover.layouts)
                    given = [
                        None if v in step.outputs else contents(b, k)
                        for k, (v, b) in enumerate(zip(s.params, s.program.params, strict=True))
                    ]
                    job = Job(s.program, given, {}, (), NARROW, f"{case.name} {dtype}")
                    found.setdefault(job.source().text, job)
    return list(found.values())


def agree(jobs: Sequence[Job], folder: Path) -> None:
    """Compare runs in Triton's interpreter with the meaning of the programs."""
    for job, outcome in zip(jobs, interpret(folder, jobs), strict=True):
        tolerance = 2e-3 if "float16" in job.name else 1e-4
        same_as_interpreter(job, outcome, rtol=tolerance, atol=tolerance)


def test_some_kernels(tmp_path: Path) -> None:
    agree(kernels(QUICK), tmp_path)


@pytest.mark.slow
def test_all_kernels(tmp_path: Path) -> None:
    jobs = kernels(1)
    assert len(jobs) > 500
    agree(jobs, tmp_path)
    for k, job in enumerate(jobs[::5]):
        source = Job(job.program, job.inputs, {}, (), Variant(True, k % 4 == 0)).source()
        assert (build(tmp_path / f"built{k}", source).facts.spills or 0) <= 16, job.name
