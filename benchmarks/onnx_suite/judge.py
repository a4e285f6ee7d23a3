"""Whether a result is what the suite expects: by its own tolerance, and where that fails by the fp64 rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from onnx import ModelProto

from tilewright.accuracy import compare_trees, in_float64
from tilewright.arrays import tensor_of_array
from tilewright.capture.onnx import load

HALF_TOLERANCE = {"bfloat16": 2.0**-6, "float16": 2.0**-9}
"""The suite's 1e-3 is below one rounding of a half type, and it rounds at each step: a few roundings are allowed."""


def differs(expected: object, actual: object, rtol: float, atol: float) -> str:
    """Why two outputs differ, or an empty string."""
    if isinstance(expected, list):
        if not isinstance(actual, (list, tuple)) or len(actual) != len(expected):
            return "another sequence length"
        pairs = zip(expected, actual, strict=True)
        return next((d for e, a in pairs if (d := differs(e, a, rtol, atol))), "")
    if expected is None or actual is None:
        return "" if expected is actual else "one is absent"
    want, have = np.asarray(expected), np.asarray(actual)
    if want.dtype != have.dtype:
        return f"dtype {have.dtype}, expected {want.dtype}"
    if want.shape != have.shape:
        return f"shape {have.shape}, expected {want.shape}"
    rtol = max(rtol, HALF_TOLERANCE.get(want.dtype.name, 0.0))
    if want.dtype.kind not in "biufc":
        want, have = want.astype(np.float32), have.astype(np.float32)
    if not np.allclose(want, have, rtol=rtol, atol=atol, equal_nan=True):
        error = np.abs(want.astype(np.float64) - have.astype(np.float64)) if want.dtype.kind != "c" else 0
        return f"largest difference {np.nanmax(error):.3g}"
    return ""


def within_rule(
    model: ModelProto, inputs: Sequence[object], expected: Sequence[object], actual: Sequence[object]
) -> str:
    """What the fp64 rule says where it passes `actual` with the suite's values in eager's place, so that the difference
    is noise of the suite; empty where it fails, or cannot say."""
    if not all(isinstance(v, np.ndarray) for v in (*inputs, *expected, *actual)):
        return ""
    exact = in_float64(load(model))(*[_tensor(v) for v in inputs])
    reference = exact if isinstance(exact, tuple) else (exact,)
    verdict = compare_trees([_tensor(v) for v in actual], [_tensor(v) for v in expected], list(reference))
    return f"fp64 rule, the suite's values as eager's: {verdict}" if verdict.passed else ""


def _tensor(value: object) -> torch.Tensor:
    return tensor_of_array(np.array(value))
