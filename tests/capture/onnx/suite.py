"""Running the node cases of ONNX's own backend suite against the importer alone, in eager torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from benchmarks.onnx_suite.cases import plain
from benchmarks.onnx_suite.judge import differs
from onnx import ModelProto
from onnx.backend.test.case.test_case import TestCase

from tilewright.arrays import as_arrays, tensor_of_array
from tilewright.capture.onnx import load
from tilewright.errors import TilewrightError

# Expected values with rounding noise of their own: the absolute tolerance is widened to it.
_NOISE = {"test_dft_inverse": 1e-6, "test_dft_inverse_opset19": 1e-6}


@dataclass(frozen=True)
class Outcome:
    """What became of one case: `pass`, `unsupported` (a clear refusal), `error` or `mismatch`."""

    status: str
    detail: str = ""


def to_torch(value: object) -> object:
    """A test input as the module takes it."""
    if value is None:
        return None
    if isinstance(value, list):
        return [to_torch(v) for v in value]
    return tensor_of_array(np.array(value))


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
            reason = differs(plain(want), as_arrays(have), case.rtol, _NOISE.get(case.name, case.atol))
            if reason:
                return Outcome("mismatch", reason)
    return Outcome("pass")


def _call(module: torch.nn.Module, model: ModelProto, inputs: Sequence[object]) -> Sequence[object]:
    with torch.no_grad():
        result = module(*[to_torch(plain(v)) for v in inputs])
    return result if isinstance(result, tuple) else (result,)
