"""The corpus, each case as one generated kernel, against eager: static sizes, and symbolic ones at three sizes."""

from __future__ import annotations

import pytest
from tests.support.corpus import CASES
from tests.support.cpp_harness import Unit
from tests.support.one_kernel import build_cases, check

from tilewright.ir.graph import Graph
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
