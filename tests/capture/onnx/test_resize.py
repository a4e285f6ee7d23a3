"""Resize: which element is the nearest one, where that is decided by the last bit of a coordinate or by the opset."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from tests.support.onnx_models import model, node, value

from tilewright.capture.onnx import load

ROW = np.arange(11, dtype=np.float32).reshape(1, 1, 1, 11)


def _both(inputs: list[str], scale: float, opset: int, **attributes: object) -> tuple[np.ndarray, np.ndarray]:
    scales = np.array([1, 1, 1, scale], np.float32)
    m = model(
        [node("Resize", inputs, ["y"], mode="nearest", **attributes)],
        [value("x", [1, 1, 1, 11])],
        ["y"],
        {"s": scales},
        opset,
    )
    wanted = onnxruntime.InferenceSession(m.SerializeToString()).run(None, {"x": ROW})[0]
    got = load(m)(torch.from_numpy(ROW))
    return (got[0] if isinstance(got, (tuple, list)) else got).numpy(), np.asarray(wanted)


@pytest.mark.parametrize("scale", [0.3, 0.6, 0.7, 1.6, 2.3])
def test_opset_10_rounds_up_where_it_shrinks(scale: float) -> None:
    got, wanted = _both(["x", "s"], scale, 10)
    np.testing.assert_array_equal(got, wanted)


def test_opset_10_gives_what_the_standards_own_test_of_it_says() -> None:
    m = model(
        [node("Resize", ["x", "s"], ["y"], mode="nearest")],
        [value("x", [1, 1, 2, 4])],
        ["y"],
        {"s": np.array([1, 1, 0.6, 0.6], np.float32)},
        10,
    )
    got = load(m)(torch.arange(1.0, 9.0).reshape(1, 1, 2, 4))
    assert (got[0] if isinstance(got, (tuple, list)) else got).tolist() == [[[[1.0, 3.0]]]]


@pytest.mark.parametrize("scale", [0.3, 0.6, 0.7, 1.6, 2.3])
@pytest.mark.parametrize("rounding", ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
def test_ties_are_told_in_singles(rounding: str, scale: float) -> None:
    """7 / 0.7 is 10, and a single 0.7 is a little less than that."""
    attributes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": rounding}
    got, wanted = _both(["x", "", "s"], scale, 13, **attributes)
    np.testing.assert_array_equal(got, wanted)
