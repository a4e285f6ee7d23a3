"""Schedules that are proposed for depthwise convolutions: they mean the same, are ranked, and share what they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.support.lowered import agree
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from torch import Tensor

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.interp import EXACT, exact_random, run_graph
from tilewright.interp.algebra import Array
from tilewright.ir.expr import walk
from tilewright.ir.program import Load, TileProgram, Update
from tilewright.ir.schedule import Memory, Schedule
from tilewright.lower.legalise.gpu import block_axes, legalise_for_gpu
from tilewright.options import Options
from tilewright.schedule.gpu.block_memory import ProductBlocks
from tilewright.schedule.gpu.windows import WindowWork
from tilewright.schedule.scheduler import Solution
from tilewright.schedule.solver import Solver, replay
from tilewright.target import preset

Shape = tuple[int, int, int, int]


def given(shape: Shape, taps: int, nchw: bool = False, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    layout = torch.contiguous_format if nchw else torch.channels_last
    x = torch.empty(shape, dtype=dtype).to(memory_format=layout)
    return [x, torch.empty((shape[1], 1, taps, taps), dtype=dtype), torch.empty(shape[1], dtype=dtype)]


def windowed(*window: int) -> Callable[..., Tensor]:
    """A depthwise convolution with bias and ReLU; `window` is stride, padding, dilation."""
    return lambda x, w, b: F.relu(F.conv2d(x, w, b, *window, groups=x.shape[1]))


GPU = preset("sm_90")
PROGRAMS = {
    "3x3": (windowed(1, 1), given((2, 20, 8, 8), 3)),
    "with strides": (windowed(2, 1), given((1, 32, 9, 9), 3)),
    "7x7": (windowed(1, 3), given((1, 16, 8, 8), 7)),
    "lines": (windowed(1, 3), given((1, 2, 14, 14), 7, nchw=True)),
    "7x7 with strides": (windowed(2, 3), given((1, 16, 14, 14), 7)),
    "7x7 without border": (windowed(1, 0), given((1, 16, 10, 10), 7)),
    "dilated": (windowed(1, 4, 2), given((1, 16, 9, 9), 5)),
    "no border": (windowed(1, 0), given((1, 16, 6, 10), 3)),
    "an image in a window": (windowed(1, 2), given((2, 32, 2, 2), 5)),
    "bf16": (windowed(1, 1), given((1, 16, 8, 8), 3, dtype=torch.bfloat16)),
    "residual": (lambda x, w, b: windowed(1, 1)(x, w, b) + x, given((1, 16, 4, 8), 3)),
}


def lines_at_once(solution: Solution) -> bool:
    """Whether all lines of a window are written out, by numbers of their own."""
    (step,) = (s for s in solution.schedule.form_steps if s.name == "unroll_sums")
    return len(step.numbers) > 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_mean_the_same(name: str) -> None:
    run, tensors = PROGRAMS[name]
    graph = capture(run, tensors)
    kernel, solver = one_kernel(graph), Solver(preset("sm_90"), Options())
    inputs: list[Array] = [exact_random(tuple(t.shape), 10 + k) for k, t in enumerate(tensors)]
    wanted: list[object] = list(run_graph(graph, inputs, algebra=EXACT))
    found = solver.proposals(kernel, graph.layouts)
    assert found and [s.seconds for s in found] == sorted(s.seconds for s in found)
    kinds = {lines_at_once(s): s for s in found}
    for solution in (*found[:: max(1, len(found) // 3)], *kinds.values()):
        made = solver.solve(kernel, graph.layouts, solution.schedule)
        assert agree(graph, made, inputs, wanted), str(solution.schedule)
        assert made.seconds == pytest.approx(solution.seconds)
        again = replay(kernel, graph.layouts, solution.schedule, solver.target, Options(), NO_HINTS)
        assert again == made.program


def test_more_results_side_by_side_are_thought_faster() -> None:
    graph = capture(windowed(1, 3), given((64, 96, 56, 56), 7))
    found = Solver(preset("sm_90"), Options()).proposals(one_kernel(graph), graph.layouts)
    numbers = [s.schedule.form_steps[-1].numbers[0][1] for s in found]
    assert numbers[0] in (7, 8) and numbers[-1] == 1 and {1, 2, 4, 7, 8} == set(numbers)


def test_singles_have_no_proposals() -> None:
    graph = capture(windowed(1, 1), given((1, 16, 8, 8), 3, dtype=torch.float32))
    assert Solver(preset("sm_90"), Options()).proposals(one_kernel(graph), graph.layouts) == ()


def proposals(shape: Shape, taps: int, along: bool = False) -> tuple[Solution, ...]:
    """What is proposed for a window in the middle of a border; `along`: channels of the weight lie innermost."""
    x, weight, bias = given(shape, taps)
    if along:
        weight = weight.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    graph = capture(windowed(1, taps // 2), [x, weight, bias])
    return tuple(Solver(GPU, Options()).proposals(one_kernel(graph), graph.layouts))


@pytest.mark.parametrize(("batch", "whole"), [(1, True), (64, False)])
def test_all_lines_are_written_out_where_threads_wait(batch: int, *, whole: bool) -> None:
    found = proposals((batch, 96, 56, 56), 7)
    assert found and any(map(lines_at_once, found)) is whole


def blocks_of(schedule: Schedule) -> ProductBlocks:
    return ProductBlocks({c.axis: c.tile for c in schedule.tiling.classes}, schedule.launch.warps, 1)


def work_of(s: Solution) -> tuple[WindowWork, float]:
    """What kernels of a form do, and how many elements of each result a thread has."""
    assert s.schedule.tiling.lane is not None
    work = WindowWork.of(s.form, s.schedule.tiling.lane, NO_HINTS)
    return work, work.held(blocks_of(s.schedule), GPU)


def test_no_thread_holds_more_than_its_registers() -> None:
    whole = [s for s in proposals((1, 768, 7, 7), 7) if lines_at_once(s)]
    assert whole
    for work, held in map(work_of, whole):
        assert work.elements(held) <= 400


@pytest.mark.parametrize(
    ("shape", "taps", "walks"), [((1, 96, 56, 56), 3, True), ((1, 96, 56, 56), 7, False)]
)
def test_threads_walk_where_a_row_is_little_work(shape: Shape, taps: int, *, walks: bool) -> None:
    """A compiler takes minutes for rows of a large window that are kept from step to step."""
    found = [s for s in proposals(shape, taps) if s.schedule.memory.carried]
    assert bool(found) is walks
    assert all(work_of(s)[0].products <= 8 * 9 for s in found)


def test_what_lies_across_memory_takes_a_line_for_each_element() -> None:
    """Weights whose taps lie innermost: a thread's channels are elements of as many lines."""
    lines: list[dict[str, float]] = []
    for along in (False, True):
        work = [(s.schedule, *work_of(s)) for s in proposals((1, 64, 14, 14), 7, along)]
        assert {w.steps for _, w, _ in work} == {1, 7}
        assert {s.memory.own_copies for s, *_ in work} == {along}
        alike = [(replace(s, memory=Memory()), w.lines(blocks_of(s), GPU)) for s, w, _ in work]
        lines.append({str(s): count for s, count in alike})
    across, dense = lines
    both = across.keys() & dense.keys()
    assert all(dense[name] <= across[name] for name in both)
    assert any(dense[name] < across[name] for name in both)


