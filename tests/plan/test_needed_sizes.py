"""Indices into no elements are refused before a kernel reads."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor

import tilewright
from tilewright.errors import NoElements


def test_a_file_of_free_sizes(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", "columns"])
    i = helper.make_tensor_value_info("i", TensorProto.INT64, ["n"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("Gather", ["x", "i"], ["y"], axis=1)], "g", [x, i], [y])
    onnx.save(helper.make_model(graph), str(path := tmp_path / "m.onnx"))
    run = tilewright.compile(path)
    places, nowhere = torch.tensor([0, 1]), torch.tensor([], dtype=torch.int64)
    assert torch.equal(run(torch.ones(3, 4), places), torch.ones(3, 2))  # type: ignore[arg-type]
    assert run(torch.ones(3, 0), nowhere).shape == (3, 0)  # type: ignore[union-attr]
    assert run(torch.ones(0, 4), places).shape == (0, 2)  # type: ignore[union-attr]
    with pytest.raises(NoElements, match="an index into no elements"):
        run(torch.ones(3, 0), places)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_calls_find() -> None:
    def function(x: Tensor, i: Tensor) -> Tensor:
        return (x[x > 0] * 2)[i] + 1

    torch._dynamo.reset()
    run = torch.compile(function, backend=tilewright.backend, fullgraph=True)
    assert torch.equal(run(torch.ones(5), torch.tensor([0, 1])), torch.full((2,), 3.0))
    with pytest.raises(IndexError, match="an index into no elements"):
        run(-torch.ones(5), torch.tensor([0, 1]))
    assert run(-torch.ones(5), torch.tensor([], dtype=torch.int64)).shape == (0,)
