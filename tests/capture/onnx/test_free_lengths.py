"""Pooling along a dim of free length leaves it free: one graph serves all lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tests.support.onnx_models import model, node, value

import tilewright

POOLS: dict[str, tuple[str, dict[str, object]]] = {
    "maxima": ("MaxPool", {"kernel_shape": [3], "pads": [1, 1], "strides": [2]}),
    "means": ("AveragePool", {"kernel_shape": [5], "pads": [2, 2], "count_include_pad": 1}),
    "norms": ("LpPool", {"kernel_shape": [3], "p": 2}),
    "all": ("GlobalMaxPool", {}),
}


@pytest.mark.parametrize("name", POOLS)
def test_rows_of_any_length(name: str, tmp_path: Path) -> None:
    kind, attributes = POOLS[name]
    made = model([node(kind, ["x"], ["y"], **attributes)], [value("x", ["n", 3, "length"])], ["y"], {})
    onnx.save(made, tmp_path / "pool.onnx")
    compiled = tilewright.compile(tmp_path / "pool.onnx")
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    tilewright.reset()
    for n, length in ((2, 9), (1, 17), (3, 40), (2, 9)):
        x = np.random.default_rng(length).standard_normal((n, 3, length)).astype(np.float32)
        (want,) = session.run(None, {"x": x})
        np.testing.assert_allclose(compiled(torch.from_numpy(x)), want, rtol=1e-5, atol=1e-5)
    assert tilewright.stats().graphs == 1
