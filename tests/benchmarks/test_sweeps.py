"""The sweeps over operators and small training programs: a sample of each, and what they must notice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks.gradients.__main__ import PROGRAMS, names
from benchmarks.gradients.judge import Case, Trial
from benchmarks.gradients.judge import judged as judged_program
from benchmarks.gradients.variants import LAYOUTS, PRECISIONS
from benchmarks.ops import judge, scope
from benchmarks.ops.__main__ import entry, totals
from benchmarks.ops.judge import judged
from benchmarks.ops.programs import Program, joined, program, strided
from benchmarks.sweep import Sweep, spread
from torch import Tensor

from benchmarks import promises
from tilewright.accuracy import compare

pytest.importorskip("expecttest")  # torch's own test tools import it
pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLE = ("permute", "cumsum")
TRAINED = ("conv norm relu|fp32|dynamic", "layer norm of the last|bf16|static", "by lists|fp32|static")
SLOW_SAMPLES = 6


@pytest.mark.parametrize("name", SAMPLE)
def test_samples_of_an_operator_are_right_when_compiled(name: str) -> None:
    """Static, dynamic, strided and with gradients."""
    facts = entry(name, "cpu", 2)
    assert facts["right"] == facts["samples"] > 4 and facts["failures"] == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_samples_of_core_operators_are_right_when_compiled(part: int, tmp_path: Path) -> None:
    chosen = [op.full_name for op in scope.chosen("core", "") if not scope.excluded(op)]
    os.environ["TILEWRIGHT_CACHE_DIR"] = str(tmp_path)
    arguments = ("--samples", str(SLOW_SAMPLES))
    found = Sweep("benchmarks.ops", arguments).run(spread(chosen, f"{part + 1}/8"), lambda name, facts: None)
    sums = totals(found)
    assert (sums["wrong"], sums["crashed"], sums["died"]) == (0, 0, []), found


@pytest.mark.parametrize("case", TRAINED)
def test_a_program_is_trained_as_in_eager(case: str) -> None:
    name, precision, batch = case.split("|")
    layouts = ("contiguous", "strided")
    outcomes = judged_program(Case(PROGRAMS[name], PRECISIONS[precision], batch == "dynamic", "cpu", layouts))
    assert {k: o.said for k, o in outcomes.items() if o.state != "right"} == {}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_programs_are_trained_as_in_eager(part: int, tmp_path: Path) -> None:
    os.environ["TILEWRIGHT_CACHE_DIR"] = str(tmp_path)
    cases = [c for c in names("", "") if c.endswith("fp32|dynamic")]
    found = Sweep("benchmarks.gradients").run(spread(cases, f"{part + 1}/8"), lambda name, facts: None)
    bad = {c: f for c, f in found.items() if f.get("wrong") or f.get("crashed") or "died" in f}
    assert bad == {}


def test_there_are_enough_programs() -> None:
    assert len(PROGRAMS) >= 150 and len(LAYOUTS) == 5 and len(PRECISIONS) == 3


# --- what they notice ---


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that adds one thousandth to every result."""

    def wrong(function: object, **options: object) -> object:
        return lambda *args: [t * 1.001 for t in function(*args)]  # type: ignore[operator]

    p = Program("torch.sin({0})", (torch.rand(9),), {"torch": torch})
    monkeypatch.setattr(torch, "compile", wrong)
    (outcome,) = judged([p], lambda k, seed: None, dynamic=False, gradients=False)
    assert outcome.state in ("wrong", "excluded") and "FAIL" in outcome.said


