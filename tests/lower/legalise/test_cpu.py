"""What is selected for vectors of elements, and that the meaning stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.tile_programs import Vars, column_merge, row_sum, scaled_product

from tilewright.interp.program import run_program
from tilewright.ir.dtype import f16, f32, i32
from tilewright.ir.expr import Axis, Expr, axis, call, const, integer
from tilewright.ir.program import (
    Buffer,
    Collapse,
    Compute,
    Declare,
    Dot,
    Load,
    Loop,
    Stmt,
    Store,
    TileProgram,
    Update,
    rewrite_body,
    value_of,
)
from tilewright.ir.reduction import Reduction, argmax, maximum, sum_
from tilewright.ir.selection import IN_PLACE, Access, MicroKernel
from tilewright.ir.sizes import dims
from tilewright.lower.legalise.cpu import legalise_for_cpu
from tilewright.target import preset

WIDE = preset("x86-64-v4")


def kernel_of(program: TileProgram, target: str = "x86-64-v4", *, exact: bool = False) -> MicroKernel:
    made = legalise_for_cpu(program, preset(target), exact=exact)
    (dot,) = [s for s in made.statements() if isinstance(s, Dot)]
    assert isinstance(dot.method, MicroKernel)
    return dot.method


def accesses(program: TileProgram, *, exact: bool = False) -> list[Access | None]:
    made = legalise_for_cpu(program, WIDE, exact=exact)
    return [s.access for s in made.statements() if isinstance(s, (Load, Store))]


def absorbed(program: TileProgram) -> list[str]:
    made = legalise_for_cpu(program, WIDE).statements()
    return [type(s).__name__ for s in made if isinstance(s, (Declare, Update)) and s.absorbed]


# --- products ------------------------------------------------------------


@pytest.mark.parametrize(("target", "held"), [("x86-64-v4", 32), ("x86-64-v3", 16), ("x86-64", 16)])
def test_sums_and_operands_fit_the_registers(target: str, held: int) -> None:
    for tile in (5, 16, 30):
        found = kernel_of(scaled_product(tile, 16, tile), target)
        assert (found.rows + 1) * found.registers + 1 <= held


def test_rows_are_cut_evenly() -> None:
    found = kernel_of(scaled_product(16, 32, 16))
    assert (found.rows, found.registers) == (6, 4)
    assert kernel_of(scaled_product(16, 32, 16), exact=True).rows == 1


def test_sums_start_where_the_statement_before_says() -> None:
    scaled = scaled_product(16, 16, 16)
    found = kernel_of(scaled)
    assert found.start == "scaled" and found.factor is not None and absorbed(scaled) == ["Update"]

    def unscaled(s: Stmt) -> tuple[Stmt, ...] | None:
        return () if isinstance(s, Update) else None

    plain = replace(scaled, body=rewrite_body(scaled.body, unscaled))
    assert kernel_of(plain).start == "block" and absorbed(plain) == []

    def inside(s: Stmt) -> tuple[Stmt, ...] | None:
        if isinstance(s, Declare):
            return ()
        return (Declare((s.acc,), (const(0.0, f32),)), s) if isinstance(s, Dot) else None

    fresh = replace(scaled, body=rewrite_body(plain.body, inside))
    assert kernel_of(fresh).start == "nothing" and absorbed(fresh) == ["Declare"]


def test_a_masked_scale_is_done_by_itself() -> None:
    scaled = scaled_product(16, 16, 16)

    def masked(s: Stmt) -> tuple[Stmt, ...] | None:
        if not isinstance(s, Update):
            return None
        return (replace(s, mask=call("lt", axis(s.vars[0].axes[0]), integer(3))),)

    some = replace(scaled, body=rewrite_body(scaled.body, masked))
    assert kernel_of(some).start == "block" and absorbed(some) == []


def test_the_side_without_vectors_is_read_in_place() -> None:
    factor, narrow, wide, out = accesses(scaled_product(21, 37, 16))
    assert narrow == IN_PLACE and factor is wide is out is None


def test_halves_are_converted_before_unless_all_floats_are_exact() -> None:
    half = scaled_product(32, 32, 32, half=True)
    assert IN_PLACE not in accesses(half) and accesses(half)[1] == Access("dense", half.loops()[2].axis)
    assert IN_PLACE in accesses(half, exact=True)


def test_what_something_else_reads_is_not_in_place() -> None:
    program = scaled_product(16, 16, 16)

    def read(s: Stmt) -> tuple[Stmt, ...] | None:
        if not isinstance(s, Dot):
            return None
        narrow = s.a
        more = Compute(replace(narrow, id=narrow.id + 50), call("neg", value_of(narrow)))
        return (more, s)

    assert IN_PLACE not in accesses(replace(program, body=rewrite_body(program.body, read)))


# --- accesses --------------------------------------------------------------


def copied(
    rows: int, lanes: int, step: tuple[int, int], *, other: Expr | None = None, index: bool = False
) -> TileProgram:
    """y[r, c] = x[r * step[0] + c * step[1]] in one block; the place is read from a block of `index` as well."""
    r, c, var = Axis("r", integer(rows)), Axis("c", integer(lanes)), Vars()
    x, y = Buffer("x", f32, integer(4096)), Buffer("y", f32, integer(rows * lanes))
    table = Buffer("table", i32, integer(64))
    v, i = var(f32, r, c), var(i32, r)
    at = dims.add(*(dims.mul(axis(a), integer(n)) for a, n in zip((r, c), step, strict=True)))
    place = dims.add(at, call("cast", value_of(i), dtype=at.dtype)) if index else at
    mask = None if other is None else call("lt", axis(r), integer(rows - 1))
    body: tuple[Stmt, ...] = (
        Load(i, table, axis(r)),
        Load(v, x, place, mask, other),
        Store(y, dims.add(dims.mul(axis(r), integer(lanes)), axis(c)), value_of(v), (r, c)),
    )
    return TileProgram(
        (x, table, y), (), (Loop(r, dims.ZERO, r.extent, rows, (Loop(c, dims.ZERO, c.extent, lanes, body),)),),
        lane=c,
    )  # fmt: skip


def test_a_block_that_is_contiguous_along_another_axis_is_turned() -> None:
    program = copied(16, 16, (1, 16))
    along = program.loops()[0].axis
    assert accesses(program) == [None, Access("turned", along, at_once=True), None]
    masked = accesses(copied(16, 16, (1, 16), other=const(0.0, f32)))[1]
    assert masked == Access("turned", along), "not all of a square is there"


def test_numbers_that_are_converted_are_not_turned_at_once() -> None:
    def halves(s: Stmt) -> tuple[Stmt, ...] | None:
        return (replace(s, buffer=replace(s.buffer, dtype=f16)),) if isinstance(s, Load) else None

    program = copied(16, 16, (1, 16))
    program = replace(program, body=rewrite_body(program.body, halves))
    assert accesses(program)[1] == Access("turned", program.loops()[0].axis)


@pytest.mark.parametrize(
    ("rows", "lanes", "unrolled"), [(16, 16, False), (16, 32, True), (32, 16, False), (32, 32, False)]
)
def test_few_squares_of_a_load_are_written_out(rows: int, lanes: int, unrolled: bool) -> None:
    found = accesses(copied(rows, lanes, (1, rows)))[1]
    assert found is not None and found.unrolled == unrolled


@pytest.mark.parametrize(("rows", "unrolled"), [(16, False), (32, True), (64, True), (80, False)])
def test_few_squares_of_a_store_are_written_out(rows: int, unrolled: bool) -> None:
    def turned(s: Stmt) -> tuple[Stmt, ...] | None:
        if not isinstance(s, Store):
            return None
        r, c = s.axes
        return (replace(s, offset=dims.add(axis(r), dims.mul(axis(c), r.extent))),)

    program = copied(rows, 32, (32, 1))
    store = accesses(replace(program, body=rewrite_body(program.body, turned)))[2]
    assert store == Access("turned", program.loops()[0].axis, unrolled=unrolled)


@pytest.mark.parametrize(
    "program",
    [
        copied(16, 16, (16, 1)),
        copied(16, 16, (1, 1)),
        copied(16, 16, (1, 0)),
        copied(12, 16, (1, 16)),
        copied(16, 2, (1, 16)),
        copied(16, 16, (1, 16), other=call("sqrt", const(2.0, f32))),
        copied(16, 16, (1, 16), index=True),
    ],
    ids=["along the lanes", "twice", "one for all", "no whole tile", "few lanes", "computed", "from data"],
)
def test_others_are_not(program: TileProgram) -> None:
    assert accesses(program)[1] is None


def test_exact_numbers_are_taken_one_by_one() -> None:
    assert accesses(copied(16, 16, (1, 16)), exact=True)[1] is None


# --- merges ------------------------------------------------------------------


def merged(reduction: Reduction, count: int, *, computed: bool = True) -> Collapse:
    """The merge of `count` elements of each lane, as it is selected."""
    program = column_merge(reduction, count, computed=computed)
    legal = legalise_for_cpu(program, WIDE)
    given = [np.arange(count * 16) % 7, None]
    for have, want in zip(run_program(legal, given), run_program(program, given), strict=True):
        np.testing.assert_array_equal(have, want)
    (found,) = [s for s in legal.statements() if isinstance(s, Collapse)]
    return found


@pytest.mark.parametrize(("count", "block"), [(4, 0), (5, 4), (16, 4), (17, 8), (64, 8), (256, 16)])
def test_long_sums_are_added_in_blocks_of_about_their_root(count: int, block: int) -> None:
    assert merged(sum_(f32), count).block == merged(sum_(f32), count, computed=False).block == block


def test_other_merges_are_in_order() -> None:
    assert merged(maximum(f32), 64).block == merged(sum_(i32), 64).block == 0


def test_few_registers_are_merged_pairwise() -> None:
    def pairwise(reduction: Reduction, tile: int) -> bool:
        made = legalise_for_cpu(row_sum(3, 1024, reduction, tile=tile), WIDE).statements()
        (found,) = [s.pairwise for s in made if isinstance(s, Collapse)]
        return found

    assert pairwise(sum_(f32), 128) and pairwise(maximum(f32), 16)
    assert not pairwise(sum_(f32), 256), "9 registers and more go one after the other"
    assert not pairwise(argmax(f32), 64), "a state of two values has a function of its own"


# --- all ---------------------------------------------------------------------


def test_the_meaning_stays() -> None:
    program = scaled_product(21, 37, 16)
    legal = legalise_for_cpu(program, WIDE)
    assert legal != program and legalise_for_cpu(legal, WIDE) == legal
    random = np.random.default_rng(0)
    given = [random.standard_normal(21 * 37), random.standard_normal(37 * 64), None]
    for have, want in zip(run_program(legal, given), run_program(program, given), strict=True):
        np.testing.assert_array_equal(have, want)
