"""What goes past the caches, and what is fetched ahead, where sizes are symbols: one kernel that decides by them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support.corpus import Case
from tests.support.cpp_harness import build, host_target, print_unit
from tests.support.lowered import form_of
from tests.support.one_kernel import capture, check, one_kernel, sizes_of

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.interp.algebra import Floats
from tilewright.interp.evaluate import Evaluator
from tilewright.ir.expr import Expr, is_const
from tilewright.ir.schedule import Sized
from tilewright.options import Options
from tilewright.schedule.cpu.vectors import vector_schedule
from tilewright.schedule.solver import Solver
from tilewright.target import MemoryKind, Target

ROWS = {0: "n", 1: "m"}
NORM = Case("norm", lambda x: F.layer_norm(x, x.shape[-1:]), ((5, 96),), (ROWS,))
CHAIN = Case("chain", lambda x, y: torch.relu(x + y) * x, ((7, 64), (7, 64)), (ROWS, ROWS))
HALF = Case("half", lambda x: torch.sigmoid(x).to(torch.float16), ((7, 64),), (ROWS,))
TURN = Case("turn", lambda x: x.t().contiguous(), ((20, 48),), (ROWS,))
CASES = (NORM, CHAIN, TURN)


def near(bytes_: int) -> Target:
    """This machine with a last-level cache of so many bytes."""
    return host_target().resized(capacities={MemoryKind.L2: bytes_})


def written(case: Case, scale: int) -> int:
    """Bytes of the result of a case."""
    made = case.run(*case.inputs(scale))
    assert isinstance(made, torch.Tensor)
    return made.nbytes


def holds(when: Expr, case: Case, scale: int) -> bool:
    """Whether a condition holds at the sizes of a case."""
    sizes = sizes_of(capture(case, True), [t.numpy() for t in case.inputs(scale)])
    return bool(Evaluator(Floats(), (), dict(sizes), {}, {}).value(when))


def decided(case: Case, dynamic: bool, target: Target) -> tuple[tuple[Sized, ...], tuple[Sized, ...]]:
    made = vector_schedule(form_of(case, dynamic), target, NO_HINTS)
    return made.memory.past_caches, made.memory.next_point


def test_known_sizes_leave_nothing_to_decide() -> None:
    stream, ahead = decided(NORM, False, near(5 * 96 * 4))
    assert all(is_const(s.when, True) for s in (*stream, *ahead)) and len(stream) == len(ahead) == 1
    assert decided(NORM, False, near(5 * 96 * 4 + 1))[0] == ()
    assert decided(NORM, False, near(2 * (5 * 96 * 4) + 2))[1] == ()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_symbols_decide_by_bytes_written(case: Case) -> None:
    bytes_ = written(case, 2)
    ((stream,), _) = decided(case, True, near(bytes_))
    assert [holds(stream.when, case, scale) for scale in (1, 2, 3)] == [False, True, True]
    ((later,), _) = decided(case, True, near(bytes_ + 1))
    assert not holds(later.when, case, 2)


def test_rows_that_outgrow_the_nearest_caches_are_not_fetched_ahead() -> None:
    large = host_target().core.capacity // 16 // 96  # rows of so many times 96 numbers still fit
    _, (ahead,) = decided(NORM, True, near(4))
    assert holds(ahead.when, NORM, large) and not holds(ahead.when, NORM, large + 1)


@pytest.mark.parametrize("case", (*CASES, HALF), ids=lambda c: c.name)
def test_results_on_both_sides(case: Case, tmp_path: Path) -> None:
    """The same code below and above the size at which it changes its stores."""
    graph = capture(case, True)
    assert len(graph.outputs) == 1
    target = near(written(case, 2))
    made = Solver(target, Options()).solve(one_kernel(graph), graph.layouts)
    symbols = sorted({repr(s) for s in graph.symbols()})
    text = print_unit([made.program], symbols, target).text
    assert re.search(r"store_stream\(.*, .*>= \d+\);", text) and re.search(r"if \(.*\) store_fence", text)
    unit = build(tmp_path, [made.program], symbols)
    for scale in (1, 2, 3):
        check(unit, 0, graph, made, case, scale)
