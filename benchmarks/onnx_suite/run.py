"""One case: compile its model, run every data set, judge."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from onnx.backend.test.case.test_case import TestCase

import tilewright
from benchmarks.onnx_suite.cases import plain
from benchmarks.onnx_suite.judge import differs, within_rule
from tilewright.arrays import as_arrays
from tilewright.errors import TilewrightError

PASSED, WRONG, REFUSED, CRASHED = "passed", "wrong", "refused", "crashed"


@dataclass(frozen=True)
class Outcome:
    """What became of one case.

    `refused`: an error of Tilewright's own; `crashed`: any other, a process that died, or one that did not end.
    `noise` says by which rule a case passed that the suite's own tolerance does not let pass. `ops` were captured,
    `generated` of them run in kernels. `cpu_seconds` is time of this process and the C++ compilers it started.
    """

    status: str
    detail: str = ""
    noise: str = ""
    ops: int = 0
    generated: int = 0
    cpu_seconds: float = 0.0

    def facts(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def run_case(case: TestCase, folder: Path) -> Outcome:
    """The outcome of a case whose model is written to `folder`."""
    path = folder / "model.onnx"
    path.write_bytes(case.model.SerializeToString())
    start = _cpu_seconds()
    ops = generated = 0
    status, detail, noise = PASSED, "", ""
    try:
        compiled = tilewright.compile(path)
        for inputs, expected in case.data_sets:
            status, detail, noise = _run_set(compiled, case, [plain(v) for v in inputs], expected)
            if status != PASSED:
                break
        ops, generated = compiled.coverage.ops, compiled.coverage.generated
    except TilewrightError as error:
        status, detail = REFUSED, str(error)
    except Exception as error:  # noqa: BLE001  (any failure is the result to report)
        status, detail = CRASHED, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return Outcome(status, detail, noise, ops, generated, round(_cpu_seconds() - start, 3))


def _run_set(
    compiled: tilewright.CompiledModel, case: TestCase, inputs: Sequence[object], expected: Sequence[object]
) -> tuple[str, str, str]:
    """Status, detail and noise of one data set."""
    with torch.no_grad():
        result = as_arrays(compiled(*inputs))
    actual = result if isinstance(result, tuple) else (result,)
    wanted = [plain(v) for v in expected]
    if len(wanted) != len(actual):
        return WRONG, f"{len(actual)} outputs, expected {len(wanted)}", ""
    reason = next(
        (d for w, a in zip(wanted, actual, strict=True) if (d := differs(w, a, case.rtol, case.atol))), ""
    )
    if not reason:
        return PASSED, "", ""
    noise = within_rule(case.model, inputs, wanted, actual)
    return (PASSED, "", f"{reason}; {noise}") if noise else (WRONG, reason, "")


def _cpu_seconds() -> float:
    """CPU time of this process and its finished children."""
    now = time.process_time()
    try:
        import resource
    except ImportError:  # not on Windows
        return now
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return now + children.ru_utime + children.ru_stime
