"""Examples that repeat elements, or leave gaps, say nothing about the tensors of later calls."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.export import Dim, export

import tilewright
from tilewright.ir.sizes.repeats import repeats, same_repeats

EXAMPLES = {
    "rows": torch.arange(4.0).expand(3, 4),
    "columns": torch.arange(3.0)[:, None].expand(3, 4),
    "windows": torch.arange(9.0).as_strided((3, 4), (1, 1)),
    "gaps": torch.arange(24.0).reshape(3, 8)[:, ::2],
    "nothing": torch.ones(3, 8)[:, :0],
}
LATER = (torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(4, 3).t(), EXAMPLES["columns"])


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + x.sum(0)


@pytest.mark.parametrize("what", EXAMPLES)
def test_files_of_free_sizes(what: str, tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Add", ["a", "x"], ["y"])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", "columns"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [y])), str(path := tmp_path / "m.onnx"))
    run = tilewright.compile(path)
    for t in (EXAMPLES[what], *LATER):
        assert torch.equal(run(t), t.relu() + t)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["rows", "columns"])
@pytest.mark.parametrize("free", [True, False])
def test_exported_programs(what: str, free: bool) -> None:
    program = export(Doubled(), (EXAMPLES[what],), dynamic_shapes=({0: Dim("n", min=3)},) if free else None)
    before = [n.meta["val"].stride() for n in program.graph.nodes if n.op == "placeholder"]
    run = tilewright.compile(program)
    for t in (EXAMPLES[what], *LATER):
        assert torch.equal(run(t), Doubled()(t))  # type: ignore[arg-type]
    assert [n.meta["val"].stride() for n in program.graph.nodes if n.op == "placeholder"] == before


def test_which_strides_repeat() -> None:
    assert repeats((3, 4), (0, 1)) and repeats((3, 4), (1, 1)) and repeats((3, 4), (3, 1))
    assert not repeats((3, 4), (4, 1)) and not repeats((3, 4), (1, 3)) and not repeats((1, 4), (0, 1))
    assert same_repeats((3, 4), (0, 2), (0, 1)) and not same_repeats((3, 4), (4, 1), (0, 1))
