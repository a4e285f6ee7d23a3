"""Model files through the entry point: names, dynamic dims, several outputs, wrong inputs, broken files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import tilewright
from tilewright.errors import InputError, ModelError, TilewrightError


@pytest.fixture(autouse=True)
def fresh() -> None:
    tilewright.reset()


def model(folder: Path, x: Sequence[int | str], y: Sequence[int | str]) -> str:
    """A file that computes (relu(x @ w) + y, the sum of y over its last dim)."""
    w = helper.make_tensor("w", TensorProto.FLOAT, [4, 4], np.arange(16, dtype=np.float32) / 16)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Add", ["r", "y"], ["first"]),
        helper.make_node("ReduceSum", ["y", "axes"], ["second"], keepdims=0),
    ]
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", x), ("y", y))]
    outputs = [
        helper.make_tensor_value_info("first", TensorProto.FLOAT, None),
        helper.make_tensor_value_info("second", TensorProto.FLOAT, None),
    ]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [w, axes])
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return str(path)


def wanted(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the file means."""
    w = torch.arange(16, dtype=torch.float32).reshape(4, 4) / 16
    return torch.relu(x @ w) + y, y.sum(1)


def test_tensors_arrays_and_names(tmp_path: Path) -> None:
    compiled = tilewright.compile(model(tmp_path, [3, 4], [3, 4]))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for got in (compiled(x, y), compiled(y=y, x=x), compiled(x, y=y.numpy())):
        assert isinstance(got, tuple)
        torch.testing.assert_close(got, wanted(x, y))
    arrays = compiled(x.numpy(), y.numpy())
    assert all(isinstance(a, np.ndarray) for a in arrays)
    torch.testing.assert_close(tuple(map(torch.from_numpy, arrays)), wanted(x, y))
    assert tilewright.stats().graphs == 1


def test_dynamic_dims_share_one_graph(tmp_path: Path) -> None:
    compiled = tilewright.compile(model(tmp_path, ["n", 4], ["n", 4]))
    for n in (3, 1, 7, 0, 50):
        x, y = torch.randn(n, 4), torch.randn(n, 4)
        torch.testing.assert_close(compiled(x, y), wanted(x, y))
    assert tilewright.stats().graphs == 1


def test_equal_names_are_only_a_hint(tmp_path: Path) -> None:
    compiled = tilewright.compile(model(tmp_path, ["n", 4], ["n", 4]))
    for n, m in ((3, 3), (1, 5), (5, 5), (1, 6)):
        x, y = torch.randn(n, 4), torch.randn(m, 4)
        torch.testing.assert_close(compiled(x, y), wanted(x, y))
    assert tilewright.stats().graphs == 2


def test_unnamed_dims_are_apart(tmp_path: Path) -> None:
    compiled = tilewright.compile(model(tmp_path, ["?", 4], ["", 4]))
    for n, m in ((3, 3), (4, 4)):
        x, y = torch.randn(n, 4), torch.randn(m, 4)
        torch.testing.assert_close(compiled(x, y), wanted(x, y))


def test_dims_of_the_caller(tmp_path: Path) -> None:
    path = model(tmp_path, ["n", 4], ["n", 4])
    compiled = tilewright.compile(path, dims={"x": {0: ("rows", 2, 8)}})
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    torch.testing.assert_close(compiled(x, y), wanted(x, y))
    with pytest.raises(InputError, match="outside its range"):
        compiled(torch.randn(9, 4), torch.randn(9, 4))


def test_wrong_inputs_name_the_input(tmp_path: Path) -> None:
    compiled = tilewright.compile(model(tmp_path, ["n", 4], ["n", 4]))
    x = torch.randn(3, 4)
    for args, kwargs in (
        ((x,), {}),
        ((x, x, x), {}),
        ((x, x.double()), {}),
        ((x, x[0]), {}),
        ((x, torch.randn(3, 5)), {}),
        ((x,), {"z": x}),
        ((x, x), {"y": x}),
    ):
        with pytest.raises(InputError):
            compiled(*args, **kwargs)
    with pytest.raises(TilewrightError):
        compiled(x, torch.randn(5, 4))


def test_outputs_of_the_caller(tmp_path: Path) -> None:
    compiled = tilewright.compile(model(tmp_path, ["n", 4], ["n", 4]))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    out = (torch.empty(3, 4), torch.empty(3))
    got = compiled(x, y, out=out)
    assert isinstance(got, tuple) and got[0] is out[0]
    torch.testing.assert_close(out, wanted(x, y))
    with pytest.raises(InputError):
        compiled(x, y, out=(torch.empty(3, 4), torch.empty(4)))


def test_a_file_compiles_without_inputs(tmp_path: Path) -> None:
    compiled = tilewright.compile(model(tmp_path, ["n", 4], ["n", 4]))
    assert "generated" in str(compiled.coverage) and compiled.kernels
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(compiled(x, y), wanted(x, y))
    assert tilewright.stats().graphs == 1


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"no model")
    with pytest.raises(ModelError):
        tilewright.compile(path)
    whole = Path(model(tmp_path, [3, 4], [3, 4])).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError):
        tilewright.compile(path)


def test_control_flow_that_depends_on_data(tmp_path: Path) -> None:
    def branch(name: str, op: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node(op, ["x"], [name])], name, [], [out])

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["positive"]),
        helper.make_node(
            "If", ["positive"], ["y"], then_branch=branch("a", "Relu"), else_branch=branch("b", "Neg")
        ),
    ]
    zero = helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    path = tmp_path / "if.onnx"
    graph = helper.make_graph(nodes, "g", [x], [y], [zero])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    compiled = tilewright.compile(path)
    torch.testing.assert_close(compiled(torch.tensor([2.0, -1])), torch.tensor([2.0, 0]))
    torch.testing.assert_close(compiled(torch.tensor([-2.0, 1])), torch.tensor([2.0, -1]))
    out = torch.empty(2)
    assert compiled(torch.tensor([-2.0, 1]), out=out) is out
    with pytest.raises(TilewrightError):
        tilewright.compile(path, strict=True)(torch.tensor([2.0, -1]))
