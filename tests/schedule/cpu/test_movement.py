"""Kernels that only move data: in which order, in which tiles, and that whole lines are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.corpus import Case
from tests.support.cpp_harness import host_target, print_unit
from tests.support.lowered import form_of
from tests.support.one_kernel import build_cases, check

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.ir.expr import axis
from tilewright.ir.form import Form
from tilewright.ir.schedule import Role, Schedule
from tilewright.ir.sizes import dims
from tilewright.lower.lower import lower
from tilewright.schedule.cpu.vectors import vector_lanes, vector_schedule
from tilewright.target import preset

SWAP = Case("swap", lambda x: x.transpose(1, 2).contiguous(), ((3, 20, 5, 64),), ({0: "b", 1: "s"},))
SIDES = {0: "n", 1: "m"}
TURN = Case("turn", lambda x: x.t().contiguous(), ((200, 300),), (SIDES,))
BOTH = Case("both", lambda x, y: (x * y + 1).t().contiguous(), ((200, 304), (200, 304)), (SIDES, SIDES))
BIAS = Case("bias", lambda x, b: (x + b).t().contiguous(), ((128, 256), (256,)), (SIDES, {0: "m"}))
EVEN = Case("even", TURN.run, ((128, 256),), (SIDES,))
ODD = Case("odd", TURN.run, ((67, 83),), (SIDES,))
COUNTS = Case("counts", lambda x: x.to(torch.int32).t().contiguous(), ((64, 100),), (SIDES,))
WIDE = preset("x86-64-v4")


def grid_steps(form: Form, made: Schedule) -> list[int | None]:
    """How far apart in the input neighbours along each grid class lie, outermost class first."""
    ((_, offset),) = [x for i in form.outputs for x in i.accesses() if x[0] != i.param]
    steps = (
        dims.coefficient(offset, axis(c.axis))
        for c in made.tiling.classes
        if c.role is Role.GRID and c.axis != made.tiling.lane
    )
    return [None if s is None else dims.static(s) for s in steps]


def test_rows_are_walked_as_they_are_read() -> None:
    form = form_of(SWAP)
    steps = grid_steps(form, vector_schedule(form, host_target(), NO_HINTS))
    assert steps == [20 * 5 * 64, 5 * 64, 64]


def test_so_they_are_with_symbols() -> None:
    form = form_of(SWAP, dynamic=True)
    steps = grid_steps(form, vector_schedule(form, host_target(), NO_HINTS))
    assert steps == [None, 5 * 64, 64]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["x86-64-v4", "x86-64-v3"])
def test_whole_lines_are_written(name: str, dynamic: bool) -> None:
    form = form_of(TURN, dynamic)
    made = vector_schedule(form, preset(name), NO_HINTS)
    (out,) = form.outputs
    line, other = made.tiling.classes
    assert dims.coefficient(out.offset, axis(line.axis)) is dims.ONE
    assert line.tile == line.chunk == 2 * vector_lanes(preset(name))
    assert 4 * line.tile % 64 == 0
    assert other.tile == vector_lanes(preset(name))  # the innermost: the next tile reads the same rows


@pytest.mark.parametrize("case", [EVEN, BIAS], ids=lambda c: c.name)
def test_loads_are_turned_where_that_is_no_more_work(case: Case) -> None:
    """Half of the shuffles of a turned store."""
    form = form_of(case)
    made = vector_schedule(form, WIDE, NO_HINTS)
    (out,) = form.outputs
    assert made.tiling.lane is not None and dims.coefficient(out.offset, axis(made.tiling.lane)) is dims.ONE
    text = print_unit([lower(form, made)], (), WIDE).text
    assert "load_transposed(b0 + " in text and "transpose(rows" not in text


def test_two_turned_loads_are_no_less_work_than_one_turned_store() -> None:
    form = form_of(BOTH)
    lane = vector_schedule(form, WIDE, NO_HINTS).tiling.lane
    assert lane is not None
    assert all(
        dims.coefficient(x, axis(lane)) is dims.ONE
        for o in form.outputs
        for p, x in o.accesses()
        if p != o.param
    )


@pytest.mark.parametrize("case", [TURN, EVEN, ODD, BOTH, BIAS, COUNTS], ids=lambda c: c.name)
def test_turned_results(case: Case, tmp_path: Path) -> None:
    unit, parts = build_cases(tmp_path, [(case, False), (case, True)])
    for number, (graph, scheduled) in enumerate(parts):
        for scale in (1, 3) if number else (1,):
            check(unit, number, graph, scheduled, case, scale)
