"""Kernels that run on many tensors at once: what is printed, what it means, and how the tensors are accessed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.tile_programs import N, Vars, elementwise
from tests.support.triton.harness import Job, build, interpret, print_triton, same_as_interpreter

from tilewright.emit.triton.kernel import Argument
from tilewright.ir.dtype import DType, bf16, bool_, f16, f32, f64, i8, i32, i64
from tilewright.ir.expr import Axis, axis, call, cast, const, integer
from tilewright.ir.program import Buffer, GridAxis, Load, Loop, Store, TileProgram, value_of
from tilewright.ir.sizes import dims
from tilewright.lower.variants import Variant
from tilewright.target import preset

LISTED = Variant(aligned=True, wide=False, listed=True)


def over(count: int) -> TileProgram:
    """Two results over two operands, in blocks of 64 over `count` elements, two dims of a grid."""
    var = Vars()
    c, n = Axis("c", integer(count)), integer(count)
    a, b, x, y = (Buffer(name, f32, n) for name in "abxy")
    blocks = dims.floordiv(dims.add(n, integer(63)), integer(64))
    g, h = GridAxis(Axis("g", integer(1)), integer(1)), GridAxis(Axis("h", blocks), blocks)
    u, v = var(f32, c), var(f32, c)
    mask = call("lt", axis(c), n)
    start = dims.mul(axis(h.axis), integer(64))
    zero = const(0, f32)
    body = (
        Load(u, a, axis(c), mask, zero),
        Store(x, axis(c), call("add", value_of(u), const(1, f32)), (c,), mask),
        Load(v, b, axis(c), mask, zero),
        Store(y, axis(c), call("mul", value_of(u), value_of(v)), (c,), mask),
    )
    loop = Loop(c, start, dims.add(start, integer(64)), 64, body)
    return TileProgram((a, b, x, y), (g, h), (loop,), lane=c, warps=1, over=(2, 3))


def test_rows_mean_what_each_kernel_means(tmp_path: Path) -> None:
    def random(*shape: int) -> np.ndarray:
        return np.random.standard_normal(shape).astype(np.float32)

    rows = [x for _ in range(5) for x in (random(200), random(200), None, None)]
    fixed = [Job(over(200), rows, {}, (), v, "fixed") for v in (LISTED, replace(LISTED, wide=True))]
    doubled = elementwise(N, [f32], f32, lambda v: call("add", v, v))
    free = Job(
        doubled, [x for _ in range(3) for x in (random(2500), None)], {"m": 1, "n": 2500}, (),
        replace(LISTED, aligned=False),
    )  # fmt: skip
    jobs = [*fixed, free]
    for job, outcome in zip(jobs, interpret(tmp_path, jobs), strict=True):
        same_as_interpreter(job, outcome)


def test_a_table_stands_for_the_pointers(tmp_path: Path) -> None:
    source = print_triton(over(1 << 20), (), preset("sm_90"), LISTED, "k0")
    assert source.arguments == (
        Argument("table", "table", "*i64", 0, True), Argument("error", "error", "*i32", 0, False)
    )  # fmt: skip
    assert source.divisible == (0,)
    loads = source.text.index("tl.load(p1")
    assert loads < source.text.index("tl.debug_barrier()") < source.text.index("tl.store(")
    assert source.text.count("debug_barrier") == 1, "one wait for all that is stored over"
    wide = replace(over(1 << 20), body=(replace(over(1 << 20).body[0], tile=512),))  # type: ignore[arg-type]
    made = build(tmp_path, print_triton(wide, (), preset("sm_90"), LISTED, "k0"))
    assert made.accesses[128] >= 4 and made.facts.spills == 0, "as wide as with pointers"


@pytest.mark.parametrize("dtype", [bool_, i8, i32, i64, f16, bf16, f64], ids=str)
def test_types_in_memory(tmp_path: Path, dtype: DType) -> None:
    var = Vars()
    c = Axis("c", integer(32))
    x, y = (Buffer(name, dtype, integer(32)) for name in "xy")
    v = var(dtype.compute if not dtype.is_half else f32, c)
    body = (Load(v, x, axis(c)), Store(y, axis(c), cast(value_of(v), dtype.compute), (c,)))
    program = TileProgram((x, y), (), (Loop(c, dims.ZERO, integer(32), 32, body),), lane=c, warps=1)
    assert build(tmp_path, print_triton(program, (), preset("sm_90"), LISTED, "k0")).facts.spills == 0
