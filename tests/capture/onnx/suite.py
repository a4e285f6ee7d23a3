"""Running the node cases of ONNX's own backend suite against the importer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx.backend.test.case.test_case import TestCase

from tilewright.arrays import tensor_of_array
from tilewright.capture.onnx import load
from tilewright.errors import TilewrightError

UNSUPPORTED = Path(__file__).with_name("unsupported.txt")

# Expected values with rounding noise of their own: the absolute tolerance is widened to it.
_NOISE = {"test_dft_inverse": 1e-6, "test_dft_inverse_opset19": 1e-6}

_EXTENDED = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e4m3fnuz: (torch.uint8, ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    torch.float8_e5m2fnuz: (torch.uint8, ml_dtypes.float8_e5m2fnuz),
    torch.float8_e8m0fnu: (torch.uint8, ml_dtypes.float8_e8m0fnu),
}


@dataclass(frozen=True)
class Outcome:
    """What became of one case: `pass`, `unsupported` (a clear refusal), `error` or `mismatch`."""

    status: str
    detail: str = ""


@cache
def cases() -> tuple[TestCase, ...]:
    """All node cases of the installed onnx."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        return tuple(load_model_tests(kind="node"))


def is_expanded(name: str) -> bool:
    """Whether a case is another one with its function body inlined."""
    return "_expanded" in name


def left_out() -> list[tuple[re.Pattern[str], str]]:
    """The families of `unsupported.txt`: pattern of the case name, reason."""
    rows = [line.split("#", 1)[0].strip() for line in UNSUPPORTED.read_text().splitlines()]
    pairs = [row.split(None, 1) for row in rows if row]
    return [(re.compile(pattern), reason) for pattern, reason in pairs]


def to_torch(value: object) -> object:
    """A test input as the module takes it."""
    if value is None:
        return None
    if isinstance(value, list):
        return [to_torch(v) for v in value]
    return tensor_of_array(np.array(value))


def to_numpy(value: object) -> object:
    """A module output as the suite compares it."""
    if isinstance(value, list):
        return [to_numpy(v) for v in value]
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach().contiguous()
    if tensor.dtype in _EXTENDED:
        width, dtype = _EXTENDED[tensor.dtype]
        return tensor.view(width).numpy().view(dtype).reshape(tuple(tensor.shape))
    return tensor.numpy()


def differs(expected: object, actual: object, rtol: float, atol: float) -> str:
    """Why two outputs differ, or an empty string."""
    if isinstance(expected, list):
        if not isinstance(actual, list) or len(actual) != len(expected):
            return "another sequence length"
        return next(
            (d for e, a in zip(expected, actual, strict=True) if (d := differs(e, a, rtol, atol))), ""
        )
    if expected is None or actual is None:
        return "" if expected is actual else "one is absent"
    want, have = np.asarray(expected), np.asarray(actual)
    if want.dtype != have.dtype:
        return f"dtype {have.dtype}, expected {want.dtype}"
    if want.shape != have.shape:
        return f"shape {have.shape}, expected {want.shape}"
    # The suite's tolerance of 1e-3 is below one rounding of a half type, and it rounds at each step: allow a few.
    rtol = max(rtol, {"bfloat16": 2.0**-6, "float16": 2.0**-9}.get(want.dtype.name, 0.0))
    if want.dtype.kind not in "biufc":
        want, have = want.astype(np.float32), have.astype(np.float32)
    if not np.allclose(want, have, rtol=rtol, atol=atol, equal_nan=True):
        error = np.abs(want.astype(np.float64) - have.astype(np.float64)) if want.dtype.kind != "c" else 0
        return f"largest difference {np.nanmax(error):.3g}"
    return ""


def run_case(case: TestCase) -> Outcome:
    """Import, run on every data set, compare."""
    try:
        module = load(case.model)
    except TilewrightError as error:
        return Outcome("unsupported", str(error))
    for inputs, expected in case.data_sets:
        try:
            outputs = _call(module, case.model, inputs)
        except TilewrightError as error:
            return Outcome("unsupported", str(error))
        except Exception as error:  # noqa: BLE001  (any failure is the result to report)
            return Outcome("error", f"{type(error).__name__}: {error}")
        for want, have in zip(expected, outputs, strict=True):
            reason = differs(plain(want), to_numpy(have), case.rtol, _NOISE.get(case.name, case.atol))
            if reason:
                return Outcome("mismatch", reason)
    return Outcome("pass")


def plain(value: object) -> object:
    """A tensor proto as an array; anything else unchanged."""
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    return value


def _call(module: torch.nn.Module, model: onnx.ModelProto, inputs: Sequence[object]) -> Sequence[object]:
    with torch.no_grad():
        result = module(*[to_torch(plain(v)) for v in inputs])
    return result if isinstance(result, tuple) else (result,)
