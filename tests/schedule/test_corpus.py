"""The corpus, each case as one generated kernel, against eager: static sizes, and symbolic ones at three sizes."""

from __future__ import annotations

import pytest
import torch

from tests.emit.harness import Unit
from tests.schedule.corpus import CASES, Case
from tests.schedule.run import build_cases, run
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Scheduled

VARIANTS = [(case, dynamic) for case in CASES for dynamic in ((False, True) if case.dynamic else (False,))]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Unit, list[tuple[Graph, Scheduled]]]:
    """All cases in one translation unit."""
    return build_cases(tmp_path_factory.mktemp("corpus"), VARIANTS)


@pytest.mark.parametrize(
    "number", range(len(VARIANTS)), ids=[f"{c.name}-{'dynamic' if d else 'static'}" for c, d in VARIANTS]
)
def test_corpus_agrees_with_eager(built: tuple[Unit, list[tuple[Graph, Scheduled]]], number: int) -> None:
    unit, parts = built
    case, dynamic = VARIANTS[number]
    graph, scheduled = parts[number]
    for scale in (1, 2, 3) if dynamic else (1,):
        check(unit, number, graph, scheduled, case, scale)


def check(unit: Unit, number: int, graph: Graph, scheduled: Scheduled, case: Case, scale: int) -> None:
    inputs = case.inputs(scale)
    wanted = case.run(*inputs)
    made = run(unit, number, graph, scheduled, inputs)
    for v, want in zip(graph.outputs, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        assert isinstance(v, Value)
        got = torch.from_numpy(made[scheduled.kernel.outputs.index(v)].copy())
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
