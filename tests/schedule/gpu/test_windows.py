"""Windows without matrices: what is proposed means the same, and the model sees what a thread does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from tests.support.lowered import agree
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from torch import Tensor

from tilewright.interp import EXACT, exact_random, run_graph
from tilewright.options import Options
from tilewright.schedule.gpu.windows import thread_work
from tilewright.schedule.scheduler import Solution
from tilewright.schedule.solver import Solver
from tilewright.target import preset

GPU = preset("sm_90")
Function = Callable[..., Tensor]


def depthwise(channels: int, stride: int, padding: int) -> Function:
    return lambda x, w, b: F.relu(F.conv2d(x, w, b, stride, padding, 1, channels))


def image(batch: int, channels: int, side: int, taps: int, dense: bool = False) -> Sequence[Tensor]:
    """An image, weights whose taps lie innermost, or, if `dense`, their channels, and biases."""
    weight = torch.empty(channels, 1, taps, taps, dtype=torch.float16)
    if dense:
        weight = weight.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    x = torch.empty(batch, channels, side, side, dtype=torch.float16)
    bias = torch.empty(channels, dtype=torch.float16)
    return x.to(memory_format=torch.channels_last), weight, bias


def proposals(function: Function, given: Sequence[Tensor]) -> tuple[Solver, tuple[Solution, ...]]:
    graph, solver = capture(function, given), Solver(GPU, Options())
    return solver, tuple(solver.proposals(one_kernel(graph), graph.layouts))


def numbers(solution: Solution) -> int:
    """Classes of which the step that writes windows out has a number."""
    (step,) = (s for s in solution.schedule.form_steps if s.name == "unroll_sums")
    return len(step.numbers)


@pytest.mark.parametrize(
    ("side", "taps", "stride", "padding"),
    [(8, 7, 1, 3), (9, 5, 2, 2), (10, 7, 1, 0), (14, 7, 2, 3), (8, 3, 1, 1)],
)
def test_all_mean_the_same(side: int, taps: int, stride: int, padding: int) -> None:
    function, given = depthwise(16, stride, padding), image(1, 16, side, taps)
    graph = capture(function, given)
    inputs = [exact_random(tuple(t.shape), 10 + k) for k, t in enumerate(given)]
    wanted: list[object] = list(run_graph(graph, inputs, algebra=EXACT))
    solver, found = proposals(function, given)
    kinds = {numbers(s): s for s in found}
    assert len(kinds) == (2 if taps > 3 else 1)
    for solution in kinds.values():
        made = solver.solve(one_kernel(graph), graph.layouts, solution.schedule)
        assert agree(graph, made, inputs, wanted), str(solution.schedule)
        assert made.seconds == pytest.approx(solution.seconds)


@pytest.mark.parametrize(("batch", "whole"), [(1, True), (64, False)])
def test_all_lines_are_written_out_where_threads_wait(batch: int, *, whole: bool) -> None:
    _, found = proposals(depthwise(96, 1, 3), image(batch, 96, 56, 7))
    assert found and any(numbers(s) > 1 for s in found) is whole


def test_no_thread_reads_more_than_registers_hold() -> None:
    _, found = proposals(depthwise(768, 1, 3), image(1, 768, 7, 7))
    whole = [s for s in found if numbers(s) > 1]
    assert whole and all(2 * thread_work(s.form, s.schedule, GPU).elements <= 800 for s in whole)


def test_what_lies_across_memory_takes_a_line_for_each_element() -> None:
    """Weights whose taps lie innermost: a thread's channels are elements of as many lines."""
    lines: list[dict[str, float]] = []
    for dense in (False, True):
        _, found = proposals(depthwise(64, 1, 3), image(1, 64, 14, 7, dense))
        work = {str(s.schedule): thread_work(s.form, s.schedule, GPU) for s in found}
        assert {w.steps for w in work.values()} == {1, 7}
        lines.append({name: w.lines for name, w in work.items()})
    across, along = lines
    both = across.keys() & along.keys()
    assert all(along[name] <= across[name] for name in both)
    assert any(along[name] < across[name] for name in both)
