"""Operators whose rare attributes and values once meant something else here than to onnxruntime or the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tests.support.onnx_models import model, node, value

import tilewright
from tilewright.capture.onnx import load

RNG = np.random.default_rng(3)
ACTIVATIONS = ["Relu", "LeakyRelu", "Softsign", "Tanh", "HardSigmoid", "ScaledTanh"]


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("order", [1, -1])
def test_activations_consume_numbers_in_order(order: int) -> None:
    """A function without use for alpha takes none: the next one gets it."""
    constants = {"w": normal(2, 12, 3), "r": normal(2, 12, 3)}
    layer = node(
        "LSTM", ["x", "w", "r"], ["y"], direction="bidirectional", hidden_size=3,
        activations=ACTIVATIONS[::order], activation_alpha=[0.3, 0.15, 1.2], activation_beta=[0.4, 0.7],
    )  # fmt: skip
    m = model([layer], [value("x", [5, 2, 3])], ["y"], constants)
    x = normal(5, 2, 3)
    wanted = np.asarray(onnxruntime.InferenceSession(m.SerializeToString()).run(None, {"x": x})[0])
    np.testing.assert_allclose(load(m)(torch.from_numpy(x)).numpy(), wanted, rtol=1e-4, atol=1e-6)


def test_nan_exceeds_no_threshold() -> None:
    m = model([node("ThresholdedRelu", ["x"], ["y"], alpha=0.5)], [value("x", [4])], ["y"])
    x = np.array([np.nan, 0.5, 0.75, -np.inf], np.float32)
    wanted = np.asarray(onnxruntime.InferenceSession(m.SerializeToString()).run(None, {"x": x})[0])
    np.testing.assert_array_equal(load(m)(torch.from_numpy(x)).numpy(), wanted)


def test_zeros_are_quantised_by_a_scale_that_divides() -> None:
    outputs = [value("y", [3], 2), value("s", []), value("z", [], 2)]
    m = model([node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])], [value("x", [3])], outputs)
    y, scale, zero = load(m)(torch.zeros(3))
    assert scale.item() > 0
    assert zero.item() == 0
    assert not y.any()


@pytest.mark.parametrize("regions", [0, 3])
def test_regions_with_points_by_their_size(regions: int, tmp_path: Path) -> None:
    """Without `sampling_ratio`, which is what the standard says by default, the model is cut at the node."""
    pooled = node("RoiAlign", ["r", "rois", "batch"], ["p"], output_height=2, output_width=3)
    nodes = [node("Relu", ["x"], ["r"]), pooled, node("Exp", ["p"], ["y"])]
    inputs = [value("x", [2, 3, 8, 9]), value("rois", ["n", 4]), value("batch", ["n"], 7)]
    m = model(nodes, inputs, ["y"])
    corners = np.sort(RNG.uniform(0, 8, (regions, 2, 2)), 1).reshape(regions, 4).astype(np.float32)
    arrays = {"x": normal(2, 3, 8, 9), "rois": corners, "batch": np.arange(regions) % 2}
    wanted = np.asarray(onnxruntime.InferenceSession(m.SerializeToString()).run(None, arrays)[0])
    onnx.save(m, tmp_path / "model.onnx")
    fast = tilewright.compile(tmp_path / "model.onnx")
    np.testing.assert_allclose(np.asarray(fast(**arrays)), wanted, rtol=1e-4, atol=1e-6)
