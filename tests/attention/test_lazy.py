"""Lazy gauges: what follows a running maximum is repaired only where that leaves its reference far behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.attention.device import compiled
from tests.attention.family import Program, inputs, programs
from tests.attention.run import wrong
from tests.attention.test_family import named
from tests.attention.test_family_gpu import check
from tests.emit.triton_harness import interpret, same_as_interpreter
from torch import Tensor

import tilewright
from tilewright.ir.program import Branch, Dot
from tilewright.ir.schedule import Schedule
from tilewright.schedule.solver import Solver

PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
ROUGH = settings(
    max_examples=4, phases=PHASES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True, params=[1, 8])
def lazy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All schedules lazy: by little, so that references move often, or by as much as is useful."""
    usual = Solver._trimmed
    monkeypatch.setattr(Solver, "_trimmed", lambda self, s: usual(self, s).changed(lazy_log2=request.param))
    yield


@given(programs(), st.sampled_from([(17, 129), (3, 300), (129, 129)]))
@ROUGH
def test_any_program_for_a_gpu(program: Program, lengths: tuple[int, int]) -> None:
    check(program, *lengths)


@given(program=programs(), sizes=st.sampled_from([(19, 19), (33, 40), (17, 12)]))
@ROUGH
def test_any_program_for_a_cpu(
    program: Program, sizes: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In a cache of its own: there libraries are known by their kernels, not by their schedules."""
    run, given = named(program), inputs(2, 4, *sizes, 8)
    torch._dynamo.reset()
    folder = tmp_path_factory.mktemp("lazy")
    with torch.no_grad():
        made = tilewright.compile(run, given, options={"contractions": "inside", "cache_dir": str(folder)})
    draws = [inputs(2, 4, *sizes, 8) for _ in range(4)]
    text = wrong(run, made, draws, program.deciding if "any" in program.columns else None)
    assert not text, text


def hidden(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Some rows see nothing, in blocks at the beginning and at the end; others see their largest score last."""
    s = q @ k.transpose(-1, -2)
    i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
    s = torch.where((i % 3 > 0) & (j >= 40) & (j <= i + 90), s * (1 + j / 64), float("-inf"))
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def test_rows_that_see_nothing(tmp_path: Path) -> None:
    given = tuple(torch.randn(1, 2, 160, 16) for _ in range(3))
    made = compiled(hidden, given)
    results, jobs = made.run(given)
    want, sums = hidden(*given)
    assert torch.isnan(want).any() and torch.isfinite(want).any()
    torch.testing.assert_close(results[0], want, rtol=2e-5, atol=2e-5, equal_nan=True)
    torch.testing.assert_close(results[1], sums, rtol=2e-5, atol=2e-5, equal_nan=True)
    for k in made.kernels:
        assert isinstance(k.schedule, Schedule) and "lazy" in str(k.schedule)
    for job, outcome in zip(jobs, interpret(tmp_path, jobs), strict=True):
        same_as_interpreter(job, outcome)


def test_only_the_block_waits_for_a_condition() -> None:
    """The product's state is repaired in a branch, right before the product."""
    given = tuple(torch.randn(1, 2, 256, 64).half() for _ in range(3))
    made = compiled(lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1) @ v, given)
    (kernel,) = made.kernels
    branches = [s for s in kernel.program.statements() if isinstance(s, Branch)]
    states = {s.acc for s in kernel.program.statements() if isinstance(s, Dot)}
    assert branches and all(len(b.body) == 1 and set(b.body[0].vars) <= states for b in branches)  # type: ignore[union-attr]
