"""The check on a device, as far as it can be tried without one."""

from __future__ import annotations

import pytest
import torch
from benchmarks.device_check import Check, checks, judge, run

from tests.schedule.corpus import CASES


def test_every_case_is_checked_in_every_type() -> None:
    names = [c.name for c in checks()]
    assert len(set(names)) == len(names)
    for case in CASES:
        assert {f"{case.name}-{t}" for t in ("float32", "float16", "bfloat16")} <= set(names)


def test_a_wrong_result_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    x = [torch.randn(50)]
    good = run(Check("good", lambda: judge(torch.exp, torch.exp, x)))
    bad = run(Check("bad", lambda: judge(torch.exp, lambda t: torch.exp(t) * 1.001, x)))
    assert good.passed and good.said.startswith("k ")
    assert not bad.passed and "AssertionError" in bad.said and "smallest k" in bad.said
