"""Programs without a graph: each op is looked at as it is called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper
from torch import Tensor

import tilewright
from tilewright.capture.harmless.running import HarmlessOps
from tilewright.errors import ModelError
from tilewright.tuning import input_limits
from tilewright.ways import files

aten = torch.ops.aten


def test_known_ops_run_and_others_do_not() -> None:
    x = torch.ones(2, 3, 4, 4)
    norm = torch.nn.BatchNorm2d(3)
    with torch.no_grad(), HarmlessOps():
        norm(F.conv2d(x, torch.ones(3, 3, 1, 1))).add_(1)
        assert torch.equal(torch.empty(999), torch.zeros(999))
        with pytest.raises(ModelError, match=r"memory that is not its own.*resize_"):
            x.resize_(9999)
        with pytest.raises(ModelError, match="native_batch_norm"):
            aten.native_batch_norm(x, None, None, torch.ones(1), torch.ones(1), False, 0.1, 1e-5)


@pytest.mark.parametrize("limit", [1, 20_000])
def test_files_of_many_nodes_obey_the_law(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MODELS", replace(input_limits.MODELS, max_file_nodes=limit))
    shapes = {"q": [1, 2, 3, 8], "k": [1, 2, "n", 8], "v": [1, 2, "m", 8]}
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    nodes = [helper.make_node("Attention", ["q", "k", "v"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 23)]
    )
    onnx.save(model, str(path := tmp_path / "m.onnx"))
    run = tilewright.compile(path)

    def rows(n: int) -> Tensor:
        return torch.linspace(0, 1, 16 * n).reshape(1, 2, n, 8)

    want = F.scaled_dot_product_attention(rows(3), rows(9), rows(9)).relu()
    assert torch.allclose(run(rows(3), rows(9), rows(9)), want)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="as many values as keys"):
        run(rows(3), rows(9), rows(4))
