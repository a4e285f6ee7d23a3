"""Addresses, masks, blocks of two axes, scans, checks: compiled programs against the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.emit.cpp.memory_programs import NM, matmul, row_and_column, scan, transpose
from tests.support.cpp_harness import build, same_as_interpreter
from tests.support.tile_programs import M, N, Vars, column_merge, peeled, row_sum, size

from tilewright.ir.dtype import DType, bool_, f16, f32, f64, i32, i64
from tilewright.ir.expr import Axis, Expr, axis, both, call, cast, const, integer, where
from tilewright.ir.program import (
    Branch,
    Buffer,
    Check,
    Compute,
    GridAxis,
    Load,
    Place,
    Stmt,
    Store,
    TileProgram,
    value_of,
)
from tilewright.ir.reduction import any_, argmin, logsumexp, maximum, product, sum_
from tilewright.ir.sizes import dims
from tilewright.target import PRESETS

Offset = Callable[[Expr, Expr], Expr]
Mask = Callable[[Expr, Expr], Expr | None]


def copy(
    rows: Expr,
    cols: Expr,
    source: Expr,
    offset: Offset,
    mask: Mask = lambda r, c: None,
    *,
    dtype: DType = f32,
    other: float | None = None,
    tile: int = 64,
    target: Offset | None = None,
) -> TileProgram:
    """out[r, c] = x[offset(r, c)] where mask, else `other`; `source` is the size of x. `target` moves the stores."""
    r, c = Axis("r", rows), Axis("c", cols)
    var = Vars()
    x, y = Buffer("x", dtype, source), Buffer("y", dtype, dims.mul(rows, cols))
    to = target or (lambda r, c: dims.add(dims.mul(r, cols), c))

    def inner(tail: Expr | None) -> list[Stmt]:
        v = var(dtype.compute, c)
        guard = both(tail, mask(axis(r), axis(c)))
        fill = const(0 if other is None else other, dtype.compute) if guard is not None else None
        load = Load(v, x, offset(axis(r), axis(c)), guard, fill)
        return [load, Store(y, to(axis(r), axis(c)), value_of(v), (c,), tail)]

    return TileProgram((x, y), (GridAxis(r, rows),), tuple(peeled(c, cols, tile, inner)), lane=c)


EIGHT = integer(8)
CASES: dict[str, TileProgram] = {
    "flip": copy(N, M, NM, lambda r, c: dims.add(dims.mul(r, M), dims.sub(dims.sub(M, c), dims.ONE))),
    "transposed": copy(N, M, NM, lambda r, c: dims.add(dims.mul(c, N), r)),
    "strided": copy(N, M, dims.mul(NM, integer(3)), lambda r, c: dims.mul(dims.add(dims.mul(r, M), c), integer(3))),
    "broadcast column": copy(N, M, N, lambda r, c: r),
    "broadcast row": copy(N, M, M, lambda r, c: c),
    "gather": copy(N, M, NM, lambda r, c: dims.mod(dims.add(dims.mul(r, M), dims.mul(c, c)), NM)),
    "split": copy(N, M, NM, lambda r, c: dims.add(dims.mul(r, M), dims.floordiv(c, EIGHT))),
    "upsample": copy(N, M, NM, lambda r, c: dims.add(dims.mul(r, M), dims.floordiv(c, integer(2)))),
    "pad": copy(
        N, M, NM, lambda r, c: dims.sub(dims.add(dims.mul(r, M), c), EIGHT),
        lambda r, c: both(call("ge", c, EIGHT), call("gt", r, integer(0))), other=-2.5,
    ),
    "pad right": copy(
        N, M, NM, lambda r, c: dims.add(dims.mul(r, M), c, EIGHT),
        lambda r, c: call("lt", dims.add(c, EIGHT), M), other=1.5,
    ),
    "lower triangle": copy(
        N, M, NM, lambda r, c: dims.add(dims.mul(r, M), c),
        lambda r, c: call("le", c, dims.mul(r, integer(2))), other=-9,
    ),
    "every third": copy(
        N, M, NM, lambda r, c: dims.add(dims.mul(r, M), c),
        lambda r, c: call("eq", dims.mod(c, integer(3)), integer(0)), other=4,
    ),
    "one lane": copy(
        N, M, NM, lambda r, c: dims.add(dims.mul(r, M), c), lambda r, c: call("eq", c, dims.add(r, integer(2))), other=4
    ),
    "strided stores": copy(
        N, M, NM, lambda r, c: dims.add(dims.mul(r, M), c), target=lambda r, c: dims.add(dims.mul(c, N), r)
    ),
    "scattered stores": copy(
        N, M, NM, lambda r, c: dims.add(dims.mul(r, M), c),
        target=lambda r, c: dims.add(dims.mul(r, M), dims.mod(dims.add(c, integer(5)), M)),
    ),
    "masked column": copy(N, M, N, lambda r, c: r, lambda r, c: call("lt", c, integer(5)), other=3),
    "gather under a mask": copy(
        N, M, NM, lambda r, c: dims.sub(dims.add(dims.mul(r, M), dims.floordiv(c, integer(2))), EIGHT),
        lambda r, c: call("ge", dims.floordiv(c, integer(2)), EIGHT), other=7,
    ),
    "strided under a mask": copy(
        N, M, dims.mul(NM, integer(2)), lambda r, c: dims.sub(dims.mul(dims.add(dims.mul(r, M), c), integer(2)), EIGHT),
        lambda r, c: call("ge", dims.mul(c, integer(2)), EIGHT), other=7,
    ),
}  # fmt: skip
MATRICES = [(3, 70), (1, 1), (2, 64), (0, 5), (4, 0), (9, 129)]


@pytest.mark.parametrize("target", ["x86-64-v4", "x86-64-v3", "x86-64"])
def test_addresses(target: str, tmp_path: Path) -> None:
    machine = PRESETS[target]
    unit = build(tmp_path, list(CASES.values()), ("n", "m"), machine, run_here=True)
    for rows, cols in MATRICES:
        sizes = {"n": rows, "m": cols}
        for k, (name, program) in enumerate(CASES.items()):
            x = np.random.standard_normal(dims.evaluate(program.params[0].size, sizes)).astype(np.float32)
            try:
                same_as_interpreter(unit, k, program, [x, None], sizes, rtol=0, atol=0)
            except AssertionError as error:
                raise AssertionError(f"{name} {sizes}: {error}") from error


@pytest.mark.parametrize("dtype", [f64, f16, i64, bool_, i32], ids=repr)
def test_addresses_of_other_types(dtype: DType, tmp_path: Path) -> None:
    named = {
        "row": lambda r, c: dims.add(dims.mul(r, M), c),
        "strided": lambda r, c: dims.add(dims.mul(c, N), r),
        "gather": lambda r, c: dims.mod(dims.add(dims.mul(r, M), dims.mul(c, c)), NM),
    }
    masks: dict[str, Mask] = {"all": lambda r, c: None, "some": lambda r, c: call("ge", c, integer(3))}
    programs = [copy(N, M, NM, o, m, dtype=dtype, other=1) for o in named.values() for m in masks.values()]
    unit = build(tmp_path, programs, ("n", "m"))
    for k, program in enumerate(programs):
        x = (np.random.standard_normal(5 * 70) * 5).astype(np.float64)
        data = (
            (x > 0)
            if dtype is bool_
            else x.astype({"f64": "f8", "f16": "f2", "i64": "i8", "i32": "i4"}[dtype.name])
        )
        same_as_interpreter(unit, k, program, [data, None], {"n": 5, "m": 70}, rtol=0, atol=0)


def data_gather(checked: bool = True) -> TileProgram:
    """out[c] = table[index[c]] with negative indices wrapped, checked, clamped."""
    c = Axis("c", N)
    var = Vars()
    table, index, out = Buffer("table", f32, M), Buffer("index", i64, N), Buffer("out", f32, N)

    def inner(tail: Expr | None) -> list[Stmt]:
        raw, at, v = var(i64, c), var(i64, c), var(f32, c)
        wrapped = where(call("lt", value_of(raw), integer(0)), call("add", value_of(raw), M), value_of(raw))
        clamped = call("maximum", call("minimum", value_of(at), dims.sub(M, dims.ONE)), integer(0))
        inside = call("and", call("ge", value_of(at), integer(0)), call("lt", value_of(at), M))
        return [
            Load(raw, index, axis(c), tail, integer(0)),
            Compute(at, wrapped),
            Check(inside, 5, (c,), tail),
            Load(v, table, clamped, tail, const(0, f32)),
            Store(out, axis(c), value_of(v), (c,), tail),
        ]

    return TileProgram((table, index, out), (), tuple(peeled(c, N, 64, inner)), lane=c)


def test_gather_by_data_checks_its_indices(tmp_path: Path) -> None:
    program = data_gather()
    unit = build(tmp_path, [program], ("n", "m"))
    table = np.random.standard_normal(50).astype(np.float32)
    index = np.random.randint(-50, 50, 137)
    (_, _, out) = same_as_interpreter(
        unit, 0, program, [table, index, None], {"n": 137, "m": 50}, rtol=0, atol=0
    )
    np.testing.assert_array_equal(out, table[index])
    index[77] = 50
    out = np.zeros(137, np.float32)
    assert unit.run(0, [table, index, out], {"n": 137, "m": 50}) == 5
    np.testing.assert_array_equal(out[:77], table[index[:77]])


def test_scans_and_blocks_of_two_axes(tmp_path: Path) -> None:
    programs = [
        scan(),
        transpose(4, 16),
        transpose(16, 16),
        transpose(32, 64),
        matmul(),
        matmul(4, 32, 4),
        row_and_column(),
    ]
    unit = build(tmp_path, programs, ("n", "m"))
    for rows, cols in MATRICES:
        sizes = {"n": rows, "m": cols}
        for k, program in enumerate(programs):
            given: list[np.ndarray | None] = []
            for b in program.params[:-1]:
                given.append(np.random.standard_normal(dims.evaluate(b.size, sizes)).astype(np.float32))
            same_as_interpreter(unit, k, program, [*given, None], sizes)


def test_sums_in_blocks_miss_no_row(tmp_path: Path) -> None:
    """Also of numbers that no block divides; every row weighs otherwise."""
    counts = (1, 4, 5, 6, 7, 8, 16, 17, 23, 64)
    programs = [column_merge(sum_(f32), n, computed=computed) for computed in (False, True) for n in counts]
    unit = build(tmp_path, programs)
    for number, (program, rows) in enumerate(zip(programs, 2 * counts, strict=True)):
        x = (2.0 ** (np.arange(rows) % 20)).repeat(16).astype(np.float32)
        same_as_interpreter(unit, number, program, [x, None], rtol=0, atol=0)


def branches() -> TileProgram:
    """y[r] depends on a condition; scratch holds a row in one branch."""
    r, c = Axis("r", N), Axis("c", M)
    var = Vars()
    x, y = Buffer("x", f32, NM), Buffer("y", f32, NM)
    kept, other = Buffer("kept", f32, M, Place.SCRATCH), Buffer("twice", f64, M, Place.SCRATCH)
    at = dims.add(dims.mul(axis(r), M), axis(c))

    def fill(tail: Expr | None) -> list[Stmt]:
        v = var(f32, c)
        return [Load(v, x, at, tail), Store(kept, axis(c), value_of(v), (c,), tail),
                Store(other, axis(c), cast(call("add", value_of(v), value_of(v)), f64), (c,), tail)]  # fmt: skip

    def back(tail: Expr | None) -> list[Stmt]:
        v, w = var(f32, c), var(f64, c)
        turned = dims.sub(dims.sub(M, axis(c)), dims.ONE)
        return [Load(v, kept, turned, tail, const(0, f32)), Load(w, other, axis(c), tail, const(0, f64)),
                Store(y, at, call("add", value_of(v), cast(value_of(w), f32)), (c,), tail)]  # fmt: skip

    def plain(tail: Expr | None) -> list[Stmt]:
        v = var(f32, c)
        return [Load(v, x, at, tail, const(0, f32)), Store(y, at, call("neg", value_of(v)), (c,), tail)]

    even = call("eq", dims.mod(axis(r), integer(2)), integer(0))
    yes = (*peeled(c, M, 16, fill), *peeled(c, M, 16, back))
    body = Branch(even, yes, tuple(peeled(c, M, 16, plain)))
    return TileProgram((x, y), (GridAxis(r, N),), (body,), scratch=(kept, other), lane=c)


def test_branches_and_scratch(tmp_path: Path) -> None:
    program = branches()
    unit = build(tmp_path, [program], ("n", "m"))
    for rows, cols in MATRICES:
        x = np.random.standard_normal(rows * cols).astype(np.float32)
        same_as_interpreter(unit, 0, program, [x, None], {"n": rows, "m": cols})


def test_reductions(tmp_path: Path) -> None:
    reductions = [product(f32), maximum(f32), any_(), argmin(f32), logsumexp(f32), sum_(i64), maximum(i32)]
    types = [f32, f32, f32, f32, f32, i32, i32]
    programs = [
        row_sum(N, M, r, t, tile=tile)
        for r, t in zip(reductions, types, strict=True)
        for tile in (16, 64, 256)
    ]
    unit = build(tmp_path, programs, ("n", "m"))
    for rows, cols in [(3, 70), (2, 300), (1, 1), (2, 64)]:
        x = np.random.standard_normal(rows * cols)
        x[np.random.rand(x.size) < 0.2] = 0
        for k, program in enumerate(programs):
            integers = program.params[0].dtype is i32
            data = (x * 10).astype(np.int32) if integers else x.astype(np.float32)
            outs = [None] * (len(program.params) - 1)
            same_as_interpreter(unit, k, program, [data, *outs], {"n": rows, "m": cols}, rtol=2e-4)


def test_grid_of_three_axes_in_pieces(tmp_path: Path) -> None:
    a, b, c = Axis("a", N), Axis("b", M), Axis("c", integer(5))
    x = Buffer("x", i64, dims.mul(N, M, integer(5)))
    at = dims.add(dims.mul(dims.add(dims.mul(axis(a), M), axis(b)), integer(5)), axis(c))
    value = dims.add(dims.mul(axis(a), integer(10000)), dims.mul(axis(b), integer(100)), axis(c))
    grid = (GridAxis(a, N), GridAxis(b, M), GridAxis(c, size(5)))
    program = TileProgram((x,), grid, (Store(x, at, value),))
    unit = build(tmp_path, [program], ("n", "m"))
    for pieces in (1, 7, 100):
        out = np.zeros((4, 3, 5), np.int64)
        unit.run(0, [out], {"n": 4, "m": 3}, pieces=pieces)
        i, j, k = np.indices(out.shape)
        np.testing.assert_array_equal(out, i * 10000 + j * 100 + k)
