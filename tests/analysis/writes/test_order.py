"""Tile programs that store where they load: which are let through, and that those mean the same in any order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.support.corpus import Case
from tests.support.cpp_harness import host_target
from tests.support.one_kernel import capture, one_kernel
from torch import Tensor

from tilewright.analysis.writes.order import check_order, keeps_order
from tilewright.errors import VerifyError
from tilewright.interp.algebra import FLOATS
from tilewright.interp.program import _Run  # pyright: ignore[reportPrivateUsage]
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, Expr, axis, integer
from tilewright.ir.program import Buffer, GridAxis, Load, Loop, Stmt, Store, TileProgram, Var, value_of
from tilewright.ir.sizes import dims
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.target import Target, preset

R, C, G = Axis("r", integer(4)), Axis("c", integer(100)), Axis("g", integer(2))
ROWS = dims.add(dims.mul(axis(R), integer(100)), axis(C))
X, Y = Buffer("x", f32, integer(400)), Buffer("y", f32, integer(400))


def load(at: Expr, number: int = 0) -> Load:
    return Load(Var(number, f32, (C,)), X, at)


def store(at: Expr, number: int = 0) -> Store:
    return Store(Y, at, value_of(Var(number, f32, (C,))), (C,))


def over_rows(*body: Stmt, loop: Axis = C, step: int = 10) -> TileProgram:
    """One grid point for each row."""
    whole = Loop(loop, dims.ZERO, loop.extent, step, tuple(body))
    return TileProgram((X, Y), (GridAxis(R, R.extent),), (whole,), lane=C)


NEXT = dims.add(ROWS, dims.ONE)
COLUMNS = dims.add(dims.mul(axis(C), integer(4)), axis(R))
ONLY_COLUMN = axis(C)
TILED = Loop(C, dims.mul(axis(G), integer(50)), dims.mul(dims.add(axis(G), dims.ONE), integer(50)), 10,
             (load(axis(C)), store(axis(C))))  # fmt: skip

GOOD: dict[str, TileProgram] = {
    "element by element": over_rows(load(ROWS), store(ROWS)),
    "a row is read, then written": TileProgram(
        (X, Y), (GridAxis(R, R.extent),),
        (Loop(C, dims.ZERO, C.extent, 10, (load(ROWS),)),
         Loop(C, dims.ZERO, C.extent, 10, (load(ROWS, 1), store(ROWS, 1)))), lane=C,
    ),
    "tiles of one axis": TileProgram((X, Y), (GridAxis(G, G.extent),), (TILED,), lane=C),
}  # fmt: skip

BAD: dict[str, tuple[TileProgram, str]] = {
    "the next element": (over_rows(load(NEXT), store(ROWS)), "another element"),
    "transposed": (over_rows(load(COLUMNS), store(ROWS)), "another element"),
    "after it was stored": (over_rows(load(ROWS), store(ROWS), load(ROWS, 1)), "before it is loaded"),
    "each row stores it": (over_rows(load(ONLY_COLUMN), store(ONLY_COLUMN)), "each step of r"),
    "a row is written, then read": (
        TileProgram(
            (X, Y), (GridAxis(R, R.extent),),
            (Loop(C, dims.ZERO, C.extent, 10, (load(ROWS), store(ROWS))),
             Loop(C, dims.ZERO, C.extent, 10, (load(ROWS, 1),))), lane=C,
        ), "before it is loaded",
    ),
    "in every step of a loop": (
        TileProgram(
            (X, Y), (GridAxis(R, R.extent),),
            (Loop(G, dims.ZERO, G.extent, 1, (Loop(C, dims.ZERO, C.extent, 10, (load(ROWS), store(ROWS))),)),),
            lane=C,
        ), "each step of g",
    ),
    "tiles that run into the next": (
        TileProgram(
            (X, Y), (GridAxis(G, G.extent),),
            (Loop(C, dims.mul(axis(G), integer(45)), dims.add(dims.mul(axis(G), integer(45)), integer(50)), 10,
                  (load(axis(C)), store(axis(C)))),), lane=C,
        ), "where a tile ends",
    ),
    "steps that run past the row": (over_rows(load(ROWS), store(ROWS), step=16), "where a tile ends"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(GOOD))
def test_what_keeps_the_order(name: str) -> None:
    check_order(GOOD[name], "x", "y")


@pytest.mark.parametrize("name", list(BAD))
def test_what_breaks_the_order_is_refused(name: str) -> None:
    program, said = BAD[name]
    with pytest.raises(VerifyError, match=said):
        check_order(program, "x", "y")


def test_a_part_is_stored_over_the_same_elements() -> None:
    program = over_rows(load(NEXT), store(ROWS))
    check_order(program, "x", "y", dims.ONE)
    assert not keeps_order(program, "x", "y", dims.ZERO)


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "chain": lambda x: torch.tanh(x) * 2 + 1,
    "softmax": lambda x: torch.softmax(x, -1),
    "norm": lambda x: torch.nn.functional.layer_norm(x, (x.shape[-1],)),
    "scan": lambda x: torch.cumsum(x, -1),
    "flip": lambda x: x.flip(-1),
    "row sums": lambda x: x - x.sum(0),
    "neighbours": lambda x: x + torch.roll(x, 1, 0),
}


@pytest.mark.parametrize("name", list(PROGRAMS))
@pytest.mark.parametrize("target", [host_target(), preset("sm_90")], ids=["cpu", "gpu"])
def test_what_is_let_through_means_the_same_in_any_order(name: str, target: Target) -> None:
    """Points of the grid run one by one, forwards, backwards and shuffled, in one memory."""
    graph = capture(Case(name, PROGRAMS[name], ((6, 40),)), False)
    program = Solver(target, Options()).solve(one_kernel(graph), graph.layouts).program
    let = keeps_order(program, program.params[0].name, program.params[-1].name)
    assert let or name in ("flip", "row sums", "neighbours", "scan", "norm")
    assert not (let and name in ("flip", "neighbours"))
    if not let:
        return
    given = np.random.default_rng(0).standard_normal(240).astype(np.float32)
    first = _run(program, given, False, range)
    for order in (range, lambda n: range(n)[::-1], lambda n: random.Random(1).sample(range(n), n)):
        np.testing.assert_array_equal(_run(program, given, True, order), first)


def _run(program: TileProgram, given: np.ndarray, shared: bool, order: Callable[[int], object]) -> np.ndarray:
    run = _Run(program, {}, FLOATS)
    run.memory = {b.name: run.poisoned(b) for b in program.params}
    run.memory[program.params[0].name] = run.filled(program.params[0], given)
    if shared:
        run.memory[program.params[-1].name] = run.memory[program.params[0].name]
    extents = [range(run.number(g.extent)) for g in program.grid]
    points = np.array(list(itertools.product(*extents)), np.int64).reshape(-1, len(extents))
    for k in order(len(points)):  # type: ignore[attr-defined]
        run.points(points[k : k + 1])
    return run.memory[program.params[-1].name]
