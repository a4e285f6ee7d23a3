"""Kernels that only move data: in which order, in which tiles, and that whole lines are written."""

from __future__ import annotations

from tests.emit.harness import host_target
from tests.schedule.corpus import Case
from tests.schedule.test_classes import form_of
from tilewright.ir import dims
from tilewright.ir.expr import axis
from tilewright.schedule.form import Form
from tilewright.schedule.schedule import Role, Schedule
from tilewright.schedule.search import heuristic, lanes
from tilewright.target import preset

SWAP = Case("swap", lambda x: x.transpose(1, 2).contiguous(), ((3, 20, 5, 64),), ({0: "b", 1: "s"},))
TURN = Case("turn", lambda x: x.t().contiguous(), ((200, 300),), ({0: "n", 1: "m"},))


def grid_steps(form: Form, made: Schedule) -> list[int | None]:
    """How far apart in the input neighbours along each grid class lie, outermost class first."""
    ((_, offset),) = [x for i in form.outputs for x in i.accesses() if x[0] != i.param]
    steps = (
        dims.coefficient(offset, axis(c.axis))
        for c in made.classes
        if c.role is Role.GRID and c.axis != made.lane
    )
    return [None if s is None else dims.static(s) for s in steps]


def test_rows_are_walked_as_they_are_read() -> None:
    form = form_of(SWAP)
    steps = grid_steps(form, heuristic(form, host_target()))
    assert steps == [20 * 5 * 64, 5 * 64, 64]


def test_so_they_are_with_symbols() -> None:
    form = form_of(SWAP, dynamic=True)
    steps = grid_steps(form, heuristic(form, host_target()))
    assert steps == [None, 5 * 64, 64]


def test_turned_stores_fill_whole_lines() -> None:
    for dynamic in (False, True):
        form = form_of(TURN, dynamic)
        for name in ("x86-64-v4", "x86-64-v3"):
            made = heuristic(form, preset(name))
            (out,) = form.outputs
            assert made.lane is not None
            assert dims.coefficient(out.offset, axis(made.lane)) is not dims.ONE
            (across,) = [c for c in made.classes if c.axis != made.lane]
            assert dims.coefficient(out.offset, axis(across.axis)) is dims.ONE
            assert across.tile == across.chunk == 2 * lanes(preset(name))
            assert 4 * across.tile % 64 == 0
            assert made.classes[-1].axis == made.lane  # the next tile reads the same rows
