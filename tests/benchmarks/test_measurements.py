"""The benchmarks' own parts: what is recorded, cold children, the yardstick, the cases. No figure is judged here."""

from __future__ import annotations

import json
import math
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from benchmarks.bandwidth import COMPILERS, Yardstick
from benchmarks.calibrate import calibrate
from benchmarks.named import ZOO

from benchmarks import busy, compile_time, kernels, models, overhead, record
from tilewright import measure
from tilewright.measure import PreparedContestant, Timing, Unavailable


def test_write_json_replaces_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    record.write_json(path, {"a": 1})
    record.write_json(path, {"a": [1, 2]})
    assert json.loads(path.read_text()) == {"a": [1, 2]}
    assert [p.name for p in path.parent.iterdir()] == ["out.json"]


def test_provenance_names_machine_versions_command_and_commit() -> None:
    facts = record.provenance(2)
    assert set(facts) == {"environment", "threads", "wait_policy", "command", "commit", "date"}
    assert str(sys.executable) not in str(facts["command"])


def test_a_child_that_dies_is_a_fact(tmp_path: Path) -> None:
    facts = record.child("benchmarks.no_such_module", [], 1, tmp_path)
    assert "No module named" in str(facts["failed"]) and "exit code 1" in str(facts["failed"])


def prepared(name: str) -> PreparedContestant:
    return PreparedContestant(name, lambda *inputs: inputs, 1.0, 2.0, None, "generated 3 of 3 ops")


def test_figures_compare_rounds_with_the_peers() -> None:
    timings = {"eager": Timing((4.0, 8.0)), "tilewright": Timing((1.0, 2.0))}
    verdict: record.Facts = {"passed": True, "smallest_k": 3.0, "of_eager": 0.5}
    facts = models.figures(prepared("tilewright"), "tilewright", timings, verdict)
    assert (
        facts["speed_over_eager"] == 4.0
        and facts["first_call_s"] == 3.0
        and "speed_over_inductor" not in facts
    )
    assert models.row("tilewright", facts)[1] == "3.0" and "pass 0.50" in models.row("tilewright", facts)
    assert models.row("x", {"not_available": "no [x]"})[-1] == "not available: no \\[x]"


def test_geomeans_skip_models_that_failed() -> None:
    def facts(speed: float) -> record.Facts:
        return {"contestants": {"tilewright": {"speed_over_eager": speed}}}

    missing: record.Facts = {"contestants": {"tilewright": {"not_available": "x"}}}
    means = models.geomeans({"a": facts(1.0), "b": facts(4.0), "c": missing, "d": {"failed": "x"}})
    assert means == {"speed_over_eager": {"geomean": pytest.approx(2.0), "worst": 1.0, "models": 2}}


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C compiler")
def test_yardstick_copies_all_of_the_buffer() -> None:
    for threads in (1, 2):
        for mode in (0, 1):
            yardstick = Yardstick(4 * 100_003, threads)
            yardstick._from.copy_(torch.arange(100_003))
            times = yardstick.seconds(mode, repeats=2)
            assert len(times) == 2 and min(times) > 0
            assert torch.equal(yardstick._to, yardstick._from)


@pytest.mark.parametrize("name", list(kernels.CASES))
def test_kernel_cases_have_the_stated_size(name: str) -> None:
    case = kernels.CASES[name]
    inputs = case.inputs(4 << 20)
    assert max(tensor.nbytes for tensor in inputs) == 4 << 20
    outputs = measure.flatten(case.function(*inputs))
    assert kernels.compulsory(inputs, outputs) >= 4 << 20
    assert all(output.is_contiguous() for output in outputs)


def test_chain_has_eight_ops_and_two_transcendentals() -> None:
    graph = torch.fx.symbolic_trace(kernels._chain).graph
    ops = [node for node in graph.nodes if node.op.startswith("call")]
    assert len(ops) == 8
    assert sum("tanh" in str(node.target) or "exp" in str(node.target) for node in ops) == 2


def test_no_op_backend_hands_out_one_kept_tensor() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    call = overhead.no_op(graph, [torch.zeros(3)])
    first, second = call([torch.zeros(3)]), call([torch.zeros(3)])
    assert first[0] is second[0]


def test_fresh_functions_do_not_share_their_code() -> None:
    other = overhead._fresh(overhead.chain)
    assert other.__code__ is not overhead.chain.__code__
    assert torch.equal(other(torch.ones(2)), torch.full((2,), 3.0))


def test_compile_time_cells_show_reasons() -> None:
    assert compile_time.cell({"first_result_s": 1.234}) == "1.23"
    assert compile_time.cell({"not_available": "no compiler"}) == "no compiler"
    assert compile_time.cell({"failed": "exit code 1"}) == "exit code 1"


def test_the_named_models_are_all_there() -> None:
    assert len(ZOO) == 11
    assert {"minilm", "bert-base", "llama", "resnet-50", "convnext-t", "mobilenet-v2", "swin-t"} < set(ZOO)


def test_calibration_makes_activations_sane() -> None:
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3)]
    model = torch.nn.Sequential(*layers, torch.nn.BatchNorm2d(8))
    images = 1000 * torch.randn(4, 3, 16, 16)
    calibrate(model, images)
    with torch.no_grad():
        out = model(images)
    assert not model.training and float(out.std()) == pytest.approx(1.0, abs=0.1)
    assert all(norm.momentum == 0.1 for norm in model if isinstance(norm, torch.nn.BatchNorm2d))


def test_overhead_notes_what_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> object:
        raise RuntimeError("no backend today")

    monkeypatch.setattr(torch, "compile", refuse)
    made = overhead.contestants(torch.ones(2))
    assert isinstance(made[overhead.NO_OP], Unavailable) and not isinstance(made["eager"], Unavailable)


def test_process_age_grows() -> None:
    first = compile_time.process_age()
    time.sleep(0.02)
    assert math.isnan(first) or 0.0 < first < compile_time.process_age()


def children() -> list[str]:
    found = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    if not found.exists():
        pytest.skip("the system does not list children")
    return found.read_text().split()


def test_busy_processes_end_with_their_block() -> None:
    before = set(children())
    with pytest.raises(ZeroDivisionError), busy.busy_loops(2, 30.0):
        assert len(set(children()) - before) == 2
        raise ZeroDivisionError
    assert set(children()) == before


def test_models_beside_busy_processes_run_as_they_are() -> None:
    for build in busy.MODELS.values():
        module, inputs = build()
        with torch.no_grad():
            assert all(t.isfinite().all() for t in measure.flatten(module.eval()(*inputs)))