def program_of(**changes: bool) -> TileProgram:
    """The program of a 7 x 7 window, line by line, whose channels lie innermost in both operands; `changes` are fields
    of its schedule."""
    x, weight, bias = given((1, 32, 14, 14), 7)
    weight = weight.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    graph = capture(windowed(1, 3), [x, weight, bias])
    kernel, solver = one_kernel(graph), Solver(GPU, Options())
    schedule = next(s.schedule for s in solver.proposals(kernel, graph.layouts) if not lines_at_once(s))
    return solver.solve(kernel, graph.layouts, schedule.changed(**changes)).program


@pytest.mark.parametrize("own", [False, True])
def test_each_thread_loads_what_others_read_too(*, own: bool) -> None:
    made = legalise_for_gpu(program_of(own_copies=own), GPU)
    blocks, lane = {a for a, tile in block_axes(made).items() if tile > 1}, made.lane
    loads = [s for s in made.statements() if isinstance(s, Load)]
    shared = [s for s in loads if lane in s.var.axes and set(s.var.axes) < blocks]
    assert shared and len(shared) < len(loads)
    assert all({*s.var.axes, *s.copied} == blocks for s in shared) is own
    assert not any(s.copied for s in loads if not own or s not in shared)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_terms_are_added_one_after_the_other(*, one_by_one: bool) -> None:
    program = program_of(term_by_term=one_by_one)
    sums = [e for s in program.statements() if isinstance(s, Update) for root in s.values for e in walk(root)]
    nested = [e for e in sums if e.op == "add" and e.dtype.is_float and e.args[1].op == "add"]
    assert any(e.op == "add" for e in sums) and bool(nested) is not one_by_one
