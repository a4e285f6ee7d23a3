"""The GPU benchmarks as far as they go without a GPU: their cases, judgements, turns and small runs on the CPU."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from benchmarks.gpu_cases import CASES, Shape, compulsory
from benchmarks.gpu_peers import EAGER, FUSED, OURS, OURS_DYNAMIC
from benchmarks.gpu_turns import Limits, Turns
from benchmarks.record import Facts

from benchmarks import (
    gpu_clock,
    gpu_figures,
    gpu_models,
    gpu_peers,
    gpu_report,
    gpu_turns,
    launch,
    networks,
    norms,
)
from tilewright import measure
from tilewright.measure import Timing

CPU = torch.device("cpu")


# --- cases -----------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("odd", [False, True])
def test_a_case_and_its_fused_op_are_the_same_function(name: str, odd: bool) -> None:
    torch.manual_seed(0)
    case, shape = CASES[name], Shape(1 << 20, odd, torch.float16, CPU)
    inputs = case.inputs(shape)
    made = {EAGER: measure.flatten(case.composed(*inputs))}
    if case.fused is not None and name != "batch-norm statistics":  # that op of torch is for CUDA only
        made[FUSED] = measure.flatten(case.fused(*inputs))
    verdicts = gpu_peers.judge(made, case, inputs)
    assert all(facts["passed"] for facts in verdicts.values()), verdicts


@pytest.mark.parametrize("name", list(CASES))
def test_a_case_has_the_stated_size_and_its_odd_one_is_unaligned(name: str) -> None:
    case = CASES[name]
    even, odd = (
        max(case.inputs(Shape(4 << 20, odd, torch.float16, CPU)), key=lambda t: t.nbytes)
        for odd in (False, True)
    )
    assert 0.9 * (4 << 20) <= even.nbytes <= 4 << 20
    assert all(extent % 16 == 0 for extent in even.shape[1:])
    assert odd.shape[-1] % 16 != 0 and odd.shape[0] % 2 == 1
    assert compulsory((even,), (odd,)) == even.nbytes + odd.nbytes


# --- clock -----------------------------------------------------------------------


def test_sets_of_inputs_exceed_the_cache() -> None:
    size = gpu_clock.cache_bytes(CPU)
    assert gpu_clock.sets_needed(size, CPU) == gpu_clock.ROTATION
    assert gpu_clock.sets_needed(100 * size, CPU) == gpu_clock.SETS[0]
    assert gpu_clock.sets_needed(1, CPU) == gpu_clock.SETS[1]


def test_a_sample_is_the_mean_over_all_sets() -> None:
    seen: list[float] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        seen.append(float(x))
        return x

    sets = [(torch.tensor(float(i)),) for i in range(4)]
    timed = gpu_clock.time_runs({"a": (call, sets), "b": (call, sets[:2])}, CPU, rounds=3)
    assert len(timed["a"].timing.samples) == 3 and timed["a"].method == "wall"
    assert seen.count(3.0) == 4 and seen.count(0.0) == 8  # one untimed round each


def test_wall_clock_gives_seconds_per_call() -> None:
    calls = [0]

    def run() -> None:
        calls[0] += 1

    timing = gpu_clock.wall_clock({"fast": run}, CPU, rounds=2)["fast"]
    assert calls[0] > 50 and len(timing.samples) == 2


def test_host_time_of_a_call() -> None:
    assert len(gpu_clock.host_time({"a": lambda: None}, CPU, rounds=5)["a"].samples) == 5


# --- right or wrong --------------------------------------------------------------


def judged(mine: torch.Tensor, count: int = 3 * gpu_peers.SAMPLE) -> Facts:
    exact = torch.linspace(1, 2, count, dtype=torch.float64)
    eager = exact.to(torch.float16)
    return gpu_peers.verdict((eager + mine.to(torch.float16),), (eager,), (exact,))


def test_one_wrong_element_outside_the_sample_fails() -> None:
    count = 3 * gpu_peers.SAMPLE
    assert judged(torch.zeros(count))["passed"] is True
    for wrong in (0.5, torch.nan):
        error = torch.zeros(count)
        error[count // 2] = wrong
        facts = judged(error)
        assert facts["passed"] is False and facts["reason"]


def test_wrong_shapes_types_and_counts_fail() -> None:
    eager, exact = torch.ones(4), torch.ones(4).double()
    for mine in ((torch.ones(5),), (torch.ones(4).half(),), (eager, eager)):
        assert gpu_peers.verdict(mine, (eager,), (exact,))["passed"] is False


def test_wrong_integers_fail() -> None:
    eager = torch.arange(2 * gpu_peers.SAMPLE)
    wrong = eager.clone()
    wrong[eager.numel() // 2 + 7] += 1
    assert gpu_peers.verdict((eager.clone(),), (eager,), (eager,))["passed"] is True
    assert gpu_peers.verdict((wrong,), (eager,), (eager,))["passed"] is False


def test_an_attempt_counts_what_is_compiled_in_it() -> None:
    case = CASES["row sums"]
    fixed = torch.compile(gpu_peers.fresh(case.composed), backend="eager", dynamic=False)
    free = torch.compile(gpu_peers.fresh(case.composed), backend="eager", dynamic=True)
    counts = []
    for rows in (3, 5, 5):
        x = torch.randn(rows, 8)
        counts.append([gpu_peers.attempt(call, (x,)).compiled.captured for call in (fixed, free)])
    assert counts == [[1, 1], [1, 0], [0, 0]]


def test_an_attempt_keeps_the_reason() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    assert gpu_peers.attempt(fail, (torch.ones(1),)).result == "RuntimeError: no such kernel"


# --- turns -----------------------------------------------------------------------


def test_timing_waits_for_builders(tmp_path: Path) -> None:
    turns, done = Turns(tmp_path / "turn"), threading.Event()

    def time_alone() -> None:
        with turns.timing():
            done.set()

    thread = threading.Thread(target=time_alone)
    with turns.building(), turns.building():
        thread.start()
        assert not done.wait(0.1)
    assert done.wait(5)
    thread.join()


CHILD = """
import json, sys, time
from pathlib import Path
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
item, path = arguments["--child"], Path(arguments["--child-json"])
import os
assert len(os.sched_getaffinity(0)) <= 4
assert Path(arguments["--turns"]).parent == path.parent and float(arguments["--build-until"]) > 0
path.write_text(json.dumps({"phase": "timing", "rows": [item]}))
if item == "crash":
    sys.exit("no device left")
