"""The check on a device, as far as it can be tried without one."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from benchmarks.attention.workloads import WORKLOADS
from benchmarks.device_check import Check, checks, judge, run
from tests.support.corpus import CASES, Case
from torch import Tensor

import tilewright
from benchmarks import device_attention, device_check

DYNAMIC = Case("two", lambda x: torch.exp(x) * 2, ((5, 6),), ({0: "n"},))


def on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[Sequence[Tensor]], Sequence[Tensor]]
) -> None:
    """Checks run here; `before` sees the inputs of every call."""
    monkeypatch.setattr(device_check, "typed", lambda inputs, dtype: list(inputs))
    monkeypatch.setattr(device_check, "judge", lambda f, compiled, inputs: judge(f, compiled, before(inputs)))


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


def test_collected_graphs_of_earlier_checks_are_no_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.disable()  # until the check's own calls
    try:
        garbage: list[object] = [tilewright.compile(torch.nn.ReLU(), (torch.randn(3),))]
        garbage.append(garbage)
        gc.collect()  # now it is old: what Dynamo collects after each compilation leaves it
        del garbage
        torch._dynamo.reset()
        left = len(tilewright.compilations())
        on_the_cpu(monkeypatch, lambda inputs: (gc.collect(), inputs)[1])
        device_check.corpus_case(DYNAMIC, torch.float32, True)
        assert len(tilewright.compilations()) <= left  # one more was made, one went
    finally:
        gc.enable()


def test_a_new_graph_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch, lambda inputs: [t.double() for t in inputs])
    with pytest.raises(AssertionError, match="new graph"):
        device_check.corpus_case(DYNAMIC, torch.float32, True)


def test_each_check_is_run_once_by_one_process_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        device_check.Worker, "check", lambda self, name: device_check.Outcome(name, True, self.device, 0.0)
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    names = [f"check {k}" for k in range(20)]
    found = device_check.all_outcomes(names, 3, None)
    assert sorted(o.name for o in found) == sorted(names) and {o.said for o in found} <= {"2", "5"}
    assert all(o.said == "no time left" for o in device_check.all_outcomes(names, 3, 0.0))


def test_a_process_that_ends_fails_its_check_and_the_next_one_has_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = json.dumps({"name": "next", "passed": True, "said": "", "seconds": 0.0})
    texts = iter(["import sys; sys.exit(3)", f"input(); print({answer!r})"])
    started = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **given: started([sys.executable, "-c", next(texts)], **given)
    )
    worker = device_check.Worker(0, 1)
    ended, passed = worker.check("first"), worker.check("next")
    worker.stop()
    worker.close()
    assert (ended.passed, ended.said) == (False, "ended with 3") and passed.passed


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8, 16)))
    assert device_check.own_cores(0, 4) == [8, 9, 10, 11] and device_check.own_cores(3, 4) == [14, 15, 8, 9]
    assert device_check.own_cores(19, 20) == [15, 8] and device_check.own_cores(0, 1) == list(range(8, 16))
