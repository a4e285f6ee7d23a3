"""Copies of compiled models, and why they are not pickled."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

import tilewright
from tilewright.errors import UnsupportedError


def test_a_shallow_copy_calls_the_same_model() -> None:
    module = nn.Linear(4, 3)
    compiled = tilewright.compile(module)
    twin = copy.copy(compiled)
    x = torch.randn(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(twin(x), module(x))
        module.bias.add_(1)
        torch.testing.assert_close(twin(x), compiled(x))


def test_a_deep_copy_has_weights_of_its_own() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = tilewright.compile(module, dims={"input": {0: "n"}})
    x = torch.randn(3, 4)
    with torch.no_grad():
        before = compiled(x)
        twin = copy.deepcopy(compiled)
        for p in module.parameters():
            p.zero_()
        torch.testing.assert_close(twin(x), before)
        torch.testing.assert_close(compiled(x), torch.zeros(3, 4))
        assert twin(torch.randn(5, 4)).shape == (5, 4)  # type: ignore[attr-defined]


def test_deep_copies_of_functions_and_of_what_holds_them() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.relu(x) * 2

    held = {"model": tilewright.compile(program, (torch.ones(3),)), "name": "m"}
    twin = copy.deepcopy(held)
    torch.testing.assert_close(twin["model"](torch.ones(3)), torch.full((3,), 2.0))  # type: ignore[operator]


def test_files_and_programs(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    twin = copy.deepcopy(tilewright.compile(str(path)))
    torch.testing.assert_close(twin(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    copy.deepcopy(tilewright.compile(program))(torch.ones(1, 2))
    with pytest.raises(UnsupportedError, match="copy the exported program"):
        copy.deepcopy(tilewright.compile(program, freeze=False))


def test_pickling_is_refused_with_a_way_out() -> None:
    with pytest.raises(UnsupportedError, match="compile it where it is loaded"):
        pickle.dumps(tilewright.compile(nn.Linear(2, 2)))
