"""The benchmark of attention variants as far as it goes without a GPU: its rows, judgements, figures, one small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.attention import __main__ as program
from benchmarks.attention import figures, rows, turn
from benchmarks.attention.peers import CUDNN, EAGER, FLEX, INDUCTOR, ORT, OURS
from benchmarks.attention.workloads import WORKLOADS, Sizes
from benchmarks.record import Facts

CPU = torch.device("cpu")
SMALL = Sizes(24, heads=4, depth=8, kv_heads=2)


def row(name: str, folder: Path) -> turn.Row:
    return rows.core(name, SMALL, torch.float32, CPU, folder, float("inf"))


@pytest.mark.parametrize("name", WORKLOADS)
def test_judgement_goes_through_all_heads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = row(name, tmp_path)
    module, inputs = made.workload.target, made.workload.inputs
    assert isinstance(module, WORKLOADS["vanilla"])
    with torch.no_grad():
        right = turn.measure.flatten(module(*inputs))
    wrong = tuple(t.clone() for t in right)
    wrong[0][:, :, -1] += 1
    last = wrong[-1]
    last[:, -1] = ~last[:, -1] if last.dtype is torch.bool else last[:, -1] + 1
    for count in (rows.SLICE, 1):
        monkeypatch.setattr(rows, "SLICE", count)
        found = made.judge({"right": right, "first": (wrong[0], *right[1:]), "last": (*right[:-1], last)})
        assert [facts["passed"] for facts in found.values()] == [True, False, False], found


def test_a_row_runs_and_says_what_is_missing(tmp_path: Path) -> None:
    made = turn.Made()
    some = row("h2o", tmp_path)
    with torch.no_grad():
        turn.build(some, (EAGER, FLEX, CUDNN, ORT), made, CPU, 1)
        facts = turn.finish(some, made, CPU, 1, rounds=5, seconds=0.01)
    found = facts["contestants"]
    assert found[FLEX] == {"not_available": "it keeps no statistics"}  # type: ignore[index,call-overload]
    assert found[CUDNN] == {"not_available": "another function"}  # type: ignore[index,call-overload]
    for name in (EAGER, ORT):
        item: Facts = found[name]  # type: ignore[index,call-overload,assignment]
        assert item["accuracy"]["passed"] and item["samples"] == 5 and item["extra_bytes"] >= 0  # type: ignore[index,call-overload,operator]
    assert ("h2o", f"{FLEX}: it keeps no statistics") in turn.absent({"h2o": facts})


def test_nobody_is_built_when_time_is_up(tmp_path: Path) -> None:
    late, nobody = rows.core("h2o", SMALL, torch.float32, CPU, tmp_path, until=0.0), turn.Made()
    turn.build(late, (EAGER, OURS), nobody, CPU, 1)
    found = turn.finish(late, nobody, CPU, 1, 5, 0.01)["contestants"]
    assert found == {name: {"not_available": "no time left to build it"} for name in (EAGER, OURS)}


def test_stacks_and_prefill_agree_with_eager() -> None:
    shape = rows.Shape(layers=2, hidden=32, heads=2, kv_heads=2, intermediate=48)
    made = [rows.layers(n, shape, 12, torch.float32, CPU, float("inf")) for n in ("keyformer",)]
    made.append(rows.prefill(shape, 20, 8, 6, torch.float32, CPU, float("inf")))
    for some in made:
        done = turn.Made()
        with torch.no_grad():
            turn.build(some, (EAGER, OURS), done, CPU, 2)
            assert set(done.ready) == {EAGER, OURS}, done.items
            results = {name: item.call(*some.workload.inputs) for name, item in done.ready.items()}
            verdicts = some.judge(results)
        assert all(facts["passed"] for facts in verdicts.values()), verdicts
    assert len(results[EAGER]) == 1 and results[EAGER][0].shape == (1, 20, 32)


def facts_of(core: str, queries: int = 4096, **times: float) -> Facts:
    def item(time: float) -> Facts:
        return {"median_ms": time, "accuracy": {"passed": True}, "extra_bytes": 2 << 20}

    found: Facts = {name.replace("_", " "): item(time) for name, time in times.items()}
    return {"part": "core", "core": core, **figures.STANDARD, "queries": queries, "contestants": found}


def test_figures_of_a_gpu() -> None:
    made = [
        facts_of(
            "vanilla",
            eager=9.0,
            inductor=1.6,
            flex=0.4,
            sdpa_cudnn=0.28,
            tilewright=0.3,
            tilewright_kernels=0.35,
        ),
        facts_of("h2o", eager=9.0, inductor=2.4, tilewright=0.5),
        facts_of("roco", eager=9.0, inductor=2.4, tilewright=0.7),
        facts_of("h2o", 8192, eager=40.0, inductor=9.6, tilewright=2.0),
        facts_of("corm", 16384, eager=1.0, tilewright=9.0),
    ]
    made[3]["contestants"][OURS]["extra_bytes"] = 64 << 20  # type: ignore[index,call-overload]
    found = {item.name: item for item in figures.on_gpu(made)}
    assert found["vanilla at 4096"].passed is True and found["roco at 4096"].passed is False
    assert "gemma2 at 4096" not in found
    assert found["statistics over the best peer"].value == "4.29x of 3"
    assert found["vanilla, generated, over flex"].value == "1.14x of 1"
    assert found["vanilla, generated, over sdpa cudnn"].passed is True
    assert found["vanilla over the best peer"].passed is False
    assert found["memory beyond what is allowed"].passed is False
    assert not [name for name in found if "layers" in name]


def test_figures_are_about_what_was_asked() -> None:
    decode = facts_of("vanilla", 1, eager=9.0, sdpa_cudnn=0.1, tilewright=9.0) | {"keys": 8192, "batch": 8}
    singles = facts_of("roco", inductor=1.0, tilewright=9.0) | {"dtype": "float32"}
    assert figures.on_gpu([decode, singles]) == []
    without = facts_of("gemma2", eager=9.0, tilewright=0.35)  # the peer did not take part
    assert {item.name for item in figures.on_gpu([without])} == {
        "gemma2 at 4096",
        "memory beyond what is allowed",
    }
    wrong = facts_of("gemma2", flex=0.8, tilewright=0.35)
    wrong["contestants"][FLEX]["accuracy"] = {"passed": False, "reason": "NaN"}  # type: ignore[index,call-overload]
    assert {item.name: item.passed for item in figures.on_gpu([wrong])}["gemma2 over flex"] is None


def test_figures_of_a_cpu() -> None:
    made = facts_of("h2o", eager=90.0, inductor=40.0, tilewright=10.0) | figures.ON_CPU
    found = {item.name: item for item in figures.on_cpu([made])}
    assert set(found) == {f"cores over {INDUCTOR}", "extra memory over eager's"}
    assert found[f"cores over {INDUCTOR}"].value == "4.00x of 1"
    assert figures.on_cpu([made | {"dtype": "bfloat16"}]) == []


def test_wrong_results_win_nothing() -> None:
    made = facts_of("h2o", eager=1.0, inductor=0.1, tilewright=0.2)
    made["contestants"][INDUCTOR]["accuracy"] = {"passed": False, "reason": "NaN"}  # type: ignore[index,call-overload]
    assert figures.speeds([made]) == [pytest.approx(5.0)] and figures.speeds([made], INDUCTOR) == []
    assert "NaN" in str(turn.absent({"h2o": made})) and "0.1 wrong" in turn.table("", {"h2o": made})
    failed: Facts = {"part": "core", "core": "h2o", "failed": "no memory"}
    assert figures.of([failed], part="core") == [] and "no memory" in str(turn.absent({"h2o": failed}))


def test_a_child_runs_through(tmp_path: Path) -> None:
    given = [
        "--device=cpu",
        "--seq=16,24",
        "--heads=2",
        "--depth=8",
        f"--peers={EAGER},{OURS}",
        "--seconds=0.01",
    ]
    given += ["--rounds=5", f"--onnx={tmp_path}", "--child=core corm", f"--child-json={tmp_path / 'a.json'}"]
    assert program.main(given) == 0
    facts = json.loads((tmp_path / "a.json").read_text())
    assert facts["phase"] == "done" and [r["queries"] for r in facts["rows"]] == [16, 24]
    for made in facts["rows"]:
        item = made["contestants"][OURS]
        assert item["accuracy"]["passed"] and item["kernels"] and "generated" in item["coverage"]
    assert "corm 24 float32" in program.summary({"core corm": facts}, CPU)


def test_unknown_names_are_refused() -> None:
    for given in ("--parts=everything", "--only=bert", "--peers=nobody"):
        with pytest.raises(SystemExit):
            program.options([given])


@pytest.mark.parametrize("name", ["vanilla", pytest.param("roco", marks=pytest.mark.slow)])
def test_the_ablation_leaves_out_more_and_more(name: str) -> None:
    torch._dynamo.reset()  # what other tests compiled makes sizes symbols
    some, made = rows.ablation(name, SMALL, torch.float32, CPU, float("inf")), turn.Made()
    with torch.no_grad():
        turn.build(some, list(some.peers), made, CPU, 1)
        facts = turn.finish(some, made, CPU, 1, rounds=5, seconds=0.01)
    found: dict[str, Facts] = facts["contestants"]  # type: ignore[assignment]
    assert all(item["accuracy"]["passed"] for item in found.values())  # type: ignore[index,call-overload]
    kernels = {who: len(item["kernels"]) for who, item in found.items()}  # type: ignore[arg-type]
    statistics = name == "roco"
    assert kernels["fission"] > 10 and kernels["+ fusion"] == kernels[OURS] == 1 + statistics
    assert (kernels["+ mapping"] > kernels["+ rules"] == kernels["fission"]) == statistics
    mine = found[OURS]
    assert mine["modelled_ms"] > 0 and mine["plan"] and mine["extra_bytes"] >= 0  # type: ignore[operator]
    assert all(k["exps"] and k["flops"] > k["exps"] for k in mine["kernels"])  # type: ignore[union-attr,index,call-overload,operator]
    shown = turn.reports("", {name: facts})
    assert all(who in shown for who in found) and "Gexp" in shown


def test_what_is_slow_is_sampled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"slow": rows.LONGEST, "quick": 0.01}
    events = lambda runs, rounds, before: {name: [seconds[name]] * rounds for name in runs}  # noqa: E731
    monkeypatch.setattr(turn.gpu_clock, "events", events)
    runs = dict.fromkeys(seconds, lambda: None)

    def counts(longest: float) -> dict[str, int]:
        return {name: len(some) for name, some in turn.sampled(runs, 50, 0.2, longest, lambda: None).items()}

    assert counts(rows.LONGEST) == {"slow": 1, "quick": 20} and counts(float("inf"))["slow"] == turn.FEWEST
    some = rows.ablation("h2o", SMALL, torch.float32, CPU, float("inf"))
    assert some.longest == rows.LONGEST and not some.measuring


def test_an_ablation_is_a_row_of_its_own() -> None:
    arguments = program.options(["--parts", "ablation", "--device", "cpu"])
    (point,) = program.points(program.ABLATION, "h2o", arguments)
    assert point.facts["part"] == "ablation" and not point.alone
