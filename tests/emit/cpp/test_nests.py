"""Nests of registers as they are printed: those that do not fit their blocks, and loops that end at a mask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.cpp_harness import build, host_target, print_unit, same_as_interpreter
from tests.support.tile_programs import Vars

from tilewright.emit.cpp.unit import emit_unit
from tilewright.errors import VerifyError
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, axis, call, integer
from tilewright.ir.program import Buffer, Load, Loop, Nest, Stmt, Store, TileProgram, rewrite_body, value_of
from tilewright.ir.sizes import dims
from tilewright.lower.legalise.cpu import legalise_for_cpu
from tilewright.target import preset

WIDE = preset("x86-64-v4")


def triangle(step: int) -> TileProgram:
    """y = x in the first `step` k + 1 elements of row k, rows walked innermost."""
    k, c, v = Axis("k", integer(4)), Axis("c", integer(64)), Vars()
    x, y = (Buffer(name, f32, integer(4 * 64)) for name in "xy")
    mask = call("lt", axis(c), dims.add(dims.mul(axis(k), integer(step)), integer(1)))
    place, value = dims.add(dims.mul(axis(k), integer(64)), axis(c)), v(f32, k, c)
    body = (Load(value, x, place, mask), Store(y, place, value_of(value), (k, c), mask))
    inner = Loop(c, dims.ZERO, integer(64), 64, body)
    return TileProgram((x, y), (), (Loop(k, dims.ZERO, integer(4), 4, (inner,)),), lane=c, beside=k)


def test_rows_that_begin_to_reach_a_register_late_are_written(tmp_path: Path) -> None:
    programs = [triangle(20), replace(triangle(20), beside=None), triangle(0)]
    unit = build(tmp_path, programs, target=host_target())
    for number, program in enumerate(programs):
        x = np.arange(4 * 64, dtype=np.float32)
        same_as_interpreter(unit, number, program, [x, np.zeros_like(x)])
    assert "break;" in print_unit([triangle(0)], (), WIDE).text


def changed(**fields: object) -> TileProgram:
    """A legalised program, in whose nests some fields have other values."""

    def change(s: Stmt) -> tuple[Stmt, ...] | None:
        return (replace(s, **fields),) if isinstance(s, Nest) else None  # type: ignore[arg-type]

    made = legalise_for_cpu(triangle(0), WIDE)
    return replace(made, body=rewrite_body(made.body, change))


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"loops": ()}, "other loops"), ({"until": call("lt", integer(3), integer(2))}, "no loop ends")],
    ids=["loops", "until"],
)
def test_a_nest_that_does_not_fit_its_block_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        emit_unit([changed(**fields)], (), WIDE)
