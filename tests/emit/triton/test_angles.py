"""Inverse trigonometric functions of singles as kernels have them: errors, their mean, and what is no usual number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.emit.scalar_programs import pointwise
from tests.support.triton.harness import Job, interpret

from tilewright.ir.dtype import f32
from tilewright.ir.expr import call

COUNT = 1 << 14
RANGES = {
    "atan": (-4.0, 4.0, 1.5, np.arctan),
    "asin": (-1.0, 1.0, 2.4, np.arcsin),
    "acos": (-1.0, 1.0, 1.6, np.arccos),
    "acosh": (1.0, 3.0, 2.6, np.arccosh),
}


def run(op: str, inputs: list[np.ndarray], folder: Path) -> np.ndarray:
    program = pointwise([f32] * len(inputs), [(op, f32, lambda *v: call(op, *v))])
    job = Job(program, [*inputs, None], {"n": len(inputs[0])}, name=op)
    (outcome,) = interpret(folder, [job])
    return outcome.arrays[-1]


def units(made: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Signed errors in units of the last place."""
    return (made.astype(np.float64) - exact) / np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)


@pytest.mark.parametrize("op", RANGES)
def test_errors_are_small_and_even(op: str, tmp_path: Path) -> None:
    """With one single for half of pi, arc tangents of what is above 1 are 0.37 units too large, all of them."""
    low, high, most, exact = RANGES[op]
    x = np.random.default_rng(1).uniform(low, high, COUNT).astype(np.float32)
    error = units(run(op, [x], tmp_path), exact(x.astype(np.float64)))
    assert np.abs(error).max() < most
    for part in (x < -1, (x < 0) & (x > -1), (x > 0) & (x < 1), x > 1):
        assert not part.any() or abs(error[part].mean()) < 0.1


def test_errors_of_angles_of_points(tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    y, x = (draw.uniform(-3, 3, COUNT).astype(np.float32) for _ in range(2))
    error = units(run("atan2", [y, x], tmp_path), np.arctan2(y.astype(np.float64), x.astype(np.float64)))
    assert np.abs(error).max() < 2.5
    for part in (x < 0, x > 0):
        assert abs((error * np.sign(y))[part].mean()) < 0.1


def same(made: np.ndarray, exact: np.ndarray) -> bool:
    """Equal but for rounding, signs of zeros and NaN among what is compared."""
    known = ~np.isnan(exact)
    signs = np.signbit(made[known]) == np.signbit(exact[known])
    return bool(np.allclose(made, exact, 1e-6, 0, equal_nan=True) and signs.all())


ENDS = (0.0, 1.0, np.inf, 1e-42, 3e38, 2.0**30, 1e-20, 0.5)
SPECIAL = np.array([*ENDS, *(-x for x in ENDS), np.nan], np.float32)


@pytest.mark.parametrize("op", RANGES)
def test_what_is_no_usual_number(op: str, tmp_path: Path) -> None:
    with np.errstate(invalid="ignore"):
        wanted = RANGES[op][3](SPECIAL)
    assert same(run(op, [SPECIAL], tmp_path), wanted)


def test_points_on_the_axes(tmp_path: Path) -> None:
    """All pairs of what is special."""
    y, x = (a.ravel() for a in np.meshgrid(SPECIAL, SPECIAL))
    assert same(run("atan2", [y.copy(), x.copy()], tmp_path), np.arctan2(y, x))
