"""Sums of two products of matrices, and what is none."""

from __future__ import annotations

import numpy as np
import pytest

from tilewright.interp.program import run_program
from tilewright.ir.dtype import f16, f32
from tilewright.ir.expr import Axis, axis, call, const, integer
from tilewright.ir.program import (
    Buffer,
    Compute,
    Declare,
    Dot,
    Load,
    Loop,
    Stmt,
    Store,
    TileProgram,
    Var,
    value_of,
)
from tilewright.ir.sizes import dims
from tilewright.lower.legalise.gpu import legalise_for_gpu
from tilewright.target import preset

SIDE = 16
M, N, K = (Axis(name, integer(SIDE)) for name in "mnk")
SIZE = integer(SIDE * SIDE)


def program(read: str, zero: float = 0.0, halves: bool = True) -> TileProgram:
    """c = f(a b, b a), where f is as `read` says."""
    dtype = f16 if halves else f32
    a, b, c = Buffer("a", dtype, SIZE), Buffer("b", dtype, SIZE), Buffer("c", f32, SIZE)
    at = lambda x, y: dims.add(dims.mul(axis(x), integer(SIDE)), axis(y))  # noqa: E731
    sides = [Var(0, dtype, (M, K)), Var(1, dtype, (K, N)), Var(2, dtype, (M, K)), Var(3, dtype, (K, N))]
    loads = [Load(v, p, at(*v.axes)) for v, p in zip(sides, (a, b, b, a), strict=True)]
    one, two = Var(4, f32, (M, N)), Var(5, f32, (M, N))
    x, y = value_of(one), value_of(two)
    value = {"sum": call("mul", call("add", x, y), const(2.0, f32)), "turned": call("add", y, x),
             "both": call("mul", call("add", x, y), x), "difference": call("sub", x, y)}[read]  # fmt: skip
    body: tuple[Stmt, ...] = (
        *loads[:2], Declare((one,), (const(0.0, f32),)), Dot(one, sides[0], sides[1], K),
        *loads[2:], Declare((two,), (const(zero, f32),)), Dot(two, sides[2], sides[3], K),
        Compute(Var(6, f32, (M, N)), value), Store(c, at(M, N), value_of(Var(6, f32, (M, N))), (M, N)),
    )  # fmt: skip
    for k in (K, N, M):
        body = (Loop(k, integer(0), integer(SIDE), SIDE, body),)
    return TileProgram((a, b, c), (), body)


def results(made: TileProgram) -> np.ndarray:
    rng = np.random.default_rng(0)
    kinds = [np.float16 if p.dtype is f16 else np.float32 for p in made.params]
    given = [rng.integers(-3, 4, SIDE * SIDE).astype(kind) for kind in kinds[:2]]
    return run_program(made, [*given, None], {})[2]


def accumulators(made: TileProgram) -> set[int]:
    return {s.acc.id for s in made.statements() if isinstance(s, Dot)}


@pytest.mark.parametrize("read", ["sum", "turned"])
def test_the_second_product_goes_on_where_the_first_ended(read: str) -> None:
    plain = program(read)
    made = legalise_for_gpu(plain, preset("sm_90"))
    assert len(accumulators(plain)) == 2 and len(accumulators(made)) == 1
    np.testing.assert_array_equal(results(made), results(plain))


@pytest.mark.parametrize(
    "plain", [program("both"), program("difference"), program("sum", zero=1.0)], ids=["both", "difference", "one"]
)  # fmt: skip
def test_what_is_read_otherwise_or_begins_otherwise_stays(plain: TileProgram) -> None:
    made = legalise_for_gpu(plain, preset("sm_90"))
    assert len(accumulators(made)) == 2
    np.testing.assert_array_equal(results(made), results(plain))
