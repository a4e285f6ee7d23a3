"""Loops that hold a team: threads share out what each step does, without a region for each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import tilewright
from tilewright.runtime import pool


def lstm(path: Path, units: int, batch: int) -> None:
    """A layer with as many inputs as units."""
    rng = np.random.default_rng(0)
    held = {
        "w": rng.standard_normal((1, 4 * units, units)) / units**0.5,
        "r": rng.standard_normal((1, 4 * units, units)) / units**0.5,
        "b": rng.standard_normal((1, 8 * units)),
    }
    row = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["steps", batch, units])
    node = helper.make_node("LSTM", ["x", "w", "r", "b"], ["y", "yh"], hidden_size=units)
    graph = helper.make_graph(
        [node], "g", [row], [onnx.ValueInfoProto(name=n) for n in ("y", "yh")],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in held.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))


@pytest.fixture(autouse=True)
def two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("units", "batch"), [(128, 1), (64, 8), (48, 9), (96, 3)])
def test_threads_change_no_bit(tmp_path: Path, units: int, batch: int) -> None:
    lstm(tmp_path / "m.onnx", units, batch)
    model = tilewright.compile(tmp_path / "m.onnx")
    x = torch.randn(120, batch, units)
    with torch.no_grad():
        shared = [model(x=x) for _ in range(20)]
        torch.set_num_threads(1)
        alone = model(x=x)
    for each in shared:
        assert all(torch.equal(a, b) for a, b in zip(each, alone, strict=True))


def test_a_loop_is_one_region(tmp_path: Path) -> None:
    lstm(tmp_path / "m.onnx", 64, 8)
    model = tilewright.compile(tmp_path / "m.onnx")
    x = torch.randn(120, 8, 64)
    with torch.no_grad():
        model(x=x)
        threads = pool.running()
        assert threads is not None
        before = threads.regions
        for _ in range(10):
            model(x=x)
    assert threads.regions - before <= 10 * 6, "not one for each of 120 steps"


def test_a_short_loop_wakes_nobody(tmp_path: Path) -> None:
    lstm(tmp_path / "m.onnx", 16, 1)
    model = tilewright.compile(tmp_path / "m.onnx")
    x = torch.randn(12, 1, 16)
    with torch.no_grad():
        model(x=x)
        threads = pool.running()
        assert threads is not None
        before = threads.regions
        for _ in range(10):
            model(x=x)
    assert threads.regions == before
