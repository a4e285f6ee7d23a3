"""Schedules in blocks: every program of the corpus for a machine whose threads share a grid point, run by the
interpreter against eager; and machines that do not exist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.corpus import CASES, Case
from tests.support.lowered import data, execute
from tests.support.normal_graph import Function
from tests.support.one_kernel import capture, one_kernel

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.capture.fx import from_fx
from tilewright.capture.trace import trace
from tilewright.interp import FLOATS, run_program
from tilewright.ir.expr import Axis, Symbol
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Kernel, Scheduled
from tilewright.ir.program import Dot, Loop, Prefix
from tilewright.ir.schedule import Schedule
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.host import number
from tilewright.options import Options
from tilewright.rewrite.normal.normalise import normalise
from tilewright.rewrite.split.reduction import list_splits
from tilewright.runtime.cuda.kernels import usual
from tilewright.schedule.gpu.blocks import fit_tile
from tilewright.schedule.solver import Solver
from tilewright.schedule.table import FastestBlock, Tuning
from tilewright.target import PRESETS, Target

ALL = [(case, dynamic) for case in CASES for dynamic in ((False, True) if case.dynamic else (False,))]
ODD = replace(PRESETS["toy3"], name="odd", lanes=4, threads=64, latency=1e-6, alone=1.5)
"""Three levels, odd capacities, four threads in step: nothing of it is a real machine's."""


def solved(graph: Graph, target: Target) -> Scheduled:
    return Solver(target, Options()).solve(one_kernel(graph), graph.layouts)


@pytest.mark.parametrize(("case", "dynamic"), ALL, ids=lambda x: getattr(x, "name", str(x)))
def test_same_meaning_in_blocks(case: Case, dynamic: bool) -> None:
    graph = capture(case, dynamic)
    for target in (PRESETS["sm_90"],) if dynamic else (PRESETS["sm_90"], ODD):
        check_meaning(case, graph, solved(graph, target))


def check_meaning(case: Case, graph: Graph, scheduled: Scheduled) -> None:
    program = scheduled.program
    tiles = [s.tile for s in program.loops()]
    assert all(t & (t - 1) == 0 for t in tiles) and not program.scratch
    made = execute(graph, scheduled, data(case, graph, FLOATS), FLOATS)
    wanted = case.run(*case.inputs())
    for v, w in zip(
        [v for v in graph.outputs if isinstance(v, Value)],
        [wanted] if isinstance(wanted, torch.Tensor) else wanted,
        strict=True,
    ):
        np.testing.assert_allclose(np.asarray(made[v]), w.numpy(), rtol=3e-5, atol=3e-5)


def plain(shape: tuple[int, ...], run: object) -> tuple[Schedule, list[Loop]]:
    case = Case("made", run, (shape,))  # pyright: ignore[reportArgumentType]
    scheduled = solved(capture(case, False), PRESETS["sm_90"])
    assert isinstance(scheduled.schedule, Schedule)
    return scheduled.schedule, scheduled.program.loops()


def single(loop: Loop) -> bool:
    return dims.static(dims.sub(loop.stop, loop.start)) == loop.tile


def test_a_row_that_fits_stays_on_chip() -> None:
    _, loops = plain((600, 4096), lambda x: torch.softmax(x, -1))
    assert [s.tile for s in loops if s.tile > 1] == [4096] and all(map(single, loops))


def test_a_long_row_is_read_twice() -> None:
    schedule, loops = plain((600, 131072), lambda x: torch.softmax(x, -1))
    assert schedule.reductions.online and len([s for s in loops if not single(s)]) == 2


def test_running_fold_advances_in_blocks() -> None:
    case = Case("cumsum", lambda x: torch.cumsum(x, -1), ((3, 5000),))
    scheduled = solved(capture(case, False), PRESETS["sm_90"])
    assert any(isinstance(s, Prefix) for s in scheduled.program.statements())


@pytest.mark.parametrize(
    ("extent", "most", "tile"), [(768, 1024, 256), (1000, 1024, 1024), (49, 64, 64), (1, 64, 1)]
)
def test_fitting(extent: int, most: int, tile: int) -> None:
    assert fit_tile(Axis("a", dims.integer(extent)), most, NO_HINTS) == tile


def dots(name: str, dynamic: bool = False) -> int:
    graph = capture(next(c for c in CASES if c.name == name), dynamic)
    return sum(isinstance(s, Dot) for s in solved(graph, PRESETS["sm_90"]).program.statements())


@pytest.mark.parametrize(("name", "count"), [("matmul_bias", 1), ("attention", 2), ("gram", 1), ("gemv", 0)])
def test_contractions_go_to_matrix_units(name: str, count: int) -> None:
    assert dots(name) == count


def test_attention_of_unknown_length_computes_scores_once() -> None:
    """In one pass, with a loop of its own for the last keys."""
    assert dots("attention", True) == 4


