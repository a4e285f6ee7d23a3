"""NaN goes through elementwise ops as in onnxruntime and the standard's reference."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from tests.support.onnx_models import model, node, value

from tilewright.capture.onnx import load

DATA = np.array([np.nan, -2.0, -0.0, 0.0, 3.0, np.inf, -np.inf], np.float32)


@pytest.mark.parametrize(
    "op", ["Sign", "Abs", "Neg", "Relu", "Ceil", "Floor", "Round", "Sigmoid", "Tanh", "Softplus"]
)
def test_nan(op: str) -> None:
    m = model([node(op, ["x"], ["y"])], [value("x", [7])], ["y"])
    wanted = np.asarray(onnxruntime.InferenceSession(m.SerializeToString()).run(None, {"x": DATA})[0])
    got = load(m)(torch.from_numpy(DATA))
    made = (got[0] if isinstance(got, (tuple, list)) else got).numpy()
    np.testing.assert_allclose(made, wanted, rtol=1e-5)
