"""Model files whose control flow depends on data: those nodes run eagerly, the rest is generated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from tests.support.onnx_models import body, model, node, pipeline, value

import tilewright
from tilewright.capture.onnx import load


@pytest.fixture(autouse=True)
def fresh() -> None:
    tilewright.reset()


def saved(proto: onnx.ModelProto, folder: Path) -> str:
    """The path of a file with the model."""
    onnx.save(proto, folder / "model.onnx")
    return str(folder / "model.onnx")


def test_what_lies_between_data_dependent_branches_is_compiled(tmp_path: Path) -> None:
    """Two branches on data: what stands before, between, behind and beside them is generated, for any batch."""
    module = load(pipeline())
    compiled = tilewright.compile(saved(pipeline(), tmp_path))
    for n, sign in ((3, 1.0), (5, -1.0), (1, 0.01), (2, 1.0)):
        x = torch.randn(n, 4) * sign
        torch.testing.assert_close(compiled(x), module(x))
    coverage = compiled.coverage
    assert {row.reason for row in coverage.need} == {"control flow that depends on data"}
    assert len(coverage.need) == 2 and all("If" in row.name for row in coverage.need)
    assert "Softmax" not in str(coverage) and coverage.generated >= 6 and compiled.kernels
    graphs = tilewright.stats().graphs
    compiled(torch.randn(9, 4))
    assert tilewright.stats().graphs == graphs


def test_a_loop_on_data_is_one_op(tmp_path: Path) -> None:
    """exp(x) is generated, then x is doubled until its sum is large, then a softmax is generated."""
    double = body(
        [
            node("Add", ["v", "v"], ["w"]),
            node("ReduceSum", ["w"], ["total"], keepdims=0),
            node("Less", ["total", "limit"], ["again"]),
        ],
        [value("i", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("v", None)],
        [value("again", [], TensorProto.BOOL), "w"],
        {"limit": np.array(100.0, np.float32)},
    )
    nodes = [
        node("Exp", ["x"], ["e"]),
        node("Loop", ["", "yes", "e"], ["grown"], name="grow", body=double),
        node("Softmax", ["grown"], ["y"], axis=-1),
    ]
    constants = {"yes": np.array(True)}
    proto = model(nodes, [value("x", ["n", 4])], ["y"], constants)
    module, compiled = load(proto), tilewright.compile(saved(proto, tmp_path))
    for n in (2, 5):
        x = torch.randn(n, 4)
        torch.testing.assert_close(compiled(x), module(x))
    assert not compiled.coverage.need and [row.reason for row in compiled.coverage.own] == ["loop"]
    assert compiled.coverage.generated == 5