@pytest.mark.parametrize("rows", [3, 0])
def test_argmax_in_parts_finds_the_first_place(rows: int) -> None:
    """Parts of a split number places over the whole; equal values and NaN go to the first."""
    case = Case("argmax", lambda x: x.argmax(-1), ((2, 4096),))
    graph = capture(case, False)
    (op,) = (o for o in graph.ops if o.expr is not None and o.expr.reduction is not None)
    x = torch.randn(2, 4096)
    x[0, [3000, 3500]] = 9.0
    x[1, [2900 + rows, 4000]] = float("nan")
    solver = Solver(PRESETS["sm_90"], Options())
    first, second = list_splits(op, 1000, solver.target, solver.scheduler.splits, NO_HINTS)[0]
    parts = solver.solve(Kernel((first,), first.outputs), graph.layouts)
    held = run_program(parts.program, [x.numpy(), None, None], {}, FLOATS)
    whole = solver.solve(Kernel((second,), second.outputs), graph.layouts)
    *_, made = run_program(whole.program, [held[1], held[2], *([None] * len(second.outputs))], {}, FLOATS)
    assert np.asarray(made).reshape(-1).tolist() == x.argmax(-1).tolist()


@pytest.mark.parametrize(("other", "operand"), [(torch.float16, "f16"), (torch.float32, "f32")])
def test_a_wide_operand_is_not_rounded(other: torch.dtype, operand: str) -> None:
    """A product of fp32 with halves that the program widened stays one of fp32."""

    class Product(Case):
        def inputs(self, scale: int = 1, seed: int = 0) -> list[torch.Tensor]:
            x, w = super().inputs(scale, seed)
            return [x.to(other), w.half()]

    case = Product(
        "product", lambda x, w: (x.float()[:, None] * w.float()[None]).sum(-1), ((64, 64), (64, 64))
    )
    program = solved(capture(case, False), PRESETS["sm_90"]).program
    (dot,) = (s for s in program.statements() if isinstance(s, Dot))
    assert {dot.a.dtype.name, dot.b.dtype.name} == {operand}


def test_long_rows_of_halves_are_read_twice() -> None:
    """Once for maximum and sum together (whole steps, and the rest), once for the result; no fold is added that rows in
    registers would carry."""

    class Halves(Case):
        def inputs(self, scale: int = 1, seed: int = 0) -> list[torch.Tensor]:
            return [x.half() for x in super().inputs(scale, seed)]

    long = Halves("softmax", lambda x: torch.softmax(x, -1), ((64, 40000),))
    program = solved(capture(long, False), PRESETS["sm_90"]).program
    loops = [s for s in program.statements() if isinstance(s, Loop)]
    assert sum(dims.sub(s.stop, s.start) is not dims.integer(s.tile) and s.tile > 8 for s in loops) == 3
    rows = Case("layer_norm", lambda x: torch.nn.functional.layer_norm(x, (1024,)), ((512, 1024),))
    made = solved(capture(rows, False), PRESETS["sm_90"])
    assert "grid" in str(made.schedule).split()[0] and "streamed" not in str(made.schedule)


def test_rows_that_begin_anywhere_have_blocks_of_their_own() -> None:
    entries = (
        FastestBlock("row_totals", 4, 1024, 1024, 0, 1),
        FastestBlock("row_totals", 4, 1024, 4096, 0, 8, odd=True),
    )

    def made(columns: int, dynamic: bool) -> Scheduled:
        case = Case("squares", lambda x: (x * x).sum(-1), ((512, columns),), ({1: "n"},))
        graph = capture(case, dynamic)
        return Solver(PRESETS["sm_90"], Options(), Tuning(entries)).solve(one_kernel(graph), graph.layouts)

    warps = {n: made(n, False).program.warps for n in (1000, 1001)}
    assert warps == {1000: 1, 1001: 8}
    first, second = (b.program.warps for b in made(1000, True).buckets[:2])
    assert (first, second) == (8, 1)
    first_bucket = made(1000, True).buckets[0]
    when, wide = first_bucket.condition, first_bucket.program
    assert len(usual(wide)) == 2 * len(usual(wide, when)) and not any(v.aligned for v in usual(wide, when))
    (name,) = {s.value.name for s in dims.symbols_of(when) if isinstance(s.value, Symbol)}
    assert [number(when, {name: n}) for n in (992, 1000, 1008, 1001)] == [False, True, False, True]


@pytest.mark.parametrize(
    ("function", "dtype", "accurate"),
    [
        (lambda x: torch.softmax(x, -1), torch.float32, True),
        (lambda x: torch.softmax(x, -1), torch.float16, False),
        (lambda x: torch.softmax(x.float(), -1), torch.float16, True),
        (lambda x: (x > 0).float().exp(), torch.float16, True),
        (lambda x: torch.softmax(x, -1).half(), torch.float32, False),
    ],
)
def test_exponentials_are_as_exact_as_results_show(
    function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, accurate: bool
) -> None:
    """What is read does not say how exactly results are rounded: weights made of halves may be singles."""
    graph = normalise(from_fx(trace(Function(function), [torch.randn(8, 96).to(dtype)], [()]).gm))
    assert solved(graph, PRESETS["sm_90"]).schedule.math.accurate == accurate


def test_threads_lie_along_a_wide_class_and_not_along_pairs() -> None:
    """Images woven from four channels each: their channels lie side by side where they are stored, two where read."""

    def weave(x: torch.Tensor) -> torch.Tensor:
        return torch.pixel_shuffle(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1) * 2

    schedule, _ = plain((4, 64, 64, 256), weave)
    assert schedule.tiling.lane is not None
    last = schedule.tiling.classes[-1]
    assert (last.axis, dims.static(last.axis.extent)) == (schedule.tiling.lane, 64)
