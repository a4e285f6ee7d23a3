"""The captured graph of a model file is kept by the bytes of the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import tilewright
from tilewright.pipeline.compiler import Compiled, watch_compilations
from tilewright.runtime.call.model import CompiledModel


def write(path: Path, factor: float) -> None:
    """y = relu(x) * factor, with a free dim."""
    weight = onnx.numpy_helper.from_array(np.full((3,), factor, np.float32), "w")
    nodes = [onnx.helper.make_node("Relu", ["x"], ["r"]), onnx.helper.make_node("Mul", ["r", "w"], ["y"])]
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["rows", 3]) for n in "xy")
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], [weight])
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, str(path))


def phases(model: CompiledModel) -> list[str]:
    """The names of its phases."""
    return [p.name for p in model.trace.phases]  # type: ignore[attr-defined]


def check(model: CompiledModel, factor: float) -> None:
    """Two sizes of the same graph."""
    for rows in (4, 6):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(model(x), x.relu() * factor)


def test_a_second_model_is_not_traced(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    write(path, 2.0)
    first, second = (
        tilewright.compile(path, (torch.ones(4, 3),)),
        tilewright.compile(path, (torch.ones(4, 3),)),
    )
    assert "capture" in phases(first) and "capture" not in phases(second)
    for model in (first, second):
        check(model, 2.0)
        assert (
            str(model.inputs[0]) == "x: float32[rows, 3]" and str(model.outputs[0]) == "y: float32[rows, 3]"
        )
        assert torch.equal(torch.as_tensor(model(x=np.ones((2, 3), np.float32))), torch.full((2, 3), 2.0))
    assert [str(k) for k in first.kernels] == [str(k) for k in second.kernels]
    assert str(first.coverage) == str(second.coverage)


def test_another_file_of_the_same_name_is_traced(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    for factor in (2.0, 3.0):
        write(path, factor)
        model = tilewright.compile(path, (torch.ones(4, 3),))
        check(model, factor)
        assert "capture" in phases(model)


def test_a_file_that_changes_while_it_is_read_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    write(path, 2.0)
    model = tilewright.compile(path)
    write(path, 3.0)
    check(model, 2.0)
    check(tilewright.compile(path), 3.0)
    write(path, 2.0)
    assert "capture" in phases(tilewright.compile(path, (torch.ones(4, 3),)))


def test_an_artifact_is_made_of_it(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    write(path, 2.0)
    for _ in range(2):
        tilewright.save(tilewright.compile(path, (torch.ones(4, 3),)), tmp_path / "m.tw")
        loaded = tilewright.load(tmp_path / "m.tw", rebuild=False)
        check(loaded, 2.0)
        assert str(loaded.inputs[0]) == "x: float32[rows, 3]"


def test_who_watches_sees_the_capture(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    write(path, 2.0)
    tilewright.compile(path, (torch.ones(4, 3),))
    seen: list[Compiled] = []

    def watch(gm: object, frozen: object, done: Compiled, options: object) -> Compiled:
        seen.append(done)
        return done

    with watch_compilations(watch):
        tilewright.compile(path, (torch.ones(4, 3),))
    assert len(seen) == 1


def test_without_a_cache_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", "0")
    path = tmp_path / "m.onnx"
    write(path, 2.0)
    made = [tilewright.compile(path, (torch.ones(4, 3),)) for _ in range(2)]
    assert all("capture" in phases(m) for m in made)
