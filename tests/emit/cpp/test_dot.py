"""Products of blocks: the micro-kernel for several machines, operands in place and in arrays, tails, starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.cpp_harness import build, host_target, print_unit, same_as_interpreter
from tests.support.tile_programs import COLUMNS, scaled_product

from tilewright.form.products.product_chains import limit_product_chains
from tilewright.ir.dtype import f16, f32
from tilewright.ir.expr import make
from tilewright.ir.form import Form, Item
from tilewright.ir.program import Dot, TileProgram
from tilewright.ir.reduction import sum_
from tilewright.ir.sizes import dims
from tilewright.target import preset

CASES = [
    scaled_product(32, 32, 16),
    scaled_product(21, 37, 16),
    scaled_product(21, 37, 16, across=True),
    scaled_product(33, 20, 32, half=True),
    scaled_product(1, 1, 16),
]


@pytest.mark.parametrize("name", ["x86-64-v4", "x86-64-v3", "x86-64"])
def test_products_agree_with_the_interpreter(tmp_path: Path, name: str) -> None:
    unit = build(tmp_path, CASES, target=preset(name), run_here=True)
    random = np.random.default_rng(1)
    for number, program in enumerate(CASES):
        x, y, _ = (dims.static(b.size) or 0 for b in program.params)
        left = random.standard_normal(x).astype(np.float16 if program.params[0].dtype is f16 else np.float32)
        same_as_interpreter(unit, number, program, [left, random.standard_normal(y).astype(np.float32), None])


def test_products_are_right_as_they_are_written(tmp_path: Path) -> None:
    program = scaled_product(21, 37, 16)
    unit = build(tmp_path, [program], as_written=True)
    random = np.random.default_rng(2)
    left, right = (random.standard_normal(n).astype(np.float32) for n in (21 * 37, 37 * COLUMNS))
    same_as_interpreter(unit, 0, program, [left, right, None])


def sums(
    program: TileProgram, *, summed: bool = True, read: bool = False, stored: bool = False
) -> Form:  # fmt: skip
    """A form with the folds of a program's products, if they are `read`, with a fold over them, and if they are
    `stored`, with an output that is the first one."""
    dots = [s for s in program.statements() if isinstance(s, Dot)]
    items = [Item(n, s.acc.axes, (), (s.k,), sum_(f32), summed=summed) for n, s in enumerate(dots)]
    reader = Item(len(dots), (), (make("value", (), f32, (0, 0)),), dots[0].acc.axes, sum_(f32))
    output = Item(len(dots) + 1, dots[0].acc.axes, (make("value", (), f32, (0, 0)),), param=0)
    return Form((), (), (*items, *([reader] if read else []), *([output] if stored else [])))


@pytest.mark.parametrize("depth", [204, 256])
def test_many_products_are_not_one_chain(tmp_path: Path, depth: int) -> None:
    """A block that holds a class whole sums it in one step."""
    whole = scaled_product(16, depth, 16, step=256)
    program = limit_product_chains(whole, sums(whole), 32)
    unit = build(tmp_path, [program], target=host_target(), run_here=True)
    random = np.random.default_rng(3)
    x, y = (random.standard_normal(s).astype(np.float32) for s in ((16, depth), (depth, COLUMNS)))
    made = same_as_interpreter(unit, 0, program, [x, y, None], rtol=1e-4, atol=1e-4)[2]
    exact = x.astype(np.float64) @ y
    chain = np.cumsum(x[:, :, None] * y, 1, dtype=np.float32)[:, -1]
    mean = lambda z: float(np.sqrt(np.mean((z - exact) ** 2)))  # noqa: E731
    assert mean(made[: exact.size].reshape(exact.shape)) < 0.6 * mean(chain)


@pytest.mark.parametrize("step", [32, 64])
def test_sums_of_products_in_blocks_of_whole_chains_round_alike(tmp_path: Path, step: int) -> None:
    """However many chains a block has; a product of matrices is one chain, in blocks of any size."""
    alone, blocks = (scaled_product(16, 256, 16, step=n) for n in (256, step))
    programs = [limit_product_chains(p, sums(p), 32) for p in (alone, blocks)]
    assert [s.chain for p in programs for s in p.statements() if isinstance(s, Dot)] == [32, 32]
    products = sums(blocks, summed=False, stored=True)
    assert limit_product_chains(blocks, products, 32) == blocks
    unit = build(tmp_path, programs, target=host_target(), run_here=True)
    random = np.random.default_rng(3)
    x, y = (random.standard_normal(s).astype(np.float32) for s in ((16, 256), (256, COLUMNS)))
    y[0] = 1  # what each block scales the sums by
    made = [
        same_as_interpreter(unit, n, p, [x, y, None], rtol=1e-4, atol=1e-4)[2] for n, p in enumerate(programs)
    ]
    assert np.array_equal(*made)


def test_a_class_in_other_pieces_is_one_chain() -> None:
    """Passes may cut it in other pieces, and must round alike."""
    for program in (
        scaled_product(16, 200, 16),
        scaled_product(16, 200, 16, step=40),
        scaled_product(16, 24, 16, step=32),
    ):
        assert limit_product_chains(program, sums(program), 32) == program
    whole = scaled_product(16, 200, 16, step=256)
    assert limit_product_chains(whole, sums(whole), 0) == whole
    for scores in (sums(whole, summed=False, read=True, stored=True), sums(whole, summed=False)):
        assert limit_product_chains(whole, scores, 32) == whole, (
            "a product that may be computed again is one chain"
        )
    for form in (sums(whole), sums(whole, read=True), sums(whole, summed=False, stored=True)):
        (dot,) = [s for s in limit_product_chains(whole, form, 32).statements() if isinstance(s, Dot)]
        assert dot.chain == 32


def test_inputs_are_read_in_place_and_sums_are_scaled_on_the_way() -> None:
    text = print_unit([CASES[0]], (), preset("x86-64-v4")).text
    assert "Start::scaled" in text and "dot<" in text
    assert text.count("load<float") == 2  # the factor and the lane side; never the other one
    assert "alignas(64) float" in print_unit([CASES[3]], (), preset("x86-64-v4")).text