def test_bad_luck_with_integers_is_judged_in_several_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is two ulps off where eager happens to be exact, and like eager in any other order."""
    torch.manual_seed(0)
    drawn = torch.randint(-9, 9, (125,))
    p = Program("torch.var({0}.float())", (drawn,), {"torch": torch})
    found = judge.reference(p, False)
    (eager,), (exact,) = found.eager, found.exact
    assert eager is not None and exact is not None

    def off(t: Tensor) -> Tensor:
        return t.nextafter(2 * t).nextafter(2 * t)

    def compiler(wrong: Callable[[Tensor], bool]) -> object:
        def compiled(function: Callable[..., list[Tensor]], **options: object) -> object:
            def run(*args: Tensor) -> list[Tensor]:
                return [off(t) if wrong(args[0]) else t for t in function(*args)]

            return run

        return compiled

    assert not compare(off(eager), eager, exact).passed
    for wrong, passed in ((lambda x: torch.equal(x, drawn), True), (lambda x: True, False)):
        monkeypatch.setattr(torch, "compile", compiler(wrong))
        assert ("FAIL" not in judge._settled(p, [p] * judge.DRAWS, dynamic=False, gradients=False)) == passed


def test_a_wrong_gradient_is_seen() -> None:
    trial = Trial(Case(PROGRAMS["mlp"], PRECISIONS["fp32"], False, "cpu", ("contiguous",)), "aot_eager")
    assert trial.judge() == [""]
    for p in trial.ours.parameters():
        p.register_hook(lambda g: g * 1.01)
    assert "gradient of" in trial.judge()[0]


def test_a_joined_program_is_its_parts() -> None:
    op = next(o for o in scope.operators() if o.full_name == "add")
    samples = list(op.sample_inputs("cpu", torch.float32))[:3]
    parts = [program(op, s) for s in samples]
    run, args = joined(parts)
    for got, s in zip(run(*args), samples, strict=True):
        torch.testing.assert_close(got, op.op(s.input, *s.args, **s.kwargs))


def test_sparse_tensors_are_left_as_they_are() -> None:
    """Their samples are excluded, not the end of a worker."""
    (kept,) = strided(Program("{0}.sum()", (torch.eye(3).to_sparse_csr(),), {})).tensors
    assert kept.layout is torch.sparse_csr


def test_a_sweep_survives_a_dying_worker_and_goes_on(tmp_path: Path) -> None:
    ledger = tmp_path / "out.jsonl"
    seen: list[str] = []
    sweep = Sweep("tests.benchmarks.sweep_worker", case_seconds=60, ledger=ledger)
    found = sweep.run(["a", "die", "b"], lambda case, facts: seen.append(case))
    assert seen == ["a", "die", "b"] and found["b"] == {"case": "b"} and "exit code 3" in str(found["die"])
    again = sweep.run(["a", "die", "b"], lambda case, facts: seen.append(case))
    assert again == found and len(seen) == 3
    assert [json.loads(line)[0] for line in ledger.read_text().splitlines()] == ["a", "die", "b"]


def test_a_case_without_end_is_cut_off() -> None:
    sweep = Sweep("tests.benchmarks.sweep_worker", case_seconds=5)
    found = sweep.run(["sleep"], lambda case, facts: None)
    assert "no answer after 5 s" in str(found["sleep"])
    assert Sweep("tests.benchmarks.sweep_worker", budget=0.0).run(["a"], lambda case, facts: None) == {}


def test_shards_are_disjoint_and_whole() -> None:
    items = [str(k) for k in range(10)]
    assert sorted(spread(items, "1/3") + spread(items, "2/3") + spread(items, "3/3")) == items
    assert spread(items, "") == items


def test_a_lost_device_is_not_blamed_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fault of a kernel of ours, torch's own programs fail too: the worker ends, its case with it."""
    failed = RuntimeError("misaligned address\nmore")
    promises.blame(failed)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    promises.blame(failed)

    def lost() -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(promises.DeviceLost, match="RuntimeError: misaligned address$"):
        promises.blame(failed)
    with pytest.raises(promises.DeviceLost, match="^eager: RuntimeError"):
        promises.blame(failed, "eager")

    def fail(trial: Trial) -> list[str]:
        raise failed

    monkeypatch.setattr(Trial, "judge", fail)
    with pytest.raises(promises.DeviceLost):
        judged_program(Case(PROGRAMS["glu"], PRECISIONS["fp32"], False, "cpu"))
