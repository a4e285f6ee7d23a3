"""What is selected for machines whose threads share a grid point, and that the meaning stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.tile_programs import elementwise, matrices, softmax

from tilewright.errors import VerifyError
from tilewright.interp.program import run_program
from tilewright.ir.dtype import DType, bf16, f16, f32, f64, i32
from tilewright.ir.expr import axis, call, const, integer
from tilewright.ir.program import Dot, Load, Loop, Stmt, Store, TileProgram, Var, rewrite_body, value_of
from tilewright.ir.selection import MatrixMultiply
from tilewright.lower.legalise.gpu import legalise_for_gpu
from tilewright.target import Target, preset

GPU = preset("sm_90")


def unit_of(program: TileProgram, target: Target = GPU) -> object:
    (dot,) = [s for s in legalise_for_gpu(program, target).statements() if isinstance(s, Dot)]
    return dot.method


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_halves_go_to_the_matrix_unit(dtype: DType) -> None:
    assert unit_of(matrices(dtype, swapped=False)) == MatrixMultiply("straight")
    assert unit_of(matrices(dtype, swapped=True)) == MatrixMultiply("swapped")


@pytest.mark.parametrize("target", [GPU, GPU.rounding_singles(), replace(GPU, matrix_units=())])
def test_singles_are_read_as_the_machine_has_it(target: Target) -> None:
    precision = target.singles
    pieces = precision == "bf16x6"
    assert unit_of(matrices(f32, swapped=False), target) == MatrixMultiply(
        "straight", precision, precision == "ieee"
    )
    sides = "turned" if pieces else "swapped"
    assert unit_of(matrices(f32, swapped=True), target) == MatrixMultiply(
        sides, precision, precision == "ieee"
    )


def test_machines_differ_in_what_they_read() -> None:
    found = {t.singles for t in (GPU, GPU.rounding_singles(), replace(GPU, matrix_units=()))}
    assert found == {"bf16x6", "tf32", "ieee"}


@pytest.mark.parametrize(
    "program", [matrices(f16, False, 8), matrices(f64, False), matrices(i32, False)], ids=["small", "f64", "i32"]
)  # fmt: skip
def test_other_products_are_multiplied_and_added(program: TileProgram) -> None:
    assert unit_of(program) is None


def test_sides_of_two_types_are_multiplied_and_added() -> None:
    program = matrices(f16, False)

    def other(s: Stmt) -> tuple[Stmt, ...] | None:
        return (replace(s, b=replace(s.b, dtype=f32)),) if isinstance(s, Dot) else None

    assert unit_of(replace(program, body=rewrite_body(program.body, other))) is None


def test_only_loops_that_load_do_so_ahead() -> None:
    def stages(program: TileProgram) -> dict[str, int]:
        return {s.axis.name: s.stages for s in legalise_for_gpu(program, GPU).loops()}

    assert stages(matrices(f16, False)) == {"r": 1, "c": 1, "k": 3}
    assert set(stages(replace(matrices(f16, False), stages=1)).values()) == {1}


def test_halves_that_something_else_reads_become_singles() -> None:
    program = matrices(f16, False)
    loads = [s for s in legalise_for_gpu(program, GPU).statements() if isinstance(s, Load)]
    assert [s.as_stored for s in loads] == [True, True]
    (store,) = [s for s in program.statements() if isinstance(s, Store)]

    def stored(s: Stmt) -> tuple[Stmt, ...] | None:
        if not isinstance(s, Dot):
            return None
        return (s, replace(store, value=value_of(Var(s.a.id, f16, s.a.axes)), axes=s.a.axes))

    more = replace(program, body=rewrite_body(program.body, stored))
    kept = [s.as_stored for s in legalise_for_gpu(more, GPU).statements() if isinstance(s, Load)]
    assert kept == [False, True]
    single = legalise_for_gpu(matrices(f32, False), GPU)
    assert not any(s.as_stored for s in single.statements() if isinstance(s, Load))


def test_odd_rows_are_told() -> None:
    assert not legalise_for_gpu(softmax(4, 64, scratch=False), GPU).odd_steps
    assert legalise_for_gpu(softmax(4, 33, scratch=False), GPU).odd_steps


def test_a_store_passes_the_caches_always_or_never() -> None:
    def streamed(stream: object) -> list[bool]:
        program = elementwise(64, (f32,), f32, lambda x: x)

        def change(s: Stmt) -> tuple[Stmt, ...] | None:
            return (replace(s, stream=stream),) if isinstance(s, Store) else None

        made = legalise_for_gpu(replace(program, body=rewrite_body(program.body, change)), GPU)
        return [s.stream is not None for s in made.statements() if isinstance(s, Store)]

    always = const(True, call("lt", integer(1), integer(2)).dtype)
    large = call("lt", integer(1 << 20), axis(elementwise(64, (f32,), f32, lambda x: x).loops()[0].axis))
    assert all(streamed(always)) and not any(streamed(large))


def test_a_target_of_another_kind_is_refused() -> None:
    with pytest.raises(VerifyError, match="takes cpp"):
        legalise_for_gpu(matrices(f16, False), preset("x86-64"))


def test_a_tile_that_is_no_power_of_two_is_refused() -> None:
    (loop, *_) = [s for s in matrices(f16, False).body if isinstance(s, Loop)]
    with pytest.raises(VerifyError, match="power of two"):
        legalise_for_gpu(TileProgram((), (), (replace(loop, tile=48, body=()),)), GPU)


@pytest.mark.parametrize("dtype", [f16, f32])
def test_the_meaning_stays(dtype: DType) -> None:
    program = matrices(dtype, swapped=False)
    legal = legalise_for_gpu(program, GPU)
    assert legal != program and legalise_for_gpu(legal, GPU) == legal
    random = np.random.default_rng(0)
    given = [random.standard_normal(32 * 48), random.standard_normal(48 * 64), None]
    for have, want in zip(run_program(legal, given), run_program(program, given), strict=True):
        np.testing.assert_array_equal(have, want)
