"""Random programs: whatever the statements and expressions, compiled code agrees with the interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.emit.scalar_programs import Maker
from tests.support.cpp_harness import build, same_as_interpreter

from tilewright.interp.algebra import STORAGE
from tilewright.ir.dtype import bool_
from tilewright.ir.sizes import dims


def test_random_programs(tmp_path: Path) -> None:
    programs = [Maker(seed).program() for seed in range(12)]
    unit = build(tmp_path, programs, ("n", "m"))
    for rows, cols in [(3, 37), (1, 1), (2, 64), (2, 131)]:
        sizes = {"n": rows, "m": cols}
        for number, program in enumerate(programs):
            given: list[np.ndarray | None] = []
            for b in program.params:
                count = dims.evaluate(b.size, sizes)
                numbers = np.random.randint(-4, 5, count)
                made = b.name[0] in "yzs"
                given.append(
                    None
                    if made
                    else (numbers > 0 if b.dtype is bool_ else numbers).astype(STORAGE[b.dtype.name])
                )
            try:
                same_as_interpreter(unit, number, program, given, sizes, rtol=1e-6, atol=1e-6)
            except AssertionError as error:
                raise AssertionError(f"program {number} {sizes}: {error}") from error
