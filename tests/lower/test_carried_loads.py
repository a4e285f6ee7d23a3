"""Loops of single steps that keep what their next step reads again: they mean the same, load less, and are left alone
where a store, data or a loop without steps is in the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from tests.support.tile_programs import Vars
from tests.support.triton.harness import Job, interpret, same_as_interpreter

from tilewright.interp.program import run_program
from tilewright.ir.dtype import f32, i64
from tilewright.ir.expr import Axis, Expr, axis, both, call, const, integer, symbol, where
from tilewright.ir.program import Buffer, Compute, Load, Loop, Stmt, Store, TileProgram, value_of
from tilewright.ir.sizes import dims
from tilewright.lower.access.carried_loads import with_carried_loads
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.target import preset

ROWS, WIDTH = 9, 8
P, C = Axis("p", integer(ROWS)), Axis("c", integer(WIDTH))
X, Y = (Buffer(name, f32, integer(ROWS * WIDTH)) for name in "xy")
ZERO = const(0, f32)


def place(down: int) -> Expr:
    """Where the row so many below is."""
    return dims.add(dims.mul(dims.add(axis(P), integer(down)), integer(WIDTH)), axis(C))


def inside(down: int) -> Expr:
    row = dims.add(axis(P), integer(down))
    found = both(call("ge", row, integer(0)), call("lt", row, integer(ROWS)))
    assert found is not None
    return found


def sums(
    reads: tuple[int, ...] = (-1, 0, 1), start: Expr | None = None, stop: Expr | None = None,
    stored: Buffer = Y, tile: int = 1,
) -> TileProgram:  # fmt: skip
    """y[p] = sum of the rows around p, each times another number; the row itself is chosen behind its load."""
    var = Vars()
    body: list[Stmt] = []
    total: Expr | None = None
    for n, down in enumerate(reads):
        v = var(f32, C)
        if down == 0:
            body.append(Load(v, X, place(0)))
            chosen = var(f32, C)
            body.append(Compute(chosen, where(inside(0), value_of(v), ZERO)))
            v = chosen
        else:
            body.append(Load(v, X, place(down), inside(down), ZERO))
        term = call("mul", value_of(v), const(n + 1, f32))
        total = term if total is None else call("add", total, term)
    assert total is not None
    body.append(Store(stored, place(0), total, (C,)))
    loop = Loop(P, start or integer(0), stop or integer(ROWS), tile, tuple(body))
    return TileProgram((X, Y), (), (Loop(C, integer(0), integer(WIDTH), WIDTH, (loop,)),), lane=C)


def loads_of_a_step(program: TileProgram) -> int:
    (loop,) = (s for s in program.loops() if s.axis == P)
    return sum(isinstance(s, Load) for s in loop.body)


@pytest.mark.parametrize(
    ("reads", "left"), [((-1, 0, 1), 1), ((-2, -1, 0, 1, 2), 1), ((-1, 1, 2), 2), ((0, 1), 1)]
)
@pytest.mark.parametrize(("start", "stop"), [(0, ROWS), (3, 7), (2, 4)])
def test_a_step_loads_what_none_before_has(reads: tuple[int, ...], left: int, start: int, stop: int) -> None:
    before = sums(reads, integer(start), integer(stop))
    after = with_carried_loads(before)
    after.verify()
    assert loads_of_a_step(before) == len(reads) and loads_of_a_step(after) == left
    x = np.random.default_rng(0).standard_normal(ROWS * WIDTH).astype(np.float32)
    given = [x, np.zeros_like(x)]
    for one, other in zip(run_program(before, given), run_program(after, given), strict=True):
        np.testing.assert_array_equal(one, other)


def test_steps_are_written_out_until_each_value_is_back_in_its_register() -> None:
    loops = {s.axis: s.unrolled for s in with_carried_loads(sums()).loops()}
    assert loops == {C: 1, P: 4}, "three lines, and the one that is on its way"
    assert ", 4 steps written out" in with_carried_loads(sums()).show()


@pytest.mark.parametrize(("stop", "written"), [(4, 1), (5, 1), (6, 4), (7, 4)])
def test_steps_are_not_written_out_where_there_are_fewer(stop: int, written: int) -> None:
    """A loop over groups of four steps would run none of them, and compilers take minutes for what is in it."""
    loops = {
        s.axis: s.unrolled for s in with_carried_loads(sums(start=integer(2), stop=integer(stop))).loops()
    }
    assert loops[P] == written


def test_rows_that_come_around_are_loaded_once() -> None:
    """x[p % 3], x[(p + 1) % 3], x[(p + 2) % 3]: what the last one is next is what the first one is now."""
    var, body = Vars(), list[Stmt]()
    total = ZERO
    for n in range(3):
        v, row = var(f32, C), dims.mod(dims.add(axis(P), integer(n)), integer(3))
        body.append(Load(v, X, dims.add(dims.mul(row, integer(WIDTH)), axis(C))))
        total = call("add", total, call("mul", value_of(v), const(n + 1, f32)))
    loop = Loop(P, integer(0), integer(ROWS), 1, (*body, Store(Y, place(0), total, (C,))))
    before = TileProgram((X, Y), (), (Loop(C, integer(0), integer(WIDTH), WIDTH, (loop,)),), lane=C)
    after = with_carried_loads(before)
    after.verify()
    assert loads_of_a_step(after) == 0 and {s.axis: s.unrolled for s in after.loops()}[P] == 3
    x = np.random.default_rng(0).standard_normal(ROWS * WIDTH).astype(np.float32)
    for one, other in zip(*(run_program(p, [x, np.zeros_like(x)]) for p in (before, after)), strict=True):
        np.testing.assert_array_equal(one, other)


def of_data() -> TileProgram:
    """x[index[p] + ...]: where it reads is data."""
    program = sums()
    index, v = Buffer("i", i64, integer(ROWS)), Vars()(i64)
    (outer,) = program.body
    assert isinstance(outer, Loop)
    (loop,) = outer.body
    assert isinstance(loop, Loop)
    moved = [
        replace(s, offset=call("add", s.offset, value_of(replace(v, id=99)))) if isinstance(s, Load) else s
        for s in loop.body
    ]
    body = (Load(replace(v, id=99), index, axis(P)), *moved)
    return replace(program, params=(index, X, Y), body=(replace(outer, body=(replace(loop, body=body),)),))


@pytest.mark.parametrize(
    "program",
    [
        sums(stored=X),
        replace(sums(), over=(1,)),
        sums(stop=symbol("n")),
        sums((0, 3)),
        sums(start=integer(4), stop=integer(5)),
        of_data(),
    ],
    ids=["stored", "stored over", "perhaps no step", "nothing again", "one step", "data"],
)
def test_loops_that_load_anew(program: TileProgram) -> None:
    assert with_carried_loads(program) == program


def test_a_window_that_walks_in_triton(tmp_path: Path) -> None:
    """A depthwise convolution whose threads walk over rows, as it is printed, with borders on all sides."""
    x = torch.randn(1, 16, 8, 8).half().to(memory_format=torch.channels_last)
    weight, bias = torch.randn(16, 1, 3, 3).half(), torch.randn(16).half()
    weight = weight.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    graph = capture(lambda x, w, b: F.relu(F.conv2d(x, w, b, 1, 1, groups=16)), [x, weight, bias])
    kernel, solver = one_kernel(graph), Solver(preset("sm_90"), Options())
    walked = next(s for s in solver.proposals(kernel, graph.layouts) if s.schedule.memory.carried)
    made = solver.solve(kernel, graph.layouts, walked.schedule)
    flat = {
        v: t.permute(order).contiguous().reshape(-1).numpy()
        for v, t, order in zip(
            graph.inputs, (x, weight, bias), ((0, 2, 3, 1), (2, 3, 0, 1), (0,)), strict=True
        )
    }
    job = Job(made.program, [flat.get(v) for v in made.params], {}, name="walk")
    assert "loop_unroll_factor" in job.source().text
    (outcome,) = interpret(tmp_path, [job])
    same_as_interpreter(job, outcome, rtol=2e-3, atol=2e-3)
