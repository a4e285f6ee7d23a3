"""Which statements share loops over registers, which of those are written out, and what is merged on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.support.tile_programs import Vars, elementwise, scaled_product

from tilewright.interp.program import run_program
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, Expr, axis, call, integer
from tilewright.ir.program import (
    Buffer,
    Collapse,
    Compute,
    Dot,
    Load,
    Loop,
    Nest,
    Stmt,
    Store,
    TileProgram,
    rewrite_body,
    value_of,
    walk_statements,
)
from tilewright.ir.reduction import maximum
from tilewright.ir.selection import RegisterLoop
from tilewright.ir.sizes import dims
from tilewright.lower.legalise.cpu import legalise_for_cpu
from tilewright.target import preset
from tilewright.tuning.thresholds import CPP_TEXT

WIDE = preset("x86-64-v4")
K, C = Axis("k", integer(64)), Axis("c", integer(64))
X, Y, Z = (Buffer(name, f32, integer(64 * 64)) for name in "xyz")
PLACE = dims.add(dims.mul(axis(K), integer(64)), axis(C))


def blocks(body: Sequence[Stmt], rows: int = 4, lanes: int = 32, beside: Axis | None = None) -> TileProgram:
    """One block over `K` and `C`."""
    inner = Loop(C, dims.ZERO, integer(lanes), lanes, tuple(body))
    outer = Loop(K, dims.ZERO, integer(rows), rows, (inner,))
    return TileProgram((X, Y, Z), (), (outer,), lane=C, beside=beside)


def legal(program: TileProgram) -> TileProgram:
    """The legalised program, which means the same."""
    program.verify()
    made = legalise_for_cpu(program, WIDE)
    made.verify()
    random = np.random.default_rng(0)
    given = [random.integers(-9, 9, 64 * 64).astype(np.float32), None, None]
    for have, want in zip(run_program(made, given), run_program(program, given), strict=True):
        np.testing.assert_array_equal(have, want)
    assert legalise_for_cpu(made, WIDE) is made
    return made


def nests(program: TileProgram) -> list[Nest]:
    return [s for s in legal(program).statements() if isinstance(s, Nest)]


def test_what_one_statement_makes_is_in_a_register_for_the_next() -> None:
    var = Vars()
    v, w = var(f32, K, C), var(f32, K, C)
    body = (Load(v, X, PLACE), Compute(w, call("neg", value_of(v))), Store(Y, PLACE, value_of(w), (K, C)))
    assert nests(blocks(body)) == [Nest((RegisterLoop(K, 4), RegisterLoop(C, 2)), body)]


def test_a_nest_of_one_register_has_no_loops() -> None:
    v = Vars()(f32, C)
    body = (Load(v, X, axis(C)), Store(Y, axis(C), value_of(v), (C,)))
    assert nests(blocks(body, 1, 16)) == [Nest((), body)]


@pytest.mark.parametrize("rows", [16, 17])
def test_what_is_read_behind_is_kept_in_arrays_written_out_if_few(rows: int) -> None:
    var = Vars()
    v, w = var(f32, K, C), var(f32, K, C)
    first, last = (Load(v, X, PLACE), Store(Y, PLACE, value_of(v), (K, C)))
    second = (
        Load(w, Y, dims.add(PLACE, integer(1))),
        Store(Z, PLACE, call("add", value_of(v), value_of(w)), (K, C)),
    )
    kept, rest = nests(blocks((first, last, *second), rows))
    few = rows * 2 <= CPP_TEXT.max_unrolled_registers
    assert (kept.body, kept.keeps) == ((first, last), (v.id,)), "what was stored is read at another place"
    assert (rest.body, rest.keeps) == (second, ())
    assert {x.unrolled for x in (*kept.loops, *rest.loops)} == {few}


def test_scalars_go_before_what_they_do_not_read() -> None:
    var = Vars()
    v, scalar, w = var(f32, K, C), var(f32), var(f32, K, C)
    load, one = Load(v, X, PLACE), Load(scalar, X, dims.ZERO)
    rest = (Compute(w, call("mul", value_of(v), value_of(scalar))), Store(Y, PLACE, value_of(w), (K, C)))
    found = [s for s in legal(blocks((load, one, *rest))).statements() if not isinstance(s, Loop)]
    assert found[0] == one and isinstance(found[1], Nest) and found[1].body == (load, *rest)


def merging(rows: int = 8, *, computed: bool = True) -> TileProgram:
    """The merge over `K` of what is computed, and what is stored behind it."""
    var = Vars()
    v, w, total = var(f32, K, C), var(f32, K, C), var(f32, C)
    body: tuple[Stmt, ...] = (
        Load(v, X, PLACE),
        Compute(w, call("neg", value_of(v))),
        Store(Z, PLACE, value_of(w), (K, C)),
        Collapse((total,), (w if computed else v,), maximum(f32), (K,)),
        Store(Y, axis(C), value_of(total), (C,)),
    )
    return blocks(body, rows, 16)


@pytest.mark.parametrize("rows", [8, 9])
def test_what_is_computed_is_merged_on_the_way(rows: int) -> None:
    first, _ = nests(merging(rows))
    assert isinstance(first.body[-1], Collapse) and first.keeps == ()
    assert first.loops == (RegisterLoop(K, rows, rows <= CPP_TEXT.max_unrolled_registers // 4),)


def test_what_is_loaded_is_merged_behind() -> None:
    made = legal(merging(computed=False))
    assert not any(isinstance(s, Collapse) for n in made.statements() if isinstance(n, Nest) for s in n.body)


def test_along_an_axis_beside_a_block_is_walked_innermost() -> None:
    v = Vars()(f32, K, C)
    body = (Load(v, X, PLACE), Store(Y, PLACE, value_of(v), (K, C)))
    short, long = (nests(blocks(body, rows, 32, K))[0].loops for rows in (8, 9))
    assert short == (RegisterLoop(C, 2), RegisterLoop(K, 8, unrolled=True))
    assert long == (RegisterLoop(C, 2), RegisterLoop(K, 9))


def below(bound: Expr) -> TileProgram:
    """A copy of what lies in `C` below `bound`, with `K` beside it."""
    v, mask = Vars()(f32, K, C), call("lt", axis(C), bound)
    body = (Load(v, X, PLACE, mask), Store(Y, PLACE, value_of(v), (K, C), mask))
    return blocks(body, 4, 32, K)


def test_a_loop_ends_where_a_mask_of_all_effects_does() -> None:
    (nest,) = nests(below(integer(20)))
    assert nest.until == call("lt", axis(C), integer(20))
    (nest,) = nests(replace(below(integer(20)), beside=None))
    assert nest.until is not None


def test_a_loop_over_another_axis_does_not_end_where_its_first_steps_do_nothing() -> None:
    mask = dims.add(dims.mul(axis(K), integer(8)), integer(1))
    (nest,) = nests(below(mask))
    assert nest.loops[-1].axis == K and nest.until is None, "what the first k excludes, the last ones do not"
    (nest,) = nests(replace(below(mask), beside=None))
    assert nest.loops[-1].axis == C and nest.until is not None


def test_sums_of_products_have_a_nest_unless_they_are_micro_kernels() -> None:
    program = scaled_product(16, 16, 16)
    assert not [n for n in walk_statements(legalise_for_cpu(program, WIDE).body) if _is_product(n)]

    def doubled(s: Stmt) -> tuple[Stmt, ...] | None:
        return None if not isinstance(s, Dot) else (replace(s, method=None),)

    loose = replace(program, body=rewrite_body(program.body, doubled), lane=None)
    (nest,) = [n for n in walk_statements(legalise_for_cpu(loose, WIDE).body) if _is_product(n)]
    assert isinstance(nest, Nest) and not any(x.unrolled for x in nest.loops), "256 registers"


def _is_product(s: Stmt) -> bool:
    return isinstance(s, Nest) and isinstance(s.body[0], Dot)


@pytest.mark.parametrize(("name", "width"), [("x86-64-v4", 16), ("x86-64-v3", 8), ("x86-64", 4)])
def test_a_program_says_how_wide_registers_are(name: str, width: int) -> None:
    program = elementwise(64, (f32,), f32, lambda x: x, tile=64)
    assert program.width == 1 and legalise_for_cpu(program, preset(name)).width == width
    assert legalise_for_cpu(program, preset(name), exact=True).width == 1
