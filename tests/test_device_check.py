"""The check on a device, as far as it can be tried without one."""

from __future__ import annotations

import pytest
import torch
from benchmarks import device_attention
from benchmarks.attention.workloads import WORKLOADS
from benchmarks.device_check import Check, checks, judge, run

from tests.schedule.corpus import CASES


def test_every_case_is_checked_in_every_type() -> None:
    names = [c.name for c in checks()]
    assert len(set(names)) == len(names)
    for case in CASES:
        assert {f"{case.name}-{t}" for t in ("float32", "float16", "bfloat16")} <= set(names)


def test_every_core_is_checked_in_every_type() -> None:
    names = {c.name for c in checks()}
    for name in (*WORKLOADS, "guarded"):
        assert {f"attention-{name}-{t}" for t in ("float32", "float16", "bfloat16")} <= names


def test_a_core_is_judged_at_all_lengths() -> None:
    few = ((2, 2), (17, 33), (40, 25))
    assert device_attention.lengths("corm", torch.float32, "cpu", few, 16) == "3 lengths"


def test_a_wrong_result_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    x = [torch.randn(50)]
    good = run(Check("good", lambda: judge(torch.exp, torch.exp, x)))
    bad = run(Check("bad", lambda: judge(torch.exp, lambda t: torch.exp(t) * 1.001, x)))
    assert good.passed and good.said.startswith("k ")
    assert not bad.passed and "AssertionError" in bad.said and "smallest k" in bad.said
