"""Trimmed loops over blocks: the same meaning as eager for every mask and size, and what is left out or unmasked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.attention.kernels import APART, LATE, MASKS, Apart, Attention, attention
from tests.support.lowered import execute
from tests.support.one_kernel import capture, one_kernel

from tilewright.interp import FLOATS
from tilewright.ir.expr import axes_of, walk
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Scheduled
from tilewright.ir.program import Collapse, Declare, Dot, Loop, TileProgram, expressions
from tilewright.ir.schedule import Schedule
from tilewright.ir.sizes import dims
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.schedule.table import FastestBlock, Tuning
from tilewright.target import PRESETS

SIZES = [(330, 330), (64, 64), (17, 17), (400, 290), (290, 400)]
"""Queries and keys."""
SQUARE = Tuning(tuple(FastestBlock(kind, 2, 64, 64, 64, 4, 3) for kind in ("products", "scores")))
"""Blocks of 64 queries and 64 keys."""


def check(case: Attention, dynamic: bool, scales: tuple[int, ...] = (1,), **options: object) -> Scheduled:
    """Solve a case and compare a run of it with eager."""
    graph = capture(case, dynamic)
    solver = Solver(PRESETS["sm_90"], Options(**options))  # pyright: ignore[reportArgumentType]
    scheduled = solver.solve(one_kernel(graph), graph.layouts)
    for scale in scales:
        inputs = case.inputs(scale)
        loaded = [
            FLOATS.load(x, v.dtype) for v, x in zip(graph.inputs, inputs, strict=True) if isinstance(v, Value)
        ]
        made = execute(graph, scheduled, loaded, FLOATS)
        wanted = case.run(*inputs)
        wanted = (wanted,) if isinstance(wanted, torch.Tensor) else wanted
        for v, w in zip([v for v in graph.outputs if isinstance(v, Value)], wanted, strict=True):
            np.testing.assert_allclose(np.asarray(made[v]), w.numpy(), rtol=3e-5, atol=3e-5)
    return scheduled


@pytest.mark.parametrize("kind", ["rows", "squares"])
@pytest.mark.parametrize("mask", list(MASKS))
def test_same_meaning(kind: str, mask: str) -> None:
    """Queries that see no key make NaN of their row, and of every column, as in eager."""
    for s, t in SIZES:
        check(attention(kind, mask, s, t, 16, heads=(1, 1), dtype=torch.float32), False)


@pytest.mark.parametrize("kind", ["rows", "columns"])
@pytest.mark.parametrize("mask", list(MASKS))
def test_same_meaning_for_sizes_not_known(kind: str, mask: str) -> None:
    case = attention(kind, mask, 150, 190, 16, heads=(1, 1), dtype=torch.float32, dynamic=True)
    check(case, True, (1, 2))


def loops(kind: str, mask: str | Apart, s: int = 1024, t: int = 1024) -> list[tuple[int, int, int]]:
    """(first key, steps without a mask, all steps) of every block of queries, or the same by columns."""
    case = attention(kind, mask, s, t, 64, heads=(1, 1))
    graph = capture(case, False)
    scheduled = Solver(PRESETS["sm_90"], Options(), SQUARE).solve(one_kernel(graph), graph.layouts)
    program = scheduled.program
    inner = [x for x in program.loops() if any(isinstance(y, Dot) for y in x.body)]
    found: list[tuple[int, int, int]] = []
    for point in range(dims.evaluate(program.grid[-1].extent, {})):
        known = dict.fromkeys((g.axis.name for g in program.grid), 0) | {program.grid[-1].axis.name: point}
        ends = [
            (dims.evaluate(x.start, known), dims.evaluate(x.stop, known), x.tile, masked(x)) for x in inner
        ]
        runs = [(a, -(-(b - a) // t), m) for a, b, t, m in ends if b > a]
        found.append(
            (min(a for a, _, _ in runs), sum(n for _, n, m in runs if not m), sum(n for _, n, _ in runs))
        )
    assert isinstance(scheduled.schedule, Schedule)
    return found[::-1] if any(c.descending for c in scheduled.schedule.tiling.classes) else found


def masked(loop: Loop) -> bool:
    """Whether a loop tests a condition per element."""
    roots = [e for s in TileProgram((), (), loop.body).statements() for e in expressions(s)]
    return any(x.op in ("lt", "le", "gt", "ge") and len(axes_of(x)) == 2 for r in roots for x in walk(r))


def test_a_causal_row_masks_its_last_tile_alone() -> None:
    assert loops("rows", "causal") == [(0, k, k + 1) for k in range(16)]


def test_longest_rows_come_first() -> None:
    for kind, expected in (("rows", True), ("columns", False)):
        graph = capture(attention(kind, "causal", 1024, 1024, 64), False)
        schedule = Solver(PRESETS["sm_90"], Options()).solve(one_kernel(graph), graph.layouts).schedule
        assert isinstance(schedule, Schedule)
        assert any(c.descending for c in schedule.tiling.classes) == expected


def test_columns_keep_a_state_per_element_of_the_block() -> None:
    """The sum of scores is merged once, behind the loops over the queries."""
    graph = capture(attention("squares", "causal", 1024, 1024, 64), False)
    program = Solver(PRESETS["sm_90"], Options()).solve(one_kernel(graph), graph.layouts).program
    (body,) = (x.body for x in program.loops() if any(isinstance(y, Collapse) for y in x.body))
    loops = [k for k, x in enumerate(body) if isinstance(x, Loop)]
    assert len(loops) == 2 and all(k > max(loops) for k, x in enumerate(body) if isinstance(x, Collapse))
    states = [v for x in body if isinstance(x, Declare) for v in x.vars]
    assert [len(v.axes) for v in states] == [2, 2]


def test_a_causal_column_masks_its_first_tile_alone() -> None:
    assert loops("columns", "causal") == [(64 * k, 15 - k, 16 - k) for k in range(16)]


def test_an_aligned_mask_is_trimmed_where_it_ends() -> None:
    assert loops("rows", "aligned", 512, 1024) == [(0, k + 8, k + 9) for k in range(8)]
    assert loops("columns", "aligned", 512, 1024)[8] == (0, 7, 8)


def test_a_window_is_trimmed_on_both_sides() -> None:
    assert [n for _, _, n in loops("rows", "window")] == [1, 2] + [3] * 14
    assert [n for _, _, n in loops("columns", "window")] == [3] * 14 + [2, 1]


@pytest.mark.parametrize("kind", ["rows", "squares"])
@pytest.mark.parametrize("mask", list(APART))
def test_masks_put_on_one_after_the_other_are_one(kind: str, mask: str) -> None:
    """Tiles are left out on both sides, and those that no mask cuts have none, as where a program writes `and`."""
    assert loops(kind, APART[mask]) == loops(kind, "window")
    for s, t in ((330, 330), (17, 17)):
        check(attention(kind, APART[mask], s, t, 16, heads=(1, 1), dtype=torch.float32), False)


@pytest.mark.parametrize("kind", ["rows", "columns", "squares"])
def test_rows_that_see_nothing_by_several_masks(kind: str) -> None:
    """They make NaN of their row, and of every column, as in eager."""
    for s, t in ((330, 330), (30, 300)):
        check(attention(kind, LATE, s, t, 16, heads=(1, 1), dtype=torch.float32), False)


def test_a_prefix_is_whole_beyond_the_diagonal() -> None:
    assert loops("rows", "prefix") == [(0, k, k + 1) for k in range(16)]


def test_between_sinks_and_a_window_nothing_runs() -> None:
    assert [n for _, _, n in loops("rows", "sinks")] == [1, 2, 3] + [4] * 13
    assert [n for _, _, n in loops("columns", "sinks")] == [16, *[3] * 13, 2, 1]


def test_exact_trimming_leaves_nothing_out() -> None:
    case = attention("rows", "causal", 512, 512, 64, heads=(1, 1))
    graph = capture(case, False)
    solver = Solver(PRESETS["sm_90"], Options(trim="exact"), SQUARE)
    program = solver.solve(one_kernel(graph), graph.layouts).program
    (loop,) = (x for x in program.loops() if any(isinstance(y, Dot) for y in x.body))
    assert (dims.static(loop.start), dims.static(loop.stop)) == (0, 512)
