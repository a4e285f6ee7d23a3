"""Every declared op, through capture, means what eager computes: all types, odd sizes, symbolic sizes."""

from __future__ import annotations

import pytest
import torch
from tests.support.ops.captured_op import agree, capture, library_calls
from tests.support.ops.cases import Case
from tests.support.ops.more_cases import CASES

SIZES = {"a": 3, "b": 5, "c": 4, "d": 2}
ONES = {"a": 1, "b": 1, "c": 1, "d": 1}
EMPTY = {"a": 0, "b": 5, "c": 4, "d": 2}
LATER = {"a": 7, "b": 6, "c": 9, "d": 3}


def _names(case: Case) -> list[str]:
    return sorted({d for a in case.args for d in a.dims.split() if not d.isdigit()})


def _runs(case: Case) -> list[tuple[dict[str, int], torch.dtype]]:
    runs = [(SIZES, t) for t in case.dtypes]
    if _names(case) and case.least <= 1:
        runs.append((ONES, case.dtypes[0]))
    if _names(case) and case.least == 0:
        runs.append((EMPTY, case.dtypes[0]))
    return runs


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_static(case: Case) -> None:
    for sizes, dtype in _runs(case):
        args = [a.make(sizes, dtype) for a in case.args]
        graph = capture(case.fn, args)
        assert library_calls(graph) == [], (sizes, dtype)
        agree(graph, case.fn, args)


@pytest.mark.parametrize("case", [c for c in CASES if _names(c) and not c.static], ids=lambda c: c.name)
def test_symbolic(case: Case) -> None:
    dtype = case.dtypes[0]
    args = [a.make(SIZES, dtype) for a in case.args]
    graph = capture(case.fn, args, [[not d.isdigit() for d in a.dims.split()] for a in case.args])
    assert library_calls(graph) == []
    assert graph.symbols()
    for sizes in (SIZES, LATER):
        agree(graph, case.fn, [a.make(sizes, dtype) for a in case.args])
