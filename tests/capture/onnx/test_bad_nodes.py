"""Nodes that do not fit what reaches them: each gives one of our errors, with the op, the place and a hint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import NodeProto, TensorProto
from tests.support.onnx_models import body, ints, model, node, value

import tilewright
from tilewright.errors import TilewrightError

Array = np.ndarray
ONES = np.ones((2, 4), np.float32)
IMAGE = [value("x", ["b", 3, 8, 8])]


def _case(op: str, constants: Mapping[str, Array] | None = None, **attributes: object) -> NodeProto:
    """A node that reads x and the constants."""
    return node(op, ["x", *(constants or {})], ["y"], **attributes)


def _weight(*shape: int) -> dict[str, Array]:
    return {"w": np.ones(shape, np.float32)}


MATRIX: dict[str, tuple[str, dict[str, Array], dict[str, object]]] = {
    "softmax axis": ("Softmax", {}, {"axis": 5}),
    "attribute of another type": ("Softmax", {}, {"axis": "one"}),
    "attribute is a float": ("Softmax", {}, {"axis": 1.5}),
    "attribute is a list": ("Softmax", {}, {"axis": [1]}),
    "reshape impossible": ("Reshape", {"s": ints(3, 7)}, {}),
    "reshape twice -1": ("Reshape", {"s": ints(-1, -1)}, {}),
    "reshape -5": ("Reshape", {"s": ints(-5, 2)}, {}),
    "reshape 0 beyond": ("Reshape", {"s": ints(2, 4, 0)}, {}),
    "reshape to floats": ("Reshape", {"s": np.array([2.0, 4.0], np.float32)}, {}),
    "perm too long": ("Transpose", {}, {"perm": [0, 1, 2]}),
    "perm repeats": ("Transpose", {}, {"perm": [0, 0]}),
    "gather axis": ("Gather", {"i": ints(0)}, {"axis": 4}),
    "gather float": ("Gather", {"i": np.array([0.5], np.float32)}, {}),
    "gather beyond": ("Gather", {"i": ints(9)}, {"axis": 1}),
    "scatter beyond": ("ScatterElements", {"i": np.full((1, 1), 9), "u": ONES[:1, :1]}, {"axis": 1}),
    "concat axis": ("Concat", {"w": ONES}, {"axis": 3}),
    "concat without axis": ("Concat", {"w": ONES}, {}),
    "concat ranks": ("Concat", _weight(2, 4, 1), {"axis": 0}),
    "concat types": ("Concat", {"w": np.ones((2, 4), np.int64)}, {"axis": 0}),
    "add types": ("Add", {"w": np.ones(4, np.int64)}, {}),
    "add sizes": ("Add", _weight(3), {}),
    "slice lengths": ("Slice", {"s": ints(0, 0), "e": ints(1), "a": ints(0)}, {}),
    "slice axis": ("Slice", {"s": ints(0), "e": ints(1), "a": ints(6)}, {}),
    "slice step 0": ("Slice", {"s": ints(0), "e": ints(1), "a": ints(0), "t": ints(0)}, {}),
    "matmul sizes": ("MatMul", _weight(5, 3), {}),
    "matmul of a number": ("MatMul", {"w": np.array(1, np.float32)}, {}),
    "split sizes": ("Split", {"s": ints(1, 1)}, {"axis": 1}),
    "squeeze": ("Squeeze", {"a": ints(1)}, {}),
    "squeeze axis": ("Squeeze", {"a": ints(8)}, {}),
    "unsqueeze twice": ("Unsqueeze", {"a": ints(0, 0)}, {}),
    "unsqueeze axis": ("Unsqueeze", {"a": ints(9)}, {}),
    "flatten axis": ("Flatten", {}, {"axis": 9}),
    "expand": ("Expand", {"s": ints(2, 5)}, {}),
    "tile": ("Tile", {"s": ints(2, 5, 7)}, {}),
    "pad": ("Pad", {"s": ints(1, 1, 1)}, {}),
    "pad mode": ("Pad", {"s": ints(1, 1, 1, 1)}, {"mode": "zigzag"}),
    "cast to nothing": ("Cast", {}, {"to": 99}),
    "where": ("Where", {"a": ONES, "b": ONES}, {}),
    "not": ("Not", {}, {}),
    "top too many": ("TopK", {"k": ints(9)}, {}),
    "einsum": ("Einsum", {"w": ONES}, {"equation": "ij,kl->mq"}),
    "one hot": ("OneHot", {"d": ints(4), "v": np.array([0, 1], np.float32)}, {"axis": 9}),
    "unknown operator": ("Frobnicate", {}, {}),
}
PICTURES: dict[str, tuple[str, dict[str, Array], dict[str, object]]] = {
    "convolution channels": ("Conv", _weight(3, 4, 1, 1), {}),
    "convolution pads": ("Conv", _weight(3, 3, 1, 1), {"pads": [1, 1, 1]}),
    "convolution strides": ("Conv", _weight(3, 3, 1, 1), {"strides": [0, 0]}),
    "kernel too large": ("Conv", _weight(3, 3, 11, 11), {}),
    "pool kernel": ("MaxPool", {}, {"kernel_shape": [3]}),
    "no pool kernel": ("MaxPool", {}, {}),
    "norm": ("BatchNormalization", {n: np.ones(5, np.float32) for n in "abcd"}, {}),
    "blocks of 0": ("DepthToSpace", {}, {"blocksize": 0}),
}


def _refused(path: Path, made: onnx.ModelProto, *inputs: torch.Tensor) -> TilewrightError:
    onnx.save(made, path)
    with pytest.raises(TilewrightError) as caught:
        tilewright.compile(str(path))(*inputs)
    error = caught.value
    assert error.phase and error.place and error.hint
    assert "cannot be traced" not in str(error)
    return error


@pytest.mark.parametrize("name", MATRIX)
def test_matrix(name: str, tmp_path: Path) -> None:
    op, constants, attributes = MATRIX[name]
    made = model([_case(op, constants, **attributes)], [value("x", ["b", 4])], ["y"], constants)
    assert _refused(tmp_path / "m.onnx", made, torch.randn(2, 4)).op


@pytest.mark.parametrize("name", PICTURES)
def test_picture(name: str, tmp_path: Path) -> None:
    op, constants, attributes = PICTURES[name]
    made = model([_case(op, constants, **attributes)], IMAGE, ["y"], constants)
    assert _refused(tmp_path / "m.onnx", made, torch.randn(2, 3, 8, 8)).op == op


def test_shapes_from_data(tmp_path: Path) -> None:
    """Seen only when the model runs."""
    shape = value("s", [2], TensorProto.INT64)
    made = model([node("Reshape", ["x", "s"], ["y"])], [value("x", ["b", 4]), shape], ["y"])
    error = _refused(tmp_path / "m.onnx", made, torch.randn(2, 4), torch.tensor([3, 7]))
    assert error.op == "Reshape"


def test_conditions_and_bodies(tmp_path: Path) -> None:
    x = [value("x", ["b", 4])]
    yes, no = (body([node(op, ["x"], [op])], [], [op]) for op in ("Relu", "Neg"))
    made = model([node("If", ["x"], ["y"], then_branch=yes, else_branch=no)], x, ["y"])
    assert _refused(tmp_path / "m.onnx", made, torch.randn(2, 4)).op == "If"
    short = body([node("Relu", ["q"], ["a"])], [value("q", None)], ["a"])
    made = model([node("Loop", ["n", "", "x"], ["y"], body=short)], x, ["y"], {"n": np.array(3)})
    assert _refused(tmp_path / "m.onnx", made, torch.randn(2, 4)).op == "Loop"


def test_what_nobody_makes(tmp_path: Path) -> None:
    x = [value("x", ["b", 4])]
    made = model([node("Add", ["x", "nowhere"], ["y"])], x, ["y"])
    assert _refused(tmp_path / "m.onnx", made, torch.randn(2, 4)).op == "Add"
    made = model([node("Relu", ["x"], ["z"])], x, ["y"])
    assert "nothing makes output 'y'" in str(_refused(tmp_path / "m.onnx", made, torch.randn(2, 4)))
