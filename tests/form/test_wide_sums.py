"""Long sums: how many additions follow each other at any level of states, and what that does to the error."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.corpus import Case
from tests.support.cpp_harness import host_target
from tests.support.lowered import form_of
from tests.support.normal_graph import Function
from tests.support.one_kernel import build_cases, run
from torch import Tensor

import tilewright
from tilewright import accuracy
from tilewright.analysis.size_hints import NO_HINTS
from tilewright.form.wide_sums import with_wide_sums
from tilewright.ir.program import Loop
from tilewright.ir.schedule import ClassPlan, Reductions, Role, Schedule, Tiling
from tilewright.ir.sizes import dims
from tilewright.lower.legality import block_lengths
from tilewright.lower.lower import lower
from tilewright.schedule.cpu.vectors import vector_schedule
from tilewright.tuning.thresholds import CPU_VECTORS, SUM_LEVELS


def columns(rows: int, width: int) -> Case:
    return Case("columns", lambda x: x.sum(0), ((rows, width),), ({0: "n"},))


@pytest.mark.parametrize("rows", [65, 128, 1000, 1025, 4096, 32768, 32769, 3_000_017])
def test_no_level_is_a_long_chain(rows: int) -> None:
    form = form_of(columns(rows, 3))
    (fold,) = form.folds.values()
    r = fold.reduce[0]
    schedule = Schedule(
        Tiling(
            tuple(
                ClassPlan(c.axis, c.role)
                for c in vector_schedule(form, host_target(), NO_HINTS).tiling.classes
            )
        )
    )
    lengths = block_lengths(r, [fold], schedule)
    edges = (rows, *lengths, 1)
    assert all(-(-a // b) <= schedule.reductions.max_chain for a, b in zip(edges, edges[1:], strict=False))


@pytest.mark.parametrize("shape", [(364, 8), (2, 14, 13, 8)])
def test_without_a_tree_a_chain_of_a_block_is_short(shape: tuple[int, ...]) -> None:
    """Rows of a block that walks along them have no lanes to add up: 364 squares in one chain erred six times as far as
    a tree. A chain of doubles may be long."""
    over = tuple(range(len(shape) - 1))
    case = Case("squares", lambda x: (x * x).sum(over), (shape,))
    cancelling = Case("sums", lambda x: x.sum(over), (shape,))
    for given, long in ((case, False), (cancelling, True)):
        form = form_of(given)
        (fold,) = form.folds.values()
        classes = tuple(
            ClassPlan(a, Role.STREAMED if a in fold.reduce else Role.GRID) for a in form.classes()
        )
        schedule = Schedule(Tiling(classes, peel=False), Reductions(max_chain=256))
        wide = with_wide_sums(form, schedule.changed(wide_sums=long))
        (fold,) = wide.folds.values()
        chain = [dims.static(a.extent) or 0 for a in fold.reduce]
        for n, a in enumerate(fold.reduce):
            if block_lengths(a, [fold], schedule):
                chain[n] = 1
        assert (max(*chain, prod(chain) // 2) > SUM_LEVELS.max_chain) is long


def test_short_and_exact_sums_run_in_one_go() -> None:
    for case in (
        columns(4, 3),
        Case("whole", lambda x: x.long().sum(0), ((5000, 3),)),
        Case("most", lambda x: x.amax(0), ((5000, 3),)),
        Case("running", lambda x: x.cumsum(0), ((5000, 3),)),
    ):
        form = form_of(case)
        (fold,) = form.folds.values()
        assert block_lengths(form.classes()[0], [fold], vector_schedule(form, host_target(), NO_HINTS)) == ()


@pytest.mark.parametrize("steps", range(5, 65))
def test_steps_of_a_lane_are_cut_evenly(steps: int) -> None:
    """Equal summands round alike at each step: a chain of 32 erred 16 times as far as eager's four chains of eight."""
    form = form_of(Case("all", lambda x: x.sum(), ((steps, 16),)))
    (fold,) = form.folds.values()
    (over,) = form.classes()
    lanes = Schedule(Tiling((ClassPlan(over, Role.STREAMED, tile=16),), lane=over))
    edges = (16 * steps, *block_lengths(over, [fold], lanes), 16)
    assert all(-(-a // b) <= SUM_LEVELS.max_lane_chain for a, b in zip(edges, edges[1:], strict=False))


def test_few_equal_rows_add_up_exactly() -> None:
    """As four chains of four do, which eager adds up side by side; one chain of 16 does not."""
    rows = torch.randn(1, 300).expand(16, 300).contiguous()
    made = tilewright.compile(lambda x: x.sum(0), (rows,))(rows)
    assert isinstance(made, torch.Tensor)
    assert torch.equal(made, 16 * rows[0])


def test_an_unknown_length_gets_three_levels() -> None:
    form = form_of(columns(100, 40), dynamic=True)
    program = lower(form, vector_schedule(form, host_target(), NO_HINTS))
    ends = {s.axis: s.stop for s in program.loops() if s.axis not in form.classes()}
    assert len(ends) == 2 and all(dims.static(e) is None for e in ends.values())


def test_columns_are_read_in_whole_stretches() -> None:
    form = form_of(columns(4096, 4096))
    made = vector_schedule(form, host_target(), NO_HINTS)
    assert made.tiling.lane is not None
    assert made.plan(made.tiling.lane).tile == CPU_VECTORS.max_task_row_elements
    assert [s.tile for s in lower(form, made).statements() if isinstance(s, Loop)].count(
        CPU_VECTORS.max_task_row_elements
    ) == 1
    few = form_of(columns(4096, 128))
    made = vector_schedule(few, replace(host_target(), cores=2), NO_HINTS)
    assert made.tiling.lane is not None
    assert made.plan(made.tiling.lane).tile < 128  # a task for each core


@pytest.mark.parametrize("dynamic", [False, True])
def test_error_of_tall_columns(tmp_path: Path, dynamic: bool) -> None:
    case = columns(4111, 300)
    unit, parts = build_cases(tmp_path, [(case, dynamic)])
    (x,) = case.inputs()
    (made,) = run(unit, 0, *parts[0], [x])
    exact = x.double().sum(0)
    assert accuracy.compare(torch.from_numpy(np.array(made)), x.sum(0), exact).passed
    chain = np.cumsum(x.numpy(), 0, dtype=np.float32)[-1]  # what one chain would give
    mean = lambda y: float(np.sqrt(np.mean((y - exact.numpy()) ** 2)))  # noqa: E731
    assert mean(made) < 0.3 * mean(chain)


@pytest.mark.parametrize("dynamic", [False, True])
def test_error_of_a_long_loop_inside_another(tmp_path: Path, dynamic: bool) -> None:
    """Levels of the outer loop alone would leave one chain in each of its steps."""
    names = ({2: "n", 3: "m"},)
    case = Case("nest", lambda x: x.sum((0, 2, 3)), ((2, 64, 127, 129),), names)
    unit, parts = build_cases(tmp_path, [(case, dynamic)])
    (x,) = case.inputs()
    (made,) = run(unit, 0, *parts[0], [x])
    exact = x.double().sum((0, 2, 3))
    mean = lambda y: float((y - exact).square().mean().sqrt())  # noqa: E731
    assert mean(torch.from_numpy(np.array(made))) < 1.5 * mean(x.sum((0, 2, 3)))


def test_a_variance_from_two_sums_errs_no_more_than_eagers() -> None:
    """Rows of two kinds, as random bits look up: sums of nearly equal numbers, whose roundings do not cancel, and a
    difference of them, which keeps the error."""

    def program(x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(1, keepdim=True)
        variance = ((x * x).mean(1, keepdim=True) - mean * mean).clamp_min(0.0)
        return (x - mean) * torch.rsqrt(variance + 1e-6)

    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        kinds = 1 + 0.02 * torch.randn(2, 256, generator=draw)
        x = kinds[torch.randint(0, 2, (2, 512), generator=draw)]
        ours = tilewright.compile(program, (x,))(x)
        assert isinstance(ours, torch.Tensor)
        exact = accuracy.in_float64(program)(x)
        verdict = accuracy.compare(ours, program(x), exact, k=1.3)
        assert verdict.passed, str(verdict)


def test_a_loop_inside_counts_as_the_chain_that_it_is() -> None:
    """Two times 4 additions: the loop inside is short enough to run in one go, both together are not."""
    form = form_of(Case("parts", lambda x: x.sum((0, 2)), ((2, 5, 4),)))
    (fold,) = form.folds.values()
    classes = [
        c for c in vector_schedule(form, host_target(), NO_HINTS).tiling.classes if c.axis not in fold.reduce
    ]
    outer, inner = sorted(fold.reduce, key=lambda a: dims.static(a.extent) or 0)
    schedule = Schedule(Tiling((*classes, ClassPlan(outer, Role.STREAMED), ClassPlan(inner, Role.STREAMED))))
    assert block_lengths(inner, [fold], schedule, nested=True) == ()
    assert block_lengths(outer, [fold], schedule, nested=True) == (1,)


def beside_a_running_sum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    running = y.cumsum(-1)
    return x.abs().mean(), running / (running.abs() + 1)


def test_sums_in_loops_that_cannot_be_cut_are_doubles() -> None:
    """A mean of many equal terms in one chain of singles would be off in its fifth digit."""
    x, y = torch.full((2, 4096), 0.1), torch.ones(1, 4096)
    made = tilewright.compile(Function(beside_a_running_sum), (x, y))(x, y)
    assert abs(float(made[0]) - float(x[0, 0])) <= 2**-25
