"""Every scalar operation and every element type, compiled, against the interpreter."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tests.emit.scalar_programs import divisor, operations, sample
from tests.support.cpp_harness import build, same_as_interpreter
from tests.support.tile_programs import N, elementwise

from tilewright.ir.dtype import DTYPES, Kind, bool_, f32, f64, i16, i32, i64, u8
from tilewright.ir.expr import SCALARS, Expr, call, cast, const, where

LOOSE = 3e-6


@pytest.mark.parametrize("name", ["f32", "f64", "i32", "i64", "u8", "i16", "bool"])
def test_operations(name: str, tmp_path: Path) -> None:
    dtype = DTYPES[name]
    programs, inputs = [], []
    for op in operations(dtype):
        rule = SCALARS[op]
        out = bool_ if rule.result == "bool" else dtype

        def body(*args: Expr, op: str = op) -> Expr:
            return call(op, *args)

        programs.append(elementwise(N, (dtype,) * rule.arity, out, body, tile=16, chunk=32))
        n = (
            80 if op in ("floordiv", "mod", "truncdiv", "fmod") else 75
        )  # no idle lanes where 0 may be divided by
        args = [sample(dtype, n, op) for _ in range(rule.arity)]
        inputs.append([args[0], *(divisor(y, op) for y in args[1:])])
    unit = build(tmp_path, programs, ("n",))
    for k, (program, given) in enumerate(zip(programs, inputs, strict=True)):
        try:
            same_as_interpreter(
                unit, k, program, [*given, None], {"n": len(given[0])}, rtol=LOOSE, atol=1e-30
            )
        except AssertionError as error:
            raise AssertionError(f"{operations(dtype)[k]} of {name}: {error}") from error


@pytest.mark.parametrize("source", sorted(DTYPES))
def test_casts(source: str, tmp_path: Path) -> None:
    dtype = DTYPES[source]
    programs = [
        elementwise(N, (dtype,), to, lambda a, to=to: cast(a, to), tile=16, chunk=32)
        for to in DTYPES.values()
    ]
    unit = build(tmp_path, programs, ("n",))
    n = 41
    x = np.abs(sample(dtype, n, "fmod")) if dtype is not bool_ else sample(dtype, n)
    if dtype.kind is Kind.INT:
        x[:2] = 0, 1
    for k, program in enumerate(programs):
        same_as_interpreter(unit, k, program, [x, None], {"n": n}, rtol=0, atol=0)


def test_halves_are_computed_in_single_precision(tmp_path: Path) -> None:
    x = np.random.standard_normal((2, 300)).astype(np.float16)
    y = np.random.standard_normal((2, 300)).astype(ml_dtypes.bfloat16)
    f16, bf16 = DTYPES["f16"], DTYPES["bf16"]

    def body(a: Expr, b: Expr) -> Expr:
        product = call("mul", cast(a, f32), cast(b, f32))
        return call("add", product, const(1, f32))

    programs = [elementwise(N, (t, t), t, body) for t in (f16, bf16)]
    unit = build(tmp_path, programs, ("n",))
    for k, data in enumerate((x, y)):
        out = np.zeros(300, data.dtype)
        unit.run(k, [data[0], data[1], out], {"n": 300})
        want = data[0].astype(np.float32) * data[1].astype(np.float32) + np.float32(1)
        np.testing.assert_array_equal(out, want.astype(data.dtype))


def test_shared_expressions_and_conditions(tmp_path: Path) -> None:
    def body(a: Expr, b: Expr, c: Expr) -> Expr:
        s = call("add", a, b)
        positive = call("and", call("gt", s, const(0, f32)), c)
        return where(call("or", positive, call("not", c)), call("mul", s, s), call("neg", call("exp", s)))

    program = elementwise(N, (f32, f32, bool_), f32, body)
    unit = build(tmp_path, [program], ("n",))
    for n in (0, 1, 63, 64, 130):
        given = [sample(f32, n + 8)[8:], sample(f32, n + 8)[8:], sample(bool_, n)]
        same_as_interpreter(unit, 0, program, [*given, None], {"n": n})


@pytest.mark.parametrize("tile", [1, 64])
def test_a_choice_decides_a_choice(tile: int, tmp_path: Path) -> None:
    def body(a: Expr, b: Expr, c: Expr, d: Expr) -> Expr:
        return where(where(c, call("gt", a, b), d), call("add", a, b), call("neg", b))

    program = elementwise(N, (f32, f32, bool_, bool_), f32, body, tile=tile)
    unit = build(tmp_path, [program], ("n",))
    given = [sample(f32, 207)[7:], sample(f32, 205)[5:], sample(bool_, 200), sample(bool_, 203)[3:]]
    same_as_interpreter(unit, 0, program, [*given, None], {"n": 200})


def test_mixed_types_in_one_kernel(tmp_path: Path) -> None:
    def body(a: Expr, b: Expr, c: Expr, d: Expr) -> Expr:
        total = call("add", cast(a, f64), cast(b, f64))
        count = call("add", cast(c, i64), cast(d, i64))
        return cast(call("mul", total, cast(count, f64)), f32)

    program = elementwise(N, (f32, i16, u8, i32), f32, body, tile=64)
    unit = build(tmp_path, [program], ("n",))
    given = [sample(f32, 207)[7:], sample(i16, 200), sample(u8, 200), sample(i32, 200) % 1000]
    same_as_interpreter(unit, 0, program, [*given, None], {"n": 200})
