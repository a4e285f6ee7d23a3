"""Folds of many rows into one: how long the pieces of rows in a task are, and how many rows go side by side."""

from __future__ import annotations

from pathlib import Path

from tests.support.corpus import columns
from tests.support.cpp_harness import host_target
from tests.support.lowered import form_of
from tests.support.one_kernel import build_cases, check

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.ir.schedule import Schedule
from tilewright.schedule.cpu.vectors import vector_schedule
from tilewright.target import Target
from tilewright.tuning.thresholds import CPU_VECTORS


def decided(rows: int, width: int, target: Target) -> tuple[int, int]:
    """Columns of one task, rows of one step."""
    made: Schedule = vector_schedule(form_of(columns(rows, width)), target, NO_HINTS)
    (other,) = [c for c in made.tiling.classes if c.axis != made.tiling.lane]
    assert made.tiling.lane is not None
    return made.plan(made.tiling.lane).tile, other.tile


def test_pieces_are_long_and_rows_go_side_by_side() -> None:
    target = host_target().resized(cores=2)
    assert decided(4096, 4096, target) == (
        CPU_VECTORS.max_task_row_elements,
        CPU_VECTORS.max_states // CPU_VECTORS.max_task_row_elements,
    )
    assert decided(4096, 2048, target) == (
        CPU_VECTORS.max_task_row_elements // 2,
        CPU_VECTORS.max_rows_side_by_side,
    )


def test_no_core_is_idle_for_long_pieces() -> None:
    target = host_target().resized(cores=2)
    width, _ = decided(4096, 3 * 2048, target)  # three long pieces would keep one of two cores waiting
    assert width == CPU_VECTORS.max_task_row_elements // 2


def test_short_pieces_go_one_by_one() -> None:
    assert decided(4096, 256, host_target().resized(cores=2))[1] == 1
    assert decided(32, 4096, host_target().resized(cores=2))[1] == 1


def test_results(tmp_path: Path) -> None:
    cases = [columns(rows, width) for rows, width in ((64, 4096), (67, 4096), (1030, 2048))]
    unit, parts = build_cases(tmp_path, [(case, False) for case in cases])
    for number, (case, (graph, scheduled)) in enumerate(zip(cases, parts, strict=True)):
        assert isinstance(scheduled.schedule, Schedule)
        assert any(c.tile in (2, 4) for c in scheduled.schedule.tiling.classes), (
            "rows are to go side by side here"
        )
        check(unit, number, graph, scheduled, case, 1)
