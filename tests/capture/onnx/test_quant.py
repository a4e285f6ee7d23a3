"""Quantised weights: packed integers below one byte, by tensor, by axis, by block."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.support.onnx_models import model, node, value

from tilewright.capture.onnx import load
from tilewright.errors import ModelError, UnsupportedError

KINDS = {
    "int4": (ml_dtypes.int4, -8, 8),
    "uint4": (ml_dtypes.uint4, 0, 16),
    "int2": (ml_dtypes.int2, -2, 2),
    "uint2": (ml_dtypes.uint2, 0, 4),
    "int8": (np.int8, -128, 128),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [0, 4])
def test_packed_weights(kind: str, block: int) -> None:
    """x @ dequantised weight, per column or per block of 4 rows."""
    dtype, low, high = KINDS[kind]
    generator = np.random.default_rng(0)
    w = generator.integers(low, high, (8, 3))
    scale = generator.random((2, 3) if block else 3).astype(np.float32)
    nodes = [
        node("DequantizeLinear", ["w", "s"], ["d"], axis=0 if block else 1, block_size=block),
        node("MatMul", ["x", "d"], ["y"]),
    ]
    m = model(nodes, [value("x", ["n", 8])], ["y"], {"s": scale}, opset=25)
    m.graph.initializer.append(numpy_helper.from_array(w.astype(dtype), "w"))
    x = generator.random((2, 8)).astype(np.float32)
    want = x @ (w * (scale.repeat(4, 0) if block else scale)).astype(np.float32)
    np.testing.assert_allclose(load(m)(torch.from_numpy(x)).numpy(), want, rtol=1e-5, atol=1e-5)


def test_packed_weights_elsewhere_are_refused() -> None:
    m = model([node("Add", ["x", "w"], ["y"])], [value("x", [4])], ["y"], opset=25)
    m.graph.initializer.append(numpy_helper.from_array(np.zeros(4, ml_dtypes.int4), "w"))
    with pytest.raises(UnsupportedError, match="below one byte"):
        load(m)
    m = model([node("QuantizeLinear", ["x", "s", "w"], ["y"])], [value("x", [4])], ["y"], opset=25)
    m.graph.initializer.append(numpy_helper.from_array(np.zeros((), ml_dtypes.int4), "w"))
    m.graph.initializer.append(numpy_helper.from_array(np.ones((), np.float32), "s"))
    with pytest.raises(UnsupportedError, match="below one byte"):
        load(m)


def test_packed_data_of_the_wrong_length() -> None:
    m = model(
        [node("DequantizeLinear", ["w", "s"], ["y"])], [], ["y"], {"s": np.ones((), np.float32)}, opset=25
    )
    m.graph.initializer.append(helper.make_tensor("w", TensorProto.INT4, [4], b"\0\0", raw=True))
    m.graph.initializer[-1].dims[0] = 5
    with pytest.raises(ModelError, match="bytes for shape"):
        load(m)