if item == "slow":
    time.sleep(60)
path.write_text(json.dumps({"phase": "done", "rows": [item, arguments["--rounds"]]}))
"""


def test_children_cost_only_their_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_benchmark.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reports: list[Mapping[str, Facts]] = []
    before = os.sched_getaffinity(0)
    items = ["good", "crash", "slow", "late"]
    found = gpu_turns.run("fake_benchmark", items, ["--rounds", "7"], Limits(1.0, 5.0), 3, reports.append)
    assert list(found) == items
    assert found["good"] == {"phase": "done", "rows": ["good", "7"]}
    assert found["crash"] == {"phase": "timing", "rows": ["crash"], "failed": "exit code 1: no device left"}
    assert found["slow"] == {"phase": "timing", "rows": ["slow"], "failed": "not finished after 5 s"}
    assert found["late"]["rows"] == ["late", "7"]
    assert reports[-1] == found
    assert os.sched_getaffinity(0) == before


# --- figures ---------------------------------------------------------------------


def point(ours: float, peer: float, **changes: object) -> Facts:
    contestants = {
        EAGER: {"median_us": 8 * peer, "accuracy": {"passed": True}},
        FUSED: {"median_us": peer, "accuracy": {"passed": True}},
        OURS: {"median_us": ours, "accuracy": {"passed": True}},
        OURS_DYNAMIC: {"median_us": 1.1 * ours, "accuracy": {"passed": True}},
    }
    facts = {"dtype": "float16", "mebibytes": 64, "odd": False, "special": False, "copy_us": 9.0}
    return {**facts, "contestants": contestants, **changes}  # type: ignore[dict-item]


def lines(cases: Mapping[str, Facts]) -> dict[tuple[str, str], gpu_report.Figure]:
    made = gpu_figures.figures(gpu_figures.rows(cases), norms.recompiled(cases))
    return {(item.name, item.wanted): item for item in made}


def test_figures_pass_and_miss() -> None:
    added = {"captured": 0, "units": 2, "graphs": 0, "fallbacks": 0, "triton": 0}
    flushed = {"copy": 18.0, "copy (kernel)": 17.0, OURS: 19.0}
    special = point(18.0, 20.0, mebibytes=32, special=True, after_a_flush_us=flushed)
    cases: dict[str, Facts] = {
        "rms norm": {
            "points": [point(10.0, 12.0), special, point(10.0, 12.0, odd=True)],
            "recompiles": {f"{OURS_DYNAMIC}, float16": added, "inductor dynamic, float16": added},
        }
    }
    found = lines(cases)
    large = ">= 64 MiB"
    assert found[f"share of copy bandwidth, {large}", ">= 90 %, hope 95 %"].passed is True
    assert found[f"speed over the best peer, {large}", "geomean >= 1.05x"].value == "geomean 1.200x of 1"
    assert found[gpu_figures.SPECIAL, "<= 20 us, hope 17"].value == "19.00 us"
    assert found[f"share of copy bandwidth, {large}, single runs", ">= 90 %, hope 95 %"].passed is None
    assert found["rms norm over composed eager", ">= 5x"].passed is True
    assert found["dynamic over static, multiples of 16", "<= 1.05x"].passed is False
    assert found["dynamic over static, odd sizes", "<= 1.15x"].passed is True
    assert found["recompiles at new sizes", "0"].value == "2 in 1 kernels and types"
    assert found["recompiles at new sizes", "0"].passed is False
    cases["softmax"] = {"points": [point(10.0, 9.0)]}
    assert lines(cases)[f"speed over the best peer, {large}", "none < 0.97x"].passed is False


def test_wrong_and_impossible_results_are_no_winners() -> None:
    wrong, impossible = point(1.0, 12.0), point(1.0, 12.0)
    wrong["contestants"][OURS]["accuracy"] = {"passed": False, "reason": "smallest k is 9"}  # type: ignore[index,call-overload]
    impossible["contestants"][OURS]["impossible"] = "1 us, the memory needs 9 us"  # type: ignore[index,call-overload]
    cases: dict[str, Facts] = {"softmax": {"points": [wrong, impossible, point(10.0, 12.0)]}}
    found = gpu_figures.rows(cases)
    assert [row.speed for row in found] == [None, None, pytest.approx(1.2)]
    assert lines(cases)["rows with wrong results or impossible times", "0"].value == "2 of 3"
    assert "smallest k is 9" in norms.summary(cases, ["float16"])


def test_nothing_measured_is_neither_pass_nor_miss() -> None:
    assert {item.passed for item in lines({}).values()} == {None}


def test_an_impossible_timing_is_said() -> None:
    timed = gpu_clock.Timed(Timing((1e-6,)), "graph")
    facts = norms.contestant(timed, moved=1000, copy=2e-6, bound=1.2e-6, accuracy={})
    assert "the memory needs 1.20 us" in str(facts["impossible"])
    assert "impossible" not in norms.contestant(timed, 1000, 2e-6, 1.02e-6, {})


def test_single_runs_are_a_row_of_their_own() -> None:
    flushed = {"copy": 12.0, "copy (kernel)": 11.0, OURS: 20.0, FUSED: 22.0}
    (row,) = gpu_figures.rows({"softmax": {"points": [point(10.0, 12.0, after_a_flush_us=flushed)]}})
    assert row.single is not None
    assert row.single.share == pytest.approx(0.55) and row.single.speed == pytest.approx(1.1)


def test_reasons_are_told_once() -> None:
    text = gpu_report.grouped([("a", "no time"), ("b", "wrong"), ("c", "no time")], most=1)
    assert text.splitlines() == ["  a and 1 more: no time", "  and 1 more reasons"]


def test_tables_are_aligned() -> None:
    text = gpu_report.text_table("title", ["name", "us"], [["a", "1.0"], ["longer", "10.0"]])
    assert text.splitlines() == ["title", "name      us", "------------", "a        1.0", "longer  10.0"]


# --- networks --------------------------------------------------------------------


def setting_facts(peer: str, micro: float, graph: str = networks.NONE, **more: object) -> dict[str, object]:
    facts = vars(networks.Setting(peer, channels_last=False, graph=graph))
    return {**facts, "median_us": micro, "accuracy": {"passed": True}, **more}


def test_the_best_right_setting_of_each_counts() -> None:
    settings = [
        setting_facts("eager", 90.0),
        setting_facts("inductor", 80.0, networks.OUTSIDE),
        setting_facts("tilewright", 100.0),
        setting_facts("tilewright", 50.0, networks.OWN),
        setting_facts("tilewright", 20.0, networks.OUTSIDE, accuracy={"passed": False, "reason": "NaN"}),
    ]
    facts: dict[str, Facts] = {"net 1": {"network": "net", "batch": 1, "settings": dict(enumerate(settings))}}  # type: ignore[dict-item]
    (row,) = networks.rows(facts)
    assert row.speed() == pytest.approx(80 / 50) and row.speed(graph=False) == pytest.approx(0.9)
    by_name = {(item.name, item.wanted): item for item in networks.figures([row])}
    whole = "networks at batch 1 over the best peer, best settings"
    assert by_name[whole, "geomean >= 1.35x"].passed and by_name[whole, "none < 0.97x"].passed
    assert by_name["networks over the best peer, without graphs", "none < 1.0x"].passed is False
    assert by_name["networks at batch 64 over the best peer, best settings", "none < 0.97x"].passed is None
    assert "NaN" in networks.summary(facts) and "0.050" in networks.summary(facts)


def test_settings_cover_formats_graphs_and_weights() -> None:
    made = networks.settings(gpu_models.NETWORKS["resnet34"], networks.PEERS, (False, True), cuda=True)
    names = [setting.name for setting in made]
    assert len(set(names)) == len(names) == 18
    assert {"eager", "inductor channels-last frozen", "tilewright channels-last own graph"} < set(names)
    assert (
        len(networks.settings(gpu_models.NETWORKS["bert_base"], ("tilewright",), (False,), cuda=False)) == 1
    )


def test_the_first_source_that_works_is_taken() -> None:
    def missing() -> torch.nn.Module:
        raise ImportError("not here")

    network = gpu_models.Network((("a", missing), ("b", lambda: torch.nn.Conv2d(3, 1, 1))))
    assert gpu_models.load(network, CPU, torch.float32).source == "b"
    with pytest.raises(LookupError, match="a: ImportError: not here"):
        gpu_models.load(gpu_models.Network((("a", missing),)), CPU, torch.float32)


def tiny() -> torch.nn.Module:
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(4 * 36, 10))


def test_a_small_network_runs_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "NETWORKS", {"tiny": gpu_models.Network((("here", tiny),), pixels=8)})
    given = ["--device=cpu", "--weights=inputs", "--peers=eager", "--rounds=2", "--child=tiny 2"]
    assert networks.main([*given, f"--child-json={tmp_path / 'a.json'}"]) == 0
    facts = json.loads((tmp_path / "a.json").read_text())
    assert facts["phase"] == "done" and facts["source"] == "here"
    (row,) = networks.rows({"tiny 2": facts})
    assert row.network == "tiny" and row.batch == 2
    assert {setting.name for setting in row.times} == {"eager", "eager channels-last"}


# --- programs --------------------------------------------------------------------


def test_a_kernel_runs_through(tmp_path: Path) -> None:
    given = [
        "--device=cpu",
        "--sizes=0.5,0.25",
        "--dtypes=float32",
        f"--peers=fused,{OURS_DYNAMIC}",
        "--rounds=2",
    ]
    assert norms.main([*given, "--child=row sums", f"--child-json={tmp_path / 'a.json'}"]) == 0
    facts = json.loads((tmp_path / "a.json").read_text())
    assert facts["phase"] == "done" and len(facts["points"]) == 3
    for entry in facts["points"]:
        contestants = entry["contestants"]
        verdicts = [contestants[name].get("accuracy", {}).get("passed") for name in (EAGER, OURS_DYNAMIC)]
        assert verdicts == [True, True], contestants
        assert contestants[FUSED] == {"not_available": "MissingError: torch has no fused op"}
    assert norms.recompiled({"row sums": facts}) == {f"row sums: {OURS_DYNAMIC}, float32": 0}
    assert "row sums" in norms.summary({"row sums": facts}, ["float32"])


def test_no_contestant_is_built_when_time_is_up() -> None:
    builder = norms.Builder(CASES["row sums"], gpu_peers.NAMES, CPU, until=0.0)
    ready = builder.ready(norms.Point("float32", 0.25))
    assert list(ready.calls) == [EAGER]
    assert ready.missing[OURS] == ready.missing[OURS_DYNAMIC] == "MissingError: no time left to build it"


def test_the_special_point_and_an_odd_one_are_there() -> None:
    made = norms.points("rms norm", norms.DTYPES, [64.0, 512.0])
    assert sum(p.special for p in made) == 1 and sum(p.odd for p in made) == 3
    (special,) = (p for p in made if p.special)
    assert special == norms.Point("float16", 32.0, special=True) and made.index(special) == 2
    (x, _) = CASES["rms norm"].inputs(special.shape(CPU))
    assert x.shape == (4096, 4096)


def test_launch_measures_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 8)
    facts = launch.measured("eager", x, rounds=3)
    assert facts["kernels"] == launch.LONG and not facts["kernels_counted"] and float(facts["call_us"]) > 0  # type: ignore[arg-type]
    monkeypatch.setattr(launch, "chain", lambda steps: None)
    assert "not_available" in launch.measured("eager", x, rounds=3)
    assert launch.figures({launch.OURS: {"us_per_kernel": 2.5}})[0].passed is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("program", [norms, networks, launch])
def test_without_a_gpu_the_reason_is_told(program: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([]) == 2  # type: ignore[attr-defined]
    assert "no CUDA device" in capsys.readouterr().err


def test_unknown_names_are_refused() -> None:
    for program, given in ((norms, "--only=rms"), (networks, "--peers=onnxruntime")):
        with pytest.raises(SystemExit):
            program.options([given])


# --- on a GPU --------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_capture_replays_and_refuses() -> None:
    x = torch.ones(4, device="cuda")
    target = torch.zeros(4, device="cuda")
    replay = gpu_clock.capture(lambda: target.add_(x))
    before = target.clone()
    replay()
    assert torch.equal(target, before + 1)
    with pytest.raises(gpu_clock.CaptureError):
        gpu_clock.capture(lambda: x.sum().item())
    assert float(x.sum()) == 4.0
