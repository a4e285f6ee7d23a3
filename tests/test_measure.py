"""The measuring core: statistics, the order of turns, guards against impossible timings, peers that cannot
run.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewright import measure
from tilewright.errors import TilewrightError
from tilewright.measure import BuiltPeer, PreparedContestant, Timing, Unavailable, Workload
from tilewright.peak_memory import PeakMemory
from tilewright.tuning.timing_limits import MEASUREMENT


def test_summary_of_known_samples() -> None:
    timing = Timing(tuple(i * 1e-3 for i in range(1, 101)))
    summary = timing.summary()
    assert summary["min"] == pytest.approx(1.0) and summary["max"] == pytest.approx(100.0)
    assert [summary["mean"], summary["median"]] == pytest.approx([50.5, 50.5])
    assert [summary[p] for p in ("p90", "p95", "p99")] == pytest.approx([90.0, 95.0, 99.0])
    assert summary["throughput"] == pytest.approx(1000 / 50.5)
    assert summary["cv"] == pytest.approx(np.std(timing.samples, ddof=1) / 0.0505)


def test_one_sample_has_no_variation() -> None:
    assert Timing((0.5,)).variation == 0.0
    assert Timing((0.5,)).percentile(99) == 0.5


@pytest.mark.parametrize("percent", [0, -1, 101])
def test_percentile_outside_its_range(percent: float) -> None:
    with pytest.raises(TilewrightError, match="percentile"):
        Timing((1.0,)).percentile(percent)


def test_ratio_compares_rounds() -> None:
    """A machine that is four times slower in the middle harms both: the ratio stays."""
    slow = [1.0] * 5 + [4.0] * 4
    assert measure.ratio(Timing(tuple(2 * s for s in slow)), Timing(tuple(slow))) == 2.0
    assert measure.ratio(Timing((4.0, 4.0)), Timing((1.0, 2.0, 3.0))) == 2.0


def test_geomean() -> None:
    assert measure.geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(measure.geomean([]))


def test_contestants_take_turns_after_one_untimed_call() -> None:
    calls: list[str] = []

    def contestant(name: str) -> Callable[[], None]:
        def run() -> None:
            calls.append(name)
            time.sleep(1.5 * MEASUREMENT.min_sample_seconds)

        return run

    names = ["a", "b", "c"]
    reports: list[int] = []
    timings = measure.measure(
        {name: contestant(name) for name in names},
        seconds=0.0,
        rounds=(3, 3),
        pause=0.0,
        report=lambda done, most: reports.append(done),
    )
    after_trial = calls[6:]
    assert "".join(after_trial) == "aabbcc" + "bbccaa" + "ccaabb"
    assert list(timings) == names and reports == [1, 2, 3]
    assert all(
        len(timing.samples) == 3 and timing.minimum >= 1.5 * MEASUREMENT.min_sample_seconds
        for timing in timings.values()
    )


def test_short_calls_are_timed_in_blocks() -> None:
    count = 0

    def run() -> None:
        nonlocal count
        count += 1

    (timing,) = measure.measure({"x": run}, seconds=0.0, rounds=(2, 2), pause=0.0).values()
    assert count > 1000 and timing.maximum < 1e-5


def test_a_sample_begins_when_the_threads_of_others_sleep() -> None:
    spinning: list[threading.Thread] = []
    seen: list[bool] = []

    def spin() -> None:
        end = time.perf_counter() + 0.1
        while time.perf_counter() < end:
            pass

    def leaves_one() -> None:
        spinning.append(threading.Thread(target=spin))
        spinning[-1].start()

    other = lambda: seen.append(any(t.is_alive() for t in spinning))  # noqa: E731
    measure.measure({"first": leaves_one, "second": other}, seconds=0.0, rounds=(1, 1), pause=0.006)
    assert not seen[-1]
    for t in spinning:
        t.join()


def test_collection_is_off_only_while_measuring() -> None:
    seen: list[bool] = []
    measure.measure({"x": lambda: seen.append(gc.isenabled())}, seconds=0.0, rounds=(1, 1), pause=0.0)
    assert seen[-1] is False and gc.isenabled()


def test_settings_restore_threads_and_gradients() -> None:
    before = torch.get_num_threads()
    with measure.settings(1):
        assert torch.get_num_threads() == 1 and not torch.is_grad_enabled()
    assert torch.get_num_threads() == before and torch.is_grad_enabled()


def test_impossible_timings_are_errors() -> None:
    bound = measure.lower_bound(moved=1e9, bandwidth=1e11, flops=1e9, peak=1e12)
    assert bound == pytest.approx(0.01)
    fine = Timing((0.0096, 0.02))
    assert measure.require_possible("copy", fine, bound) is fine
    with pytest.raises(TilewrightError, match=r"copy took 9000\.0 us"):
        measure.require_possible("copy", Timing((0.009, 0.02)), bound)
    assert measure.is_possible(1e-9, measure.lower_bound())


def test_peak_memory_sees_a_block_that_is_freed_again() -> None:
    with PeakMemory() as memory:
        np.ones(8 << 20).sum()
    if memory.bytes is not None:
        assert 60 << 20 < memory.bytes < 80 << 20
    with PeakMemory() as memory:
        pass
    assert memory.bytes is None or memory.bytes < 8 << 20


def small() -> Workload:
    return Workload("small", torch.nn.Linear(4, 3), (torch.randn(2, 4),))


def test_prepare_runs_a_peer_and_says_what_it_cost() -> None:
    workload = small()
    prepared = measure.prepare("eager", workload, 1)
    assert isinstance(prepared, PreparedContestant)
    (result,) = prepared.call(*workload.inputs)
    assert torch.equal(result, workload.target(*workload.inputs))  # type: ignore[operator]
    assert prepared.ready_seconds == prepared.build_seconds + prepared.first_call_seconds > 0
    timing = measure.compare({"eager": prepared}, workload, 1, seconds=0.0)["eager"]
    assert len(timing.samples) == 7


def test_a_peer_that_raises_becomes_a_reason() -> None:
    def broken(workload: Workload, threads: int) -> BuiltPeer:
        raise RuntimeError("first line\nsecond line")

    def refused(workload: Workload, threads: int) -> Unavailable:
        return Unavailable("no such runtime")

    def breaks_in_call(workload: Workload, threads: int) -> BuiltPeer:
        return BuiltPeer(lambda *inputs: (inputs[9],))

    assert measure.prepare("x", small(), 1, broken) == Unavailable("RuntimeError: first line")
    assert str(measure.prepare("x", small(), 1, refused)) == "not available: no such runtime"
    assert isinstance(measure.prepare("x", small(), 1, breaks_in_call), Unavailable)
    assert len(measure.one_line(ValueError("x" * 500))) == 120


def test_flatten_orders_nested_results() -> None:
    a, b, c = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
    flat = measure.flatten({"x": a, "y": (b, [c.numpy(), None])})
    assert [float(t) for t in flat] == [0.0, 1.0, 2.0]
    with pytest.raises(TilewrightError, match="str"):
        measure.flatten("text")


def relu_file(path: Path) -> Path:
    from onnx import TensorProto, helper, save

    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path


def test_onnxruntime_runs_a_model_file(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    path = relu_file(tmp_path / "m.onnx")
    data = torch.randn(3, 4)
    prepared = measure.prepare("onnxruntime", Workload("relu", path, (data,)), 2)
    assert isinstance(prepared, PreparedContestant), prepared
    assert torch.equal(prepared.call(data)[0], data.relu())


class Remembers(torch.nn.Module):
    """A module that keeps a tensor instead of a number once it was traced, as some window attentions do."""

    size: int | torch.Tensor = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """relu."""
        if torch.jit.is_tracing():
            self.size = torch.tensor(4)
        return x.relu()


def test_a_contestant_leaves_the_model_as_it_was() -> None:
    pytest.importorskip("onnxruntime")
    model = Remembers()
    workload = Workload("remembers", model, (torch.randn(3, 4),))
    prepared = measure.prepare("onnxruntime", workload, 2)
    assert isinstance(prepared, PreparedContestant), prepared
    assert model.size == 4 and isinstance(model.size, int)


def test_a_truncated_model_file_becomes_a_reason(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(relu_file(tmp_path / "m.onnx").read_bytes()[:20])
    workload = Workload("broken", broken, (torch.randn(3, 4),))
    assert isinstance(measure.prepare("onnxruntime", workload, 2), Unavailable)


@pytest.mark.slow
@pytest.mark.slow
def test_a_runtime_timed_against_itself_comes_out_equal() -> None:
    """The issue's bound is 1.00 +- 0.03; spinning threads of another runtime stand between the two."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
    workload = Workload("mlp", model, (torch.randn(128, 512),))
    one, other, peer = (measure.prepare(name, workload, 2) for name in ("eager", "eager", "onnxruntime"))
    prepared = {"one": one, "peer": peer, "other": other}
    ready = {name: item for name, item in prepared.items() if isinstance(item, PreparedContestant)}
    timings = measure.compare(ready, workload, 2, seconds=8.0)
    assert measure.ratio(timings["one"], timings["other"]) == pytest.approx(1.0, abs=0.03)


def test_an_interrupted_timing_keeps_its_rounds() -> None:
    calls = [0]

    def stops() -> None:
        calls[0] += 1
        if calls[0] > 12:
            raise KeyboardInterrupt

    with pytest.raises(measure.Interrupted) as stopped:
        measure.measure({"a": lambda: time.sleep(0.02), "b": lambda: (time.sleep(0.02), stops())[1]}, pause=0)  # type: ignore[func-returns-value]
    counts = [len(t.samples) for t in stopped.value.timings.values()]
    assert len(counts) == 2 and counts[0] == counts[1] > 0
