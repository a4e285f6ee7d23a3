"""What is told of accesses follows from where blocks begin, and is no part of what a program means."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tests.support.tile_programs import elementwise

from tilewright.interp.program import run_program
from tilewright.ir.dtype import f32
from tilewright.ir.expr import axis, integer
from tilewright.ir.program import Load, Loop, Stmt, Store, TileProgram, rewrite_body
from tilewright.ir.selection import ElementRun
from tilewright.ir.sizes import dims
from tilewright.lower.legalise.gpu import legalise_for_gpu
from tilewright.target import preset

GPU = preset("sm_90")


def copied(first: int) -> TileProgram:
    """A copy of 128 elements from `first` on, 64 at a time, that changes the places of pairs of 24."""
    program = elementwise(240, (f32,), f32, lambda x: x)
    (loop, _) = program.loops()
    c = axis(loop.axis)
    turned = dims.add(dims.mul(dims.sub(integer(9), dims.floordiv(c, integer(24))), integer(24)),
                      dims.mod(c, integer(24)))  # fmt: skip

    def change(s: Stmt) -> tuple[Stmt, ...] | None:
        return (replace(s, offset=turned, mask=None),) if isinstance(s, (Load, Store)) else None

    body = rewrite_body(loop.body, change)
    return replace(program, body=(replace(loop, start=integer(first), stop=integer(first + 128), body=body),))


def told(program: TileProgram) -> list[tuple[ElementRun, ...]]:
    """The runs of the accesses of a program, as they are legalised."""
    made = legalise_for_gpu(program, GPU).statements()
    return [s.runs for s in made if isinstance(s, (Load, Store))]


def test_accesses_of_blocks_that_begin_evenly_have_runs() -> None:
    program = copied(64)
    (loop,) = program.loops()
    assert told(program) == [(ElementRun(loop.axis, 8, 8),)] * 2
    assert told(copied(3)) == [(), ()], "eight elements from 3 on lie in two places"


def test_what_is_around_a_loop_decides_only_outside() -> None:
    """A block axis that begins evenly around another loop begins so inside it as well."""
    program = copied(64)
    (loop,) = program.loops()
    one = Loop(elementwise(7, (f32,), f32, lambda x: x).loops()[0].axis, integer(3), integer(5), 1, loop.body)
    assert told(replace(program, body=(replace(loop, body=(one,)),))) == told(program)


def test_the_interpreter_ignores_them() -> None:
    program = copied(64)
    given = [np.arange(240.0, dtype=np.float32), None]
    for have, want in zip(
        run_program(legalise_for_gpu(program, GPU), given), run_program(program, given), strict=True
    ):
        np.testing.assert_array_equal(have, want)
