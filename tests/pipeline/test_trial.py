"""Covers that the model takes for nearly equal are timed, once; without a device the model decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.attention.regions import DictCache, graph_of, with_columns, work
from tests.support.corpus import Case
from tests.support.cpp_harness import host_target
from tests.support.normal_graph import capture
from torch import Tensor

import tilewright
from tilewright.analysis.size_hints import NO_HINTS
from tilewright.interp.graph import run_graph
from tilewright.ir.graph import Graph, Value
from tilewright.options import Options
from tilewright.partition import choose_kernels as choosing
from tilewright.partition.choose_kernels import ChosenRegions, Prices, RegionPolicy, choose_kernels
from tilewright.pipeline import trial as trial_module
from tilewright.pipeline.backends import BACKENDS
from tilewright.pipeline.build import KernelBuilder, in_silence
from tilewright.pipeline.trial import CoverTrial, operands
from tilewright.runtime.store.cache import ContentStore
from tilewright.runtime.store.decisions import Decisions
from tilewright.schedule.solver import Solver
from tilewright.target import preset
from tilewright.tuning.timing_limits import TRIAL

LENGTH = 256
"""Of keys: scores so large that several kernels may compute them, so that there are several covers."""
PRICES = Prices(NO_HINTS, work, lambda region: 1e30, lambda region: 0.0)


class Clock:
    """Says which of the covers is the fastest, whatever they are, and keeps them."""

    def __init__(self, fastest: int) -> None:
        self.fastest, self.asked = fastest, list[Sequence[Graph]]()

    def __call__(self, covers: Sequence[Graph]) -> list[float]:
        self.asked.append(covers)
        return [1.0 if k == self.fastest else 2.0 for k in range(len(covers))]


def decided(prices: Prices, cache: DictCache | None = None) -> ChosenRegions:
    return choose_kernels(
        graph_of(with_columns, length=LENGTH),
        prices,
        lambda region: (region, ()),
        RegionPolicy("inside", 1),
        cache,
    )


def kernels(mapped: ChosenRegions) -> list[list[str]]:
    return [[op.name for op in k.ops] for k in mapped.regions[0].kernels]


def test_the_fastest_by_measurement_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "TRIAL", replace(choosing.TRIAL, max_modelled_slowdown_ratio=4.0))
    monkeypatch.setattr(choosing, "TRIAL", replace(choosing.TRIAL, max_seconds_to_time=1e30))
    by_model = kernels(decided(PRICES))
    chosen: list[list[list[str]]] = []
    for place in range(TRIAL.max_timed_covers):
        clock = Clock(place)
        made = decided(replace(PRICES, timed=clock))
        (covers,) = clock.asked
        assert len(covers) == TRIAL.max_timed_covers and made.regions[0].notes[0].startswith("measured: ")
        chosen.append(kernels(made))
        want = run_graph(
            graph_of(with_columns, length=LENGTH),
            inputs := [t.numpy() for t in Case("", with_columns, ((2, LENGTH, 8),) * 3).inputs()],
        )
        for graph in (*covers, made.graph):
            graph.verify()
            for a, b in zip(run_graph(graph, inputs), want, strict=True):
                np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-9)
    assert chosen[0] == by_model and all(chosen.count(c) == 1 for c in chosen)


def test_what_was_measured_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "TRIAL", replace(choosing.TRIAL, max_modelled_slowdown_ratio=4.0))
    monkeypatch.setattr(choosing, "TRIAL", replace(choosing.TRIAL, max_seconds_to_time=1e30))
    cache, clock = DictCache(), Clock(1)
    first = decided(replace(PRICES, timed=clock), cache)
    again = decided(replace(PRICES, timed=clock), cache)
    assert len(clock.asked) == 1 and kernels(first) == kernels(again)
    assert first.regions[0].notes == again.regions[0].notes


def test_short_long_or_clear_ones_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0)
    monkeypatch.setattr(choosing, "TRIAL", replace(choosing.TRIAL, max_seconds_to_time=1e30))
    monkeypatch.setattr(choosing, "TRIAL", replace(choosing.TRIAL, max_modelled_slowdown_ratio=1.0))
    decided(replace(PRICES, timed=clock))
    monkeypatch.setattr(choosing, "TRIAL", replace(choosing.TRIAL, max_modelled_slowdown_ratio=4.0))
    monkeypatch.setattr(choosing, "TRIAL", replace(choosing.TRIAL, min_seconds_to_time=1e30))
    decided(replace(PRICES, timed=clock))
    monkeypatch.setattr(choosing, "TRIAL", replace(choosing.TRIAL, min_seconds_to_time=0.0))
    monkeypatch.setattr(choosing, "TRIAL", replace(choosing.TRIAL, max_seconds_to_time=0.0))
    decided(replace(PRICES, timed=clock))
    assert not clock.asked


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_covers_run_where_there_is_a_device(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "TRIAL", replace(choosing.TRIAL, max_modelled_slowdown_ratio=4.0))
    monkeypatch.setattr(choosing, "TRIAL", replace(choosing.TRIAL, max_seconds_to_time=1e30))
    clock = Clock(0)
    decided(replace(PRICES, timed=clock))
    options, target = Options(), host_target() if device == "cpu" else preset("sm_90")
    covers = Decisions(target, ContentStore(tmp_path), options, {})
    trial = CoverTrial(KernelBuilder(in_silence, BACKENDS[device], Solver(target, options), covers), device)
    times = trial(clock.asked[0])
    if device == "cuda" and not torch.cuda.is_available():
        assert times is None and BACKENDS[device].timing_key(device, options) == device
    else:
        before = torch.get_rng_state()
        assert times is not None and len(times) == TRIAL.max_timed_covers and min(times) > 0
        trial(clock.asked[0])
        monkeypatch.setattr(trial_module, "TRIAL", replace(trial_module.TRIAL, max_first_runs_seconds=-1.0))
        assert trial(clock.asked[0]) is None, "the first run took longer than all may take"
        assert torch.equal(torch.get_rng_state(), before), "the program's random numbers stay as they were"


def test_a_gpu_is_timed_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = list[str]()

    class Entered:
        def __init__(self, device: str) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_: object) -> None:
            entered.append("out")

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing and entered == ["cuda:1"]

        def record(self) -> None:
            assert entered[-1] == "cuda:1"

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: object) -> float:
            return 3.0

    monkeypatch.setattr(torch.cuda, "device", Entered)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    clock = BACKENDS["cuda"].clock("cuda:1")
    assert clock is not None and clock(lambda: entered.append("run") or entered.pop()) == 0.003
    assert entered == ["cuda:1", "out"]


def test_a_compilation_measures_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "TRIAL", replace(choosing.TRIAL, min_seconds_to_time=0.0))
    monkeypatch.setattr(choosing, "TRIAL", replace(choosing.TRIAL, max_modelled_slowdown_ratio=4.0))
    given = tuple(torch.randn(2, 64, 8) for _ in range(3))
    inside = {"contractions": "inside", "cache_dir": str(tmp_path)}

    def notes(**options: object) -> list[str]:
        made = tilewright.compile(with_columns, given, options=inside | options)
        for a, b in zip(made(*given), with_columns(*given), strict=True):
            assert isinstance(a, Tensor)
            torch.testing.assert_close(a, b)
        mapped = made.trace["map"]
        assert isinstance(mapped, ChosenRegions)
        return [note for note in mapped.regions[0].notes if note.startswith("measured")]

    assert notes(measure=False) == []
    first = notes(measure=True)
    assert len(first) == 1
    monkeypatch.setattr(CoverTrial, "__call__", None)  # must not be needed
    assert notes(measure=True) == first


def test_clocks_give_the_middle_of_places_and_zeros_for_indices() -> None:
    def run(x: Tensor, last: Tensor, at: Tensor) -> Tensor:
        return torch.where(torch.arange(96) <= last, x, 0.0).sum(1) + x[0][at]

    graph = capture(run, [torch.randn(4, 96), torch.tensor(3), torch.tensor([5])])
    laid = {v: graph.layouts.get(v) for v in graph.inputs if isinstance(v, Value)}
    given = [[*operands(graph, laid, NO_HINTS, "cpu", seeded=True).values()] for _ in range(2)]
    x, last, at = given[0]
    assert last.item() == 48 and not at.any()
    assert x.any() and torch.equal(x, given[1][0])
