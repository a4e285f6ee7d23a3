"""The captured graph of a model file is kept by the bytes of the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import tilewright
from tilewright.errors import InputError, ModelError
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


class Scaled(torch.nn.Module):
    """A weight, and a free dim."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((3,), factor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() * self.factor


def write_program(path: Path, module: torch.nn.Module) -> None:
    """An exported program, saved."""
    free = {"x": {0: torch.export.Dim("rows")}}
    torch.export.save(torch.export.export(module, (torch.ones(4, 3),), dynamic_shapes=free), path)


def test_a_saved_program_is_loaded_and_traced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.pt2"
    for factor in (2.0, 3.0):  # another file of the same name is another program
        write_program(path, Scaled(factor))
        first = tilewright.compile(path)
        with monkeypatch.context() as patch:
            patch.setattr(torch.export, "load", None)
            second = tilewright.compile(path)
        assert "capture" in phases(first) and "capture" not in phases(second)
        for model in (first, second):
            check(model, factor)
            assert str(model.inputs[0]).startswith("x: float32[") and "m.pt2" in repr(model)
        assert [str(i) for i in first.inputs] == [str(i) for i in second.inputs]
        tilewright.save(second, tmp_path / "m.tw")
        check(tilewright.load(tmp_path / "m.tw", rebuild=False), factor)
    with pytest.raises(InputError, match="arguments"):
        second(torch.ones(4, 3), torch.ones(4, 3))


def test_a_program_that_writes_begins_anew_each_time(tmp_path: Path) -> None:
    """What it holds is its own."""

    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = torch.nn.Buffer(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x * self.calls

    path = tmp_path / "m.pt2"
    write_program(path, Counts())
    for _ in range(3):
        model = tilewright.compile(path)
        assert [float(torch.as_tensor(model(torch.ones(2, 3)))[0, 0]) for _ in range(2)] == [1.0, 2.0]


@pytest.mark.parametrize("data", [b"", b"PK\3\4", b"nothing"])
def test_what_is_no_program_is_told(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(data)
    with pytest.raises(ModelError, match="torch cannot load this program"):
        tilewright.compile(path)
    with pytest.raises(InputError, match="no such file"):
        tilewright.compile(tmp_path / "other.pt2")
