"""The model beside a clock: what is timed, what is priced again, and how well both agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.model_fit import Pair, fit, on_cpu, programs, recorded_pairs, spearman

from benchmarks import model_fit
from tilewright.target import preset

ROOT = Path(__file__).parents[2]
GEMM = ROOT / "benchmarks" / "results" / "h200" / "gemm.json"


def pairs(*figures: tuple[float, float]) -> list[Pair]:
    return [Pair("k", str(n), modelled, measured) for n, (modelled, measured) in enumerate(figures)]


def test_ranks_that_agree() -> None:
    assert spearman([1, 2, 3, 9], [1, 4, 9, 10]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486833)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0


def test_the_floor_of_a_launch_is_fitted() -> None:
    """The model takes one second for it, the clock says three, and all else takes twice as long."""
    made = fit(pairs(*((1 + x, 3 + 2 * x) for x in (0.5, 1.0, 4.0, 100.0))), 1.0)
    assert made["floor_us"] == pytest.approx(3e6) and made["scale"] == pytest.approx(2)
    assert made["spearman"] == 1 and made["kernels"] == 4
    assert fit(pairs((2.0, 1.0), (3.0, 2.0), (4.0, 3.0)), 1.0)["floor_us"] == 0
    assert fit(pairs((1.0, 2.0)), 1.0)["median_error"] == 0.5


@pytest.mark.usefixtures("costs_of_wide_vectors")
def test_kernels_are_timed_on_a_cpu() -> None:
    kind, name, run, inputs = next(programs(torch.device("cpu")))
    (pair,) = on_cpu(kind, name, run, inputs)
    assert pair.kind == kind and pair.modelled > 0 and pair.measured > 0


def test_no_program_comes_twice_and_a_budget_leaves_out_sizes() -> None:
    first = [kind for kind, *_ in zip_first(30)]
    assert len(set(first[:18])) == 18, "one size of each kind, then the next"


def zip_first(count: int) -> list[tuple[str, str]]:
    made = programs(torch.device("cpu"))
    return [next(made)[:2] for _ in range(count)]


def test_recorded_schedules_are_priced_again(tmp_path: Path) -> None:
    shapes = json.loads(GEMM.read_text())["shapes"]
    few = {name: shapes[name] for name in ("1x4096x4096", "64x4096x4096")}
    for facts in few.values():
        facts["schedules"] = dict(list(facts["schedules"].items())[:3])
    few["1x4096x4096"]["schedules"]["wrong"] = {"schedule": "c9:gridx64", "median_us": 1.0}
    (tmp_path / "gemm.json").write_text(json.dumps({"shapes": few}))
    found = list(recorded_pairs(tmp_path / "gemm.json", preset("sm_90")))
    assert {p.name for p in found} == set(few) and len(found) >= 4
    assert all(0.2 < p.modelled / p.measured < 5 for p in found)


def test_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fit.json"
    assert model_fit.main(["--budget", "0", "--json", str(out)]) == 0
    facts = json.loads(out.read_text())
    assert facts["launch_us"] > 0 and facts["wanted"] == {"spearman": 0.9, "median_error": 0.25}
    made = {"fit": model_fit.fits(pairs((1.0, 2.0), (2.0, 4.0), (3.0, 5.0)), 0.5)}
    assert "k " in model_fit.shown(made["fit"])
    if not torch.cuda.is_available():
        assert model_fit.main(["--device", "cuda"]) == 2
