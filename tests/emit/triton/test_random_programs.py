"""Random programs: whatever the statements and expressions, printed Triton agrees with the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tests.emit.scalar_programs import Maker
from tests.support.triton.harness import Job, build, interpret, same_as_interpreter

from tilewright.interp.algebra import STORAGE
from tilewright.ir.dtype import bool_, f32
from tilewright.ir.expr import cast
from tilewright.ir.program import Compute, Load, Place, Stmt, Store, TileProgram, rewrite_body
from tilewright.ir.sizes import dims
from tilewright.lower.variants import Variant


def without_scratch(program: TileProgram) -> TileProgram:
    """The same program for a machine without scratch memory: what was kept there is computed from what is loaded."""

    def change(s: Stmt) -> Sequence[Stmt] | None:
        if isinstance(s, Store) and s.buffer.place is Place.SCRATCH:
            return ()
        if isinstance(s, Load) and s.buffer.place is Place.SCRATCH:
            return (Compute(s.var, cast(dims.mod(s.offset, dims.integer(5)), f32)),)
        return None

    return replace(program, body=rewrite_body(program.body, change), scratch=())


def jobs_of(program: TileProgram, name: str, variant: Variant) -> list[Job]:
    """Runs with sizes below, at and above the tile."""
    found: list[Job] = []
    for rows, cols in [(3, 37), (1, 1), (2, 131)]:
        sizes = {"n": rows, "m": cols}
        given: list[np.ndarray | None] = []
        for b in program.params:
            count = dims.evaluate(b.size, sizes)
            numbers = np.random.randint(-4, 5, count)
            data = (numbers > 0 if b.dtype is bool_ else numbers).astype(STORAGE[b.dtype.name])
            given.append(None if b.name[0] in "yzs" else data)
        found.append(Job(program, given, sizes, ("n", "m"), variant, f"{name} {rows}x{cols}"))
    return found


def test_random_programs(tmp_path: Path) -> None:
    programs = [without_scratch(Maker(seed).program()) for seed in range(6)]
    jobs = [
        job
        for k, p in enumerate(programs)
        for job in jobs_of(p, f"program {k}", Variant(aligned=False, wide=k % 3 == 0))
    ]
    for job, outcome in zip(jobs, interpret(tmp_path, jobs), strict=True):
        same_as_interpreter(job, outcome, rtol=1e-6, atol=1e-6)
    for k, p in enumerate(programs[:2]):
        assert build(tmp_path / str(k), jobs_of(p, "", Variant(True, k == 0))[0].source()).facts.spills == 0
