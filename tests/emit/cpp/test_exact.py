"""The exact build: the same loops, masks and pads over the exact element type give the interpreter's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.emit.cpp.memory_programs import matmul, row_and_column, scan, transpose
from tests.support.cpp_harness import Unit, build
from tests.support.tile_programs import M, N, column_sum, elementwise, peeled, row_sum, softmax

from tilewright.interp.algebra import STORAGE
from tilewright.interp.exact import ELEMENT, EXACT, equal, exact_random
from tilewright.interp.program import run_program
from tilewright.ir.dtype import f16, f32, i32
from tilewright.ir.expr import SCALARS, Expr, call, cast, const, where
from tilewright.ir.program import Buffer, Loop, Stmt, TileProgram, rewrite_body
from tilewright.ir.reduction import argmax, logsumexp, moments, product
from tilewright.ir.sizes import dims


def given(program: TileProgram, sizes: dict[str, int], seed: int = 1) -> list[np.ndarray]:
    """Contents of every buffer: unknowns, also where outputs will stand."""
    found: list[np.ndarray] = []
    for k, b in enumerate(program.params):
        count = dims.evaluate(b.size, sizes)
        if b.dtype.is_float:
            found.append(exact_random((count,), 10 * seed + k, 0.1, 2.0))
        else:
            found.append(np.random.default_rng(seed).integers(0, 9, count).astype(STORAGE[b.dtype.name]))
    return found


def results(unit: Unit, number: int, program: TileProgram, sizes: dict[str, int]) -> list[np.ndarray]:
    """What the exact build makes of `given`."""
    arrays = [a.copy() for a in given(program, sizes)]
    assert unit.run(number, arrays, sizes) == 0
    return arrays


def same(program: TileProgram, got: Sequence[np.ndarray], sizes: dict[str, int]) -> bool:
    """Whether every buffer agrees with the interpreter's."""
    want = run_program(program, given(program, sizes), sizes, EXACT)
    assert all(
        g.dtype == (ELEMENT if b.dtype.is_float else g.dtype)
        for b, g in zip(program.params, got, strict=True)
    )
    return all(equal(g, w) for g, w in zip(got, want, strict=True))


def mixed(a: Expr, b: Expr, c: Expr) -> Expr:
    """A body with constants, conditions, casts and exp."""
    s = call("mul", call("add", cast(a, f32), b), const(0.1, f32))
    t = where(call("gt", s, const(0.1, f32)), call("exp", s), call("div", s, const(3, f32)))
    return call("sub", t, cast(call("add", c, const(2, i32)), f32))


PROGRAMS: dict[str, TileProgram] = {
    "mixed": elementwise(N, (f16, f32, i32), f32, mixed, tile=16, chunk=32),
    "softmax": softmax(N, M, tile=16),
    "softmax computed again": softmax(N, M, tile=4, scratch=False),
    "column sum": column_sum(N, M, tile=16),
    "moments": row_sum(N, M, moments(), tile=16),
    "argmax": row_sum(N, M, argmax(f32), tile=16),
    "logsumexp": row_sum(N, M, logsumexp(), tile=4),
    "product": row_sum(N, M, product(f32), tile=16),
    "scan": scan(),
    "transposed": transpose(16, 16),
    "matmul": matmul(4, 16),
    "matmul by blocks": matmul(4, 16, 4),
    "blocks of rows": row_and_column(),
}


@pytest.fixture(scope="module")
def exact_unit(tmp_path_factory: pytest.TempPathFactory) -> Unit:
    """All programs over the exact type."""
    return build(tmp_path_factory.mktemp("exact"), list(PROGRAMS.values()), ("n", "m"), exact=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_exact_build_agrees_with_the_interpreter(exact_unit: Unit, name: str) -> None:
    program = PROGRAMS[name]
    for sizes in ({"n": 5, "m": 37}, {"n": 1, "m": 1}, {"n": 3, "m": 16}):
        got = results(exact_unit, list(PROGRAMS).index(name), program, sizes)
        assert same(program, got, sizes), f"{name} {sizes}"


def test_every_float_operation_is_exact(tmp_path: Path) -> None:
    skipped = {
        "and",
        "or",
        "xor",
        "not",
        "shl",
        "shr",
        "where",
        "cast",
        "narrow",
        "isnan",
        "isinf",
        "acosh",
        "atanh",
    }
    everywhere = {n: rule for n, rule in SCALARS.items() if not n.startswith(("coarse_", "quick_", "close_"))}
    names = [n for n, rule in everywhere.items() if n not in skipped and rule.result == "same"]
    programs = []
    for name in names:

        def body(*args: Expr, name: str = name) -> Expr:
            scaled = [call("mul", a, const(0.4, f32)) for a in args]
            return call(name, *scaled)

        programs.append(elementwise(N, (f32,) * SCALARS[name].arity, f32, body, tile=4, chunk=8))
    unit = build(tmp_path, programs, ("n",), exact=True)
    for k, (name, program) in enumerate(zip(names, programs, strict=True)):
        assert same(program, results(unit, k, program, {"n": 11}), {"n": 11}), name


def wrong_tail(program: TileProgram) -> TileProgram:
    """The program without its masked rest: the tail of every row is lost."""

    def change(s: Stmt) -> Sequence[Stmt] | None:
        return [] if isinstance(s, Loop) and s.start is not dims.ZERO else None

    return replace(program, body=rewrite_body(program.body, change))


def test_wrong_programs_differ(tmp_path: Path) -> None:
    sizes = {"n": 5, "m": 37}
    right = [PROGRAMS["softmax"], PROGRAMS["product"], PROGRAMS["moments"]]
    unit = build(tmp_path, [wrong_tail(p) for p in right], ("n", "m"), exact=True)
    for k, program in enumerate(right):
        assert not same(program, results(unit, k, program, sizes), sizes)


def test_buffers_have_the_layout_of_the_interpreter() -> None:
    assert ELEMENT.itemsize == 33 and Buffer("x", f32, N).dtype is f32
    assert (
        peeled
    )  # the loops of the exact build are those of the float build: same lowering, same text but for types
