"""Last steps of loops with sums in parts stay loops, and mean what they meant."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tests.support.triton.harness import Job, interpret, same_as_interpreter

from tilewright.emit.triton.kernel import emit_triton
from tilewright.interp.program import run_program
from tilewright.ir.dtype import f16, f32
from tilewright.ir.expr import Axis, axis, const, integer
from tilewright.ir.program import Buffer, Declare, Dot, Load, Loop, Stmt, Store, TileProgram, Var, value_of
from tilewright.ir.sizes import dims
from tilewright.lower.legalise.gpu import legalise_for_gpu
from tilewright.lower.variants import variants
from tilewright.target import preset

SIDE, LENGTH = 16, 48
M, N, K = Axis("m", integer(SIDE)), Axis("n", integer(SIDE)), Axis("k", integer(LENGTH))


def program(parts: int, first: int) -> TileProgram:
    """c = the sum of `parts` products over k, which a loop walks up to `first`, and another one from there on."""
    a, b, c = (
        Buffer(name, dtype, integer(SIDE * LENGTH))
        for name, dtype in zip("abc", (f16, f16, f32), strict=True)
    )
    acc = Var(0, f32, (M, N))

    def step(number: int) -> tuple[Stmt, ...]:
        body: list[Stmt] = []
        for n in range(parts):
            left, right = Var(number + 2 * n, f16, (M, K)), Var(number + 2 * n + 1, f16, (K, N))
            body += [
                Load(left, a, dims.add(dims.mul(axis(M), integer(LENGTH)), axis(K))),
                Load(right, b, dims.add(dims.mul(axis(K), integer(SIDE)), axis(N))),
                Dot(acc, left, right, K),
            ]
        return tuple(body)

    stop = integer(first)
    loops = [Loop(K, stop, integer(LENGTH), SIDE, step(20))]
    loops = [Loop(K, integer(0), stop, SIDE, step(10)), *loops] if first else loops
    out = Store(c, dims.add(dims.mul(axis(M), integer(SIDE)), axis(N)), value_of(acc), (M, N))
    body: tuple[Stmt, ...] = (Declare((acc,), (const(0.0, f32),)), *loops, out)
    for x in (N, M):
        body = (Loop(x, integer(0), integer(SIDE), SIDE, body),)
    return TileProgram((a, b, c), (), body)


@pytest.mark.parametrize(
    ("parts", "first", "kept"), [(2, 32, True), (1, 32, False), (2, 16, True), (2, 0, False)], ids=str
)
def test_a_step_behind_a_loop_stays_one_where_a_sum_has_parts(parts: int, first: int, kept: bool) -> None:
    """Or in front of one. Where nothing is walked beside it, nothing changes."""
    made = legalise_for_gpu(program(parts, first), preset("sm_90"))
    assert any(s.looped for s in made.loops()) == kept
    text = emit_triton(made, (), variants(made)[0], "k0").text
    steps = {(2, 32): 2, (1, 32): 1, (2, 16): 2, (2, 0): 1}[parts, first]
    assert len(re.findall(r"^    for ", text, re.MULTILINE)) == steps


def test_the_step_means_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    given = [rng.integers(-3, 4, SIDE * LENGTH).astype(np.float16) for _ in range(2)]
    job = Job(program(2, 32), [*given, None], {})
    (outcome,) = interpret(tmp_path, [job])
    same_as_interpreter(job, outcome, rtol=1e-6, atol=1e-6)
    a, b = given[0].reshape(SIDE, LENGTH), given[1].reshape(LENGTH, SIDE)
    made = run_program(program(2, 32), [*given, None], {})[2][: SIDE * SIDE].reshape(SIDE, SIDE)
    np.testing.assert_array_equal(made, 2 * a.astype(np.float32) @ b.astype(np.float32))
