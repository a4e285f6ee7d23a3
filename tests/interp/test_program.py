"""The interpreter of tile programs on programs written by hand, over floats and over exact elements."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tilewright.errors import IndexOutOfRange, InputError, VerifyError
from tilewright.interp import EXACT, Algebra, equal, exact_random, run_program
from tilewright.ir.dtype import bf16, f16, f32, i64
from tilewright.ir.expr import Axis, Expr, axis, call, cast, const, integer, symbol, where
from tilewright.ir.program import (  # fmt: skip
    Branch,
    Buffer,
    Check,
    Collapse,
    Compute,
    Declare,
    Dot,
    GridAxis,
    Load,
    Loop,
    Place,
    Stmt,
    Store,
    TileProgram,
    Update,
    Var,
    value_of,
)
from tilewright.ir.reduction import argmax, maximum, sum_
from tilewright.ir.sizes import dims

N, M = symbol("n"), symbol("m")
ROW, J = Axis("i", N), Axis("j", M)
X, Y = Buffer("x", f32, dims.mul(N, M)), Buffer("y", f32, dims.mul(N, M))
AT = dims.add(dims.mul(axis(ROW), M), axis(J))
INSIDE = call("lt", axis(J), M)
RNG = np.random.default_rng(2)


def over(tile: int, *body: Stmt) -> Loop:
    return Loop(J, dims.ZERO, M, tile, body)


def scalar(k: int) -> Var:
    return Var(k, f32)


def block(k: int) -> Var:
    return Var(k, f32, (J,))


def online_softmax(tile: int, rescale: bool = True, mask: bool = True) -> TileProgram:
    """Two loops: running maximum with a rescaled sum in lanes, then the quotients."""
    x, m, z, top, total, e = block(0), block(1), block(2), scalar(3), scalar(4), block(5)
    wide, again = block(6), block(7)
    guard = INSIDE if mask else None
    load = Load(x, X, AT, INSIDE, const(-math.inf, f32))
    new = call("maximum", value_of(m), value_of(x))
    factor = call("exp", call("sub", value_of(m), value_of(wide)))
    kept = call("mul", value_of(z), factor) if rescale else value_of(z)
    grown = call("add", kept, call("exp", call("sub", value_of(x), value_of(wide))))
    lane_factor = call("mul", value_of(z), call("exp", call("sub", value_of(m), value_of(top))))
    body: tuple[Stmt, ...] = (
        Declare((m, z), (const(-math.inf, f32), const(0, f32))),
        over(tile, load, Compute(wide, new), Update((m, z), (value_of(wide), grown), guard)),
        Collapse((top,), (m,), maximum(f32), (J,)),
        Compute(e, lane_factor),
        Compute(again, where(call("eq", value_of(m), const(-math.inf, f32)), const(0, f32), value_of(e))),
        Collapse((total,), (again,), sum_(f32), (J,)),
        over(
            tile,
            load,
            Store(
                Y,
                AT,
                call("div", call("exp", call("sub", value_of(x), value_of(top))), value_of(total)),
                (J,),
                INSIDE,
            ),
        ),
    )
    return TileProgram((X, Y), (GridAxis(ROW, N),), body)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@pytest.mark.parametrize("tile", [1, 4, 16])
@pytest.mark.parametrize("m", [1, 8, 11])
def test_online_softmax(tile: int, m: int):
    x = RNG.standard_normal((3, m)).astype(np.float32)
    _, y = run_program(online_softmax(tile), [x, None], {"n": 3, "m": m})
    assert np.allclose(y.reshape(3, m), softmax(x), rtol=1e-5)


def test_a_dropped_rescaling_differs_exactly():
    x = exact_random((2, 9), 1)
    sizes = {"n": 2, "m": 9}
    results = [run_program(online_softmax(t), [x, None], sizes, EXACT)[1] for t in (1, 4, 16)]
    assert equal(results[0], results[1]) and equal(results[0], results[2])
    wrong = run_program(online_softmax(4, rescale=False), [x, None], sizes, EXACT)[1]
    assert not equal(results[0], wrong)


def test_a_lost_mask_shows_as_poison():
    p = online_softmax(4, mask=False)
    p.verify()
    x = RNG.standard_normal((2, 6)).astype(np.float32)
    load_without_other = Load(block(0), X, AT, INSIDE)

    def change(s: Stmt) -> Stmt:
        if isinstance(s, Loop):
            return Loop(s.axis, s.start, s.stop, s.tile, tuple(map(change, s.body)))
        return load_without_other if isinstance(s, Load) else s

    bad = TileProgram(p.params, p.grid, tuple(map(change, p.body)))
    _, y = run_program(bad, [x, None], {"n": 2, "m": 6})
    assert np.isnan(y).any()


def matmul_program(tile: int) -> TileProgram:
    k, j = Axis("k", integer(7)), Axis("j", integer(10))
    a, b, c = (Buffer(n, f32, integer(s)) for n, s in (("a", 3 * 7), ("b", 7 * 10), ("c", 3 * 10)))
    va, vb, acc = Var(0, f32, (k,)), Var(1, f32, (k, j)), Var(2, f32, (j,))
    in_k, in_j = call("lt", axis(k), integer(7)), call("lt", axis(j), integer(10))
    zero = const(0, f32)
    inner = Loop(k, dims.ZERO, integer(7), tile, (
        Load(va, a, dims.add(dims.mul(axis(ROW), integer(7)), axis(k)), in_k, zero),
        Load(vb, b, dims.add(dims.mul(axis(k), integer(10)), axis(j)), call("and", in_k, in_j), zero),
        Dot(acc, va, vb, k),
    ))  # fmt: skip
    body = Loop(j, dims.ZERO, integer(10), 4, (
        Declare((acc,), (zero,)),
        inner,
        Store(c, dims.add(dims.mul(axis(ROW), integer(10)), axis(j)), value_of(acc), (j,), in_j),
    ))  # fmt: skip
    return TileProgram((a, b, c), (GridAxis(ROW, integer(3)),), (body,))


@pytest.mark.parametrize("tile", [1, 2, 16])
def test_dot(tile: int):
    a, b = RNG.random((3, 7), np.float32), RNG.random((7, 10), np.float32)
    c = run_program(matmul_program(tile), [a, b, None])[2]
    assert np.allclose(c.reshape(3, 10), a @ b, rtol=1e-5)
    x, y = exact_random((3, 7), 1), exact_random((7, 10), 2)
    assert equal(*[run_program(matmul_program(t), [x, y, None], {}, EXACT)[2] for t in (tile, 3)])


def copy_program(offset: Expr, mask: Expr | None = None, value: Expr | None = None) -> TileProgram:
    v = block(0)
    x, y = Buffer("x", f32, M), Buffer("y", f32, M)
    stored = value_of(v) if value is None else value
    return TileProgram(
        (x, y), (), (over(4, Load(v, x, axis(J), mask), Store(y, offset, stored, (J,), mask)),)
    )


def test_access_outside_a_buffer_is_an_error():
    x = np.arange(6, dtype=np.float32)
    sizes = {"m": 6}
    assert run_program(copy_program(axis(J), INSIDE), [x, None], sizes)[1].tolist() == x.tolist()
    with pytest.raises(VerifyError, match="access to x"):
        run_program(copy_program(axis(J)), [x, None], sizes)
    with pytest.raises(VerifyError, match="access to y"):
        run_program(copy_program(dims.sub(axis(J), dims.ONE), INSIDE), [x, None], sizes)
    with pytest.raises(InputError):
        run_program(copy_program(axis(J), INSIDE), [x[:3], None], sizes)


def test_lanes_that_write_different_values_to_one_place_are_an_error():
    x = np.arange(6, dtype=np.float32)
    with pytest.raises(VerifyError, match="different values"):
        run_program(copy_program(dims.ZERO, INSIDE), [x, None], {"m": 6})
    one = run_program(copy_program(dims.ZERO, INSIDE, const(7, f32)), [x, None], {"m": 6})[1]
    assert one[0] == 7 and np.isnan(one[1:]).all()


def test_a_value_may_only_vary_along_its_axes():
    wrong = TileProgram((X,), (GridAxis(ROW, N),), (over(4, Load(scalar(0), X, AT, INSIDE)),))
    with pytest.raises(VerifyError, match="varies along j"):
        run_program(wrong, [np.zeros(6)], {"n": 2, "m": 3})


def test_scratch_is_fresh_at_every_grid_point():
    s = Buffer("s", f32, M, Place.SCRATCH)
    v, w = block(0), block(1)
    first = call("eq", axis(ROW), dims.ZERO)
    fill = Branch(first, (over(2, Store(s, axis(J), const(1, f32), (J,), INSIDE)),))
    out = over(2, Load(w, s, axis(J), INSIDE), Store(Y, AT, value_of(w), (J,), INSIDE))
    p = TileProgram((X, Y), (GridAxis(ROW, N),), (over(2, Load(v, X, AT, INSIDE)), fill, out), (s,))
    _, y = run_program(p, [np.zeros(6), None], {"n": 2, "m": 3})
    assert y[:3].tolist() == [1, 1, 1] and np.isnan(y[3:]).all()


@pytest.mark.parametrize("half", [f16, bf16])
def test_halves_are_held_wide_and_rounded_when_stored(half):
    x, y = Buffer("x", half, M), Buffer("y", half, M)
    v = block(0)
    third = call("mul", value_of(v), const(1 / 3, f32))
    body = over(4, Load(v, x, axis(J), INSIDE), Store(y, axis(J), third, (J,), INSIDE))
    data = RNG.random(5, np.float32)
    held, result = run_program(TileProgram((x, y), (), (body,)), [data, None], {"m": 5})
    want = (held.astype(np.float32) * np.float32(1 / 3)).astype(held.dtype)
    assert result.dtype == held.dtype and np.array_equal(result, want)


def test_checks_report_after_the_run():
    ids, y = Buffer("ids", i64, M), Buffer("y", f32, M)
    at, v = Var(0, i64, (J,)), block(1)
    good = call("and", call("ge", value_of(at), integer(0)), call("lt", value_of(at), M))
    clamped = call("minimum", call("maximum", value_of(at), integer(0)), dims.sub(M, dims.ONE))
    x = Buffer("x", f32, M)
    body = over(
        4,
        Load(at, ids, axis(J), INSIDE, integer(0)),
        Check(good, 3, (J,), INSIDE),
        Load(v, x, clamped, INSIDE),
        Store(y, axis(J), value_of(v), (J,), INSIDE),
    )
    p = TileProgram((x, ids, y), (), (body,))
    data = np.array([1, 2, 3], np.float32)
    assert run_program(p, [data, np.array([2, 0, 1]), None], {"m": 3})[2].tolist() == [3, 1, 2]
    with pytest.raises(IndexOutOfRange, match="check 3"):
        run_program(p, [data, np.array([2, 0, 9]), None], {"m": 3})


def test_states_of_several_values_collapse_in_order():
    v, best, where_ = block(0), block(1), Var(2, i64, (J,))
    top, place = scalar(3), Var(4, i64)
    y = Buffer("y", i64, N)
    kind = argmax(f32)
    a, b = kind.merged((value_of(best), value_of(where_)), (value_of(v), axis(J)))
    body = (
        Declare((best, where_), kind.identity),
        over(4, Load(v, X, AT, INSIDE), Update((best, where_), (a, b), INSIDE)),
        Collapse((top, place), (best, where_), kind, (J,)),
        Store(y, axis(ROW), value_of(place)),
    )
    x = np.array([[1, 5, 2, 5, 0, 5], [9, 9, 1, 2, 3, 4]], np.float32)
    p = TileProgram((X, y), (GridAxis(ROW, N),), body)
    assert run_program(p, [x, None], {"n": 2, "m": 6})[1].tolist() == [1, 0]


@pytest.mark.parametrize("sizes", [{"n": 0, "m": 3}, {"n": 3, "m": 0}])
def test_empty_sizes(sizes: dict[str, int]):
    _, y = run_program(online_softmax(4), [np.zeros(0), None], sizes)
    assert y.size == 0


def test_casts_follow_the_algebra():
    v = block(0)
    x, y = Buffer("x", f32, M), Buffer("y", i64, M)
    body = over(2, Load(v, x, axis(J), INSIDE), Store(y, axis(J), cast(value_of(v), i64), (J,), INSIDE))
    algebra: Algebra = EXACT
    data = np.array([1.5, -2.5, 3.0])
    assert run_program(TileProgram((x, y), (), (body,)), [data, None], {"m": 3}, algebra)[1].tolist() == [
        1,
        -2,
        3,
    ]
