"""Functions of a few instructions: how close they are, and what becomes of them far away."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from tests.emit.scalar_programs import pointwise
from tests.support.triton.harness import Job, interpret

from tilewright.ir.dtype import f32
from tilewright.ir.expr import call

COUNT = 1 << 14
SMALL = 2.0**-17


def run(op: str, x: np.ndarray, folder: Path) -> np.ndarray:
    program = pointwise([f32], [(op, f32, lambda v: call(op, v))])
    (outcome,) = interpret(folder, [Job(program, [x, None], {"n": len(x)}, name=op)])
    return outcome.arrays[-1].astype(np.float64)


def exact(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erfc)(x.astype(np.float64))


def test_the_quick_one_is_as_close_as_the_sum_that_it_replaces(tmp_path: Path) -> None:
    x = np.random.default_rng(1).uniform(-6, 6, COUNT).astype(np.float32)
    assert np.abs(run("quick_erfc", x, tmp_path) - exact(x)).max() < 2.0**-22.5


def test_the_coarse_one_errs_less_than_a_rounding_to_halves(tmp_path: Path) -> None:
    x = np.random.default_rng(1).uniform(-6, 6, COUNT).astype(np.float32)
    made, right = run("coarse_erfc", x, tmp_path), exact(x)
    usual = right >= SMALL
    assert np.abs(made / right - 1)[usual].max() < 2.0**-15
    assert np.abs(made - right)[~usual].max() < 2.0**-31 and (~usual).any()


def test_the_quick_tangent_has_a_small_absolute_error(tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(0, 2, COUNT).astype(np.float32)
    assert np.abs(run("quick_tanh", x, tmp_path) - np.tanh(x.astype(np.float64))).max() < 2.0**-21
    far = np.array([40, 1e38, np.inf, -40, -1e38, -np.inf, 0, np.nan], np.float32)
    np.testing.assert_array_equal(run("quick_tanh", far, tmp_path), [1, 1, 1, -1, -1, -1, 0, np.nan])


@pytest.mark.parametrize("op", ["quick_erfc", "coarse_erfc"])
def test_far_away_nothing_is_left(op: str, tmp_path: Path) -> None:
    """Times the argument, too, as in x * erfc(x)."""
    x = np.array([30, 1e3, 1e38, np.inf, -30, -1e38, -np.inf, 0, np.nan], np.float32)
    made = run(op, x, tmp_path)
    np.testing.assert_array_equal(made[:8], [0, 0, 0, 0, 2, 2, 2, 1])
    assert np.isnan(made[8])
