"""Emitted C++, compiled and run, against numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.cpp_harness import Unit, build, print_units
from tests.support.tile_programs import M, N, column_sum, elementwise, row_sum, softmax

from tilewright.ir.dtype import f32
from tilewright.ir.expr import call
from tilewright.ir.reduction import argmax, moments, sum_
from tilewright.target import preset

SIZES = [(5, 100), (3, 64), (1, 1), (2, 1), (0, 3), (3, 0), (7, 1023), (40, 17)]
BASIC = ["add", "row_sum", "softmax", "column_sum", "argmax", "moments"]


@pytest.fixture(scope="module")
def basic(tmp_path_factory: pytest.TempPathFactory) -> Unit:
    """One unit of kernels with symbolic sizes."""
    programs = [
        elementwise(N, (f32, f32), f32, lambda a, b: call("add", a, b)),
        row_sum(N, M, sum_(f32)),
        softmax(N, M),
        column_sum(N, M),
        row_sum(N, M, argmax(f32)),
        row_sum(N, M, moments()),
    ]
    return build(tmp_path_factory.mktemp("basic"), programs, ("n", "m"))


def reference(name: str, x: np.ndarray) -> list[np.ndarray]:
    """What a basic kernel computes from a matrix."""
    wide = x.astype(np.float64)
    if name == "row_sum":
        return [wide.sum(1)]
    if name == "softmax":
        e = np.exp(wide - wide.max(1, keepdims=True, initial=-np.inf))
        return [e / e.sum(1, keepdims=True)]
    if name == "column_sum":
        return [wide.sum(0)]
    if name == "argmax":
        return [x.max(1), x.argmax(1)]
    return [np.full(len(x), x.shape[1]), wide.mean(1), wide.var(1) * x.shape[1]]


@pytest.mark.parametrize("rows, cols", SIZES)
@pytest.mark.parametrize("name", BASIC[1:])
def test_basic_kernels(basic: Unit, name: str, rows: int, cols: int) -> None:
    if cols == 0 and name in ("argmax", "moments"):
        pytest.skip("no value is defined")
    x = np.random.standard_normal((rows, cols)).astype(np.float32)
    want = reference(name, x)
    outs = [
        np.full(w.shape, 7, np.int64 if name == "argmax" and k else np.float32) for k, w in enumerate(want)
    ]
    assert basic.run(BASIC.index(name), [x, *outs], {"n": rows, "m": cols}) == 0
    for out, expected in zip(outs, want, strict=True):
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("n", [0, 1, 2, 15, 16, 64, 65, 1023, 1024, 1025, 5000])
def test_elementwise_touches_only_its_elements(basic: Unit, n: int) -> None:
    a, b = np.random.standard_normal((2, n)).astype(np.float32)
    out = np.full(n + 64, 7, np.float32)
    basic.run(0, [a, b, out], {"n": n, "m": 1}, pieces=7)
    np.testing.assert_array_equal(out[:n], a + b)
    assert (out[n:] == 7).all()


def test_nothing_from_the_program_reaches_the_text(tmp_path: Path) -> None:
    unit = build(tmp_path, [elementwise(64, (f32,), f32, lambda a: call("neg", a))])
    assert unit.run(0, [np.ones(64, np.float32), np.ones(64, np.float32)]) == 0
    text = (tmp_path / "unit0.cpp").read_text()
    assert "in0" not in text and "out" not in text


def test_units_compiled_side_by_side_are_one_library(tmp_path: Path) -> None:
    programs = [row_sum(N, M, argmax(f32)), softmax(N, M), row_sum(N, M, moments()), column_sum(N, M)]
    unit = build(tmp_path, programs, ("n", "m"), units=2)
    assert len(unit.kernels) == 4
    x = np.random.standard_normal((5, 70)).astype(np.float32)
    best, where = np.zeros(5, np.float32), np.zeros(5, np.int64)
    unit.run(0, [x, best, where], {"n": 5, "m": 70})
    np.testing.assert_array_equal(where, x.argmax(1))
    total = np.zeros(70, np.float32)
    unit.run(3, [x, total], {"n": 5, "m": 70})
    np.testing.assert_allclose(total, x.sum(0), rtol=1e-5, atol=1e-5)
    sources = print_units(programs, ("n", "m"), preset("x86-64-v4"), units=3)
    assert sorted(e for s in sources for e in s.entries) == ["k0", "k1", "k2", "k3"]
    assert [("tw_kernels" in s.text) for s in sources] == [True, False, False]
    assert len(print_units(programs, ("n", "m"), preset("x86-64-v4"))) == 1
    assert len(print_units(programs * 3, ("n", "m"), preset("x86-64-v4"))) == 2
