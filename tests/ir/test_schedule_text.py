"""Schedules say every decision, and are read back from what they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest
from tests.support.corpus import CASES, Case
from tests.support.one_kernel import capture, one_kernel

from tilewright.ir.dtype import bool_
from tilewright.ir.expr import Axis, Symbol, call, const, integer, symbol, walk
from tilewright.ir.schedule import (
    ClassPlan,
    LaunchConfig,
    Math,
    Memory,
    Reductions,
    Role,
    Schedule,
    Sized,
    Tiling,
)
from tilewright.ir.text.schedule import parse
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.target import PRESETS

ROWS, COLUMNS = Axis("c1", symbol("s0")), Axis("c2", integer(64))
LARGE = call("and", call("ge", symbol("s0"), integer(1 << 20)), const(True, bool_))
EVERY = Schedule(
    Tiling(
        (ClassPlan(ROWS, Role.GRID, 4, 64, True), ClassPlan(COLUMNS, Role.STREAMED, 16)),
        COLUMNS,
        COLUMNS,
        True,
        False,
        True,
    ),
    Reductions(True, False, (3,), (COLUMNS,), 0, True, True, False, True, True, 32),
    Memory(
        4,
        (Sized(1, LARGE),),
        (Sized(0, const(True, bool_)), Sized(2, LARGE)),
        (0, 1),
        64,
        True,
        True,
        True,
        True,
        2,
    ),
    Math(True, ("exp2", "log2"), True, True, True, True),
    LaunchConfig(4, 3, 1 << 10, 8, True),
)
"""No field has its default."""


def again(s: Schedule) -> Schedule:
    """`s` from its text, its axes and the symbols of its conditions."""
    sized = (*s.memory.past_caches, *s.memory.next_point)
    leaves = {x.value for y in sized for x in walk(y.when)}
    return parse(str(s), [c.axis for c in s.tiling.classes], [x for x in leaves if isinstance(x, Symbol)])


def test_every_field_is_said() -> None:
    for record in (EVERY.tiling, EVERY.reductions, EVERY.memory, EVERY.math, EVERY.launch):
        for f in fields(record):
            assert getattr(record, f.name) != f.default, f"{f.name} is not tried"
            assert f.name == "classes" or f.name in str(EVERY)
    assert again(EVERY) == EVERY
    assert str(EVERY).startswith("c1:grid/64x4- c2:streamedx16 lane=c2 beside=c2 last_outermost peel=False")


def test_a_default_is_silent() -> None:
    plain = Schedule(Tiling((ClassPlan(ROWS, Role.GRID),)))
    assert str(plain) == "c1:grid" and again(plain) == plain


@pytest.mark.parametrize("machine", ["x86-64-v4", "sm_90", "gfx942"])
def test_schedules_of_the_corpus(machine: str) -> None:
    solver = Solver(PRESETS[machine], Options())
    for schedule in _schedules(solver):
        assert again(schedule) == schedule


def _schedules(solver: Solver) -> Iterator[Schedule]:
    for case in CASES:
        for dynamic in (False, True):
            yield _schedule(solver, case, dynamic)


def _schedule(solver: Solver, case: Case, dynamic: bool) -> Schedule:
    graph = capture(case, dynamic)
    found = solver.solve(one_kernel(graph), graph.layouts).schedule
    assert isinstance(found, Schedule)
    return found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("c1:grid warp=4", "no field 'warp'"),
        ("c1:grid lane=c9", "'c9' is none of c1, c2"),
        ("c9:grid", "'c9' is none of"),
        ("c1:grid online=maybe", "'maybe' is none of True, False"),
        ("c1:grid warps=four", "'four' is no number"),
        ("c1:grid warps=-4", "'-4' is no number"),
        ("c1:grid warps=1_0", "'1_0' is no number"),
        ("c1:grid online=", "without a value"),
        ("c1:grid next_step=[0,,1]", "an empty item"),
        ("c1:grid fast=[exp2,]", "an empty item"),
        ("c1:gridx0", "no plan of another class"),
        ("c1:grid/5x4", "no plan of another class"),
        ("c1:grid c1:streamedx4", "no plan of another class"),
        ("c1:grid past_caches=[0 if s0]", "is a number, and no condition"),
        ("c1:grid past_caches=[0 if nonsense(s0)]", "no operation"),
        ("c1:grid past_caches=[0 if not(s0, s0)]", "no operation"),
        ("c1:grid past_caches=[0 if i32((s0 >= 4))]", "no operation"),
        ("c1:grid warps=4 warps=8", "warps is given twice"),
        ("c1:grid next_step=0", "'0' is no list"),
        ("c1:grid past_caches=[0 if (s0 >= ]", "do not match"),
        ("c1:grid past_caches=[0 if s0.x]", "no part of a condition"),
        ("c1:grid past_caches=[0 if s9]", "'s9' is none of s0"),
        ("c1:grid past_caches=[0 if __import__('os')]", "no part of a condition"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(text, (ROWS, COLUMNS), [Symbol("s0")])


def test_no_record_has_another_ones_field() -> None:
    names = [f.name for r in (Tiling, Reductions, Memory, Math, LaunchConfig) for f in fields(r)]
    assert len(set(names)) == len(names)
    with pytest.raises(TypeError, match="no field lanes"):
        EVERY.changed(lanes=True)
    assert EVERY.changed(warps=8, online=False).launch.warps == 8
