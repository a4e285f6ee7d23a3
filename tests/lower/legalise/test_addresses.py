"""Accesses at known distances of each other share an address, which is no part of what a program means."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce

import numpy as np
import pytest
from tests.support.tile_programs import elementwise

from tilewright.emit.triton.kernel import emit_triton
from tilewright.interp.program import run_program
from tilewright.ir.dtype import f32
from tilewright.ir.expr import call, integer
from tilewright.ir.program import Load, Stmt, Store, TileProgram, rewrite_body
from tilewright.ir.selection import ElementRun
from tilewright.ir.sizes import dims
from tilewright.lower.legalise.addresses import share_addresses
from tilewright.lower.legalise.gpu import legalise_for_gpu
from tilewright.lower.variants import NARROW_LIMIT
from tilewright.runtime.cuda.kernels import usual
from tilewright.target import preset

GPU = preset("sm_90")
MAX_DISTANCE = (1 << 31) - 1 - NARROW_LIMIT


def shifted(*distances: int) -> TileProgram:
    """The sum of elements of `len(distances)` buffers, which are one, each so far behind its place."""
    program = elementwise(240, (f32,) * len(distances), f32, lambda *x: reduce(partial(call, "add"), x))
    program = replace(program, body=program.body[:1])
    left = iter(distances)

    def change(s: Stmt) -> tuple[Stmt, ...] | None:
        if not isinstance(s, Load):
            return None
        return (replace(s, buffer=program.params[0], offset=dims.add(s.offset, integer(next(left)))),)

    return replace(program, body=rewrite_body(program.body, change))


def behind(program: TileProgram) -> list[int]:
    made = replace(program, body=share_addresses(program.body, GPU.offset_bytes))
    return [s.behind for s in made.statements() if isinstance(s, (Load, Store))]


@pytest.mark.parametrize(
    ("distances", "found"),
    [
        ((0, 7, -3), [0, 7, -3, 0]),
        ((5,), [0, 0]),
        ((0, MAX_DISTANCE), [0, MAX_DISTANCE, 0]),
        ((0, MAX_DISTANCE + 1, 4), [0, 0, 4, 0]),
        ((0, -MAX_DISTANCE - 1, 4), [0, 0, 4, 0]),
    ],
    ids=["near", "alone", "as far as 32 bits reach", "too far", "too far in front"],
)
def test_what_lies_near_shares_an_address(distances: tuple[int, ...], found: list[int]) -> None:
    assert behind(shifted(*distances)) == found


def test_what_has_runs_keeps_its_own() -> None:
    program = shifted(0, 8)
    (loop,) = program.loops()
    told = (ElementRun(loop.axis, 8, 8),)
    body = rewrite_body(program.body, lambda s: (replace(s, runs=told),) if isinstance(s, Load) else None)
    assert behind(replace(program, body=body)) == [0, 0, 0]


def test_it_is_printed_last_and_means_the_same() -> None:
    program = shifted(0, 7, 3)
    made = legalise_for_gpu(program, GPU)
    text = emit_triton(made, (), usual(made)[0], "k0").text
    assert " + 7)" in text and " + 3)" in text
    given = [np.arange(260.0, dtype=np.float32)] + [None] * (len(program.params) - 1)
    results = [run_program(p, given, {})[-1] for p in (program, made)]
    np.testing.assert_array_equal(*results)


def test_an_instruction_of_some_machines_holds_less() -> None:
    program = shifted(0, 1000, 2000)
    for target, found in ((GPU, [0, 1000, 2000]), (preset("gfx942"), [0, 1000, 0])):
        loads = [s for s in legalise_for_gpu(program, target).statements() if isinstance(s, Load)]
        assert [s.behind for s in loads] == found
