"""Which loads fetch the next grid point's part of an input ahead: those of the last pass that reads it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.support.corpus import Case
from tests.support.one_kernel import solved

from tilewright.ir.program import Load, Store

SIDE = 4096
GROUPS = Case("groups", lambda x: F.silu(F.group_norm(x, 32)), ((64, 64, 64, 64),))
LONE = Case("lone", lambda x, b: F.gelu(x + b), ((SIDE, SIDE), (SIDE,)))
COPY = Case("copy", lambda x, b: torch.relu(x + b), ((SIDE, SIDE), (SIDE,)))


def fetching(case: Case) -> list[bool]:
    """For each load of the first input, in order: whether it fetches ahead."""
    program = solved(case, False)[1].program
    first = program.params[0]
    assert any(isinstance(s, Store) for s in program.statements())
    return [s.ahead is not None for s in program.statements() if isinstance(s, Load) and s.buffer == first]


def test_the_last_of_several_passes_fetches_inside_nested_loops() -> None:
    assert fetching(GROUPS) == [False, False, True]


def test_much_work_on_each_element_hides_what_comes() -> None:
    assert fetching(LONE) == [True]
    assert fetching(COPY) == [False]
