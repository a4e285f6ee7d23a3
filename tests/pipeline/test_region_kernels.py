"""Kernels of regions stand beside a library by a clock as well as by the model."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import Function
from torch import Tensor

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.capture.fx import from_fx
from tilewright.capture.trace import trace
from tilewright.ir.graph import Graph
from tilewright.ir.kernel import Kernel
from tilewright.options import Options
from tilewright.partition.choose_kernels import (
    ChosenRegion,
    ChosenRegions,
    Prices,
    RegionPolicy,
    choose_kernels,
)
from tilewright.partition.regions import find_regions
from tilewright.pipeline import region_kernels
from tilewright.pipeline.backends import BACKENDS
from tilewright.pipeline.build import KernelBuilder, in_silence
from tilewright.pipeline.place import DevicePlace
from tilewright.pipeline.prices import kernel_prices
from tilewright.pipeline.region_kernels import (
    RegionTrial,
    _unless_behind,
    choose_attention,
    choose_region_kernels,
)
from tilewright.rewrite.normal.normalise import normalise
from tilewright.runtime.cpu.toolchain import host_target
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.runtime.store.decisions import Decisions
from tilewright.schedule.solver import Solver

OPTIONS = Options.make({"measure": False, "cache": False})


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.transpose(-1, -2)
    return torch.softmax(s - 0.1 * torch.sigmoid(s), -1) @ v


def captured() -> Graph:
    inputs = [torch.randn(2, 512, 32) for _ in range(3)]
    return from_fx(trace(Function(attention), inputs, [(), (), ()]).gm)


def chosen(clock: Callable[[Callable[[], object]], float] | None, seconds: int = 5) -> ChosenRegions:
    target = host_target()
    solver = Solver(target, OPTIONS)
    decisions = Decisions(target, ContentStore(default_root(OPTIONS)), OPTIONS, {})
    builder = KernelBuilder(in_silence, BACKENDS["cpu"], solver, decisions)
    asked = OPTIONS.replace(tune_seconds=seconds)
    trial = None if clock is None else RegionTrial(builder, "cpu", asked, clock)
    return choose_region_kernels(captured(), builder, solver, DevicePlace("cpu"), trial)


def clock_of(*times: float) -> Callable[[Callable[[], object]], float]:
    left = iter(times)

    def clock(run: Callable[[], object]) -> float:
        run()
        return next(left)

    return clock


@pytest.mark.parametrize(
    ("times", "kept"), [((1.0, 0.5), True), ((1.0, 1.01), True), ((1.0, 1.2), False)], ids=str
)
def test_the_clock_has_the_last_word(times: tuple[float, float], kept: bool) -> None:
    """Of what the model sees ahead; calls that are as fast take memory for nothing."""
    (modelled,) = chosen(None).regions
    assert modelled.kernels and modelled.seconds < modelled.library
    found = chosen(clock_of(*times))
    (region,) = found.regions
    assert bool(region.kernels) == kept
    assert any(note.startswith("measured: ") and "with library calls" in note for note in region.notes)
    assert any(op.kernel is not None and op.kernel >= 0 for op in found.graph.ops) == kept


@pytest.fixture
def slow_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that sees kernels behind a library's first product ahead of calls, too."""
    (modelled,) = chosen(None).regions

    def prices(solver: Solver, usual: Prices | None = None) -> Prices:
        return replace(kernel_prices(solver, usual), library=lambda region: 3 * modelled.seconds)

    monkeypatch.setattr("tilewright.pipeline.region_kernels.kernel_prices", prices)


@pytest.mark.usefixtures("slow_library")
@pytest.mark.parametrize(("times", "kept"), [((1.0, 0.5), True), ((1.0, 1.2), False)], ids=str)
def test_what_stands_behind_a_product_is_timed_where_all_of_it_is_slower(
    times: tuple[float, float], kept: bool
) -> None:
    found = chosen(clock_of(1.0, 1.2, 1.3, *times))
    whole, *behind = found.regions
    assert not whole.kernels and bool(behind) == kept
    assert [op.name for op in found.graph.ops if op.name == "matmul" and op.kernel < 0] != []
    assert any(op.kernel >= 0 for op in found.graph.ops) == kept
    found.graph.verify()


@pytest.mark.usefixtures("slow_library")
@pytest.mark.parametrize(("behind", "whole"), [(0.6, True), (0.4, False)])
def test_all_of_a_region_is_timed_beside_its_second_half(behind: float, whole: bool) -> None:
    """Which computes the same: a result that differed would not be timed."""
    found = chosen(clock_of(1.0, 0.5, behind, 1.0, 0.5))
    first, *rest = found.regions
    assert bool(first.kernels) == whole and any(r.kernels for r in rest) != whole
    assert any("measured: 500 ms, " in note for note in first.notes)
    found.graph.verify()


@pytest.mark.parametrize(
    ("clear", "library", "left"), [(True, 2.0, True), (False, 2.0, False), (False, 1.0, True)]
)
def test_all_of_a_region_gives_way_to_its_second_half(clear: bool, library: float, left: bool) -> None:
    """Where the model sees a library's product and kernels behind it ahead, and the whole not clearly."""
    graph = normalise(captured())
    kernels = (Kernel(graph.ops, graph.ops[-1].outputs),)
    (region,) = find_regions(graph, NO_HINTS)
    (half,) = find_regions(graph, NO_HINTS, behind=True)
    decided = ChosenRegion(region.graph(graph), kernels, 3.0, 4.0, clear=clear)
    rest = ChosenRegion(half.graph(graph), kernels, 0.5, library)
    made = _unless_behind(region, decided, {"half": (half, rest)})
    assert bool(made.kernels) == left


def test_without_a_budget_the_model_decides() -> None:
    asked: list[object] = []

    def clock(run: Callable[[], object]) -> float:
        asked.append(run)
        return 1.0

    (region,) = chosen(clock, seconds=0).regions
    assert region.kernels and not asked
    assert cast(object, region.rearranged) is not None


@pytest.mark.parametrize("spared", [0.0, 1.0])
def test_what_spares_memory_is_not_timed(monkeypatch: pytest.MonkeyPatch, spared: float) -> None:
    """Calls might be faster, but hold most of a device between them."""
    asked: list[object] = []

    def clock(run: Callable[[], object]) -> float:
        asked.append(run())
        return float(len(asked))

    def prices(solver: Solver, usual: Prices | None = None) -> Prices:
        return replace(kernel_prices(solver, usual), spared=lambda region, kernels: spared)

    monkeypatch.setattr("tilewright.pipeline.region_kernels.kernel_prices", prices)
    (region,) = chosen(clock).regions
    assert bool(asked) != bool(spared) and bool(region.kernels) == bool(spared)


@pytest.mark.parametrize("timed", [False, True])
def test_what_is_ahead_by_little_is_for_a_clock_alone(timed: bool) -> None:
    prices = Prices(NO_HINTS, lambda kernel, layouts: 1.0, lambda region: 1.1, lambda region: 0.1)
    policy = RegionPolicy("modelled", 132, timed=timed)
    (region,) = choose_kernels(normalise(captured()), prices, lambda g: (g, ()), policy).regions
    assert bool(region.kernels) == timed and region.clear != timed


def decoded(
    clock: Callable[[Callable[[], object]], float], store: ContentStore | None = None
) -> ChosenRegion:
    """What a clock decides of attention of a few queries to many keys, of which the model has no doubts."""
    inputs = [torch.randn(1, 2, n, 32) for n in (4, 2048, 2048)]
    graph = from_fx(trace(Function(F.scaled_dot_product_attention), inputs, [(), (), ()]).gm)
    target = host_target()
    solver = Solver(target, OPTIONS)
    decisions = Decisions(target, store or ContentStore(None), OPTIONS, {})
    builder = KernelBuilder(in_silence, BACKENDS["cpu"], solver, decisions)
    trial = RegionTrial(builder, "cpu", OPTIONS.replace(tune_seconds=5), clock)
    (region,) = choose_attention(graph, trial).regions
    return region


@pytest.fixture
def _near(monkeypatch: pytest.MonkeyPatch) -> None:
    def near(*_: object) -> bool:
        return True

    monkeypatch.setattr(region_kernels, "_is_near", near)


@pytest.mark.usefixtures("_near")
@pytest.mark.parametrize("fastest", [1, 2, 3])
def test_a_clock_says_in_how_many_parts_keys_are_taken(fastest: int) -> None:
    times = [1.0, 0.5, 0.5, 0.5]  # of the library, of the kernels as modelled, in 4 parts, and in 16
    times[fastest] = 0.4
    region = decoded(clock_of(*times))
    assert region.parts == (1, 4, 16)[fastest - 1]
    told = "\n".join(region.explained)
    assert told.count("side by side") == (region.parts > 1)
    assert region.parts == 1 or f"reductions in {region.parts} parts side by side" in told


@pytest.mark.usefixtures("_near")
def test_a_little_less_time_is_no_reason_for_other_parts() -> None:
    assert decoded(clock_of(1.0, 0.5, 0.499, 0.499)).parts == 1


@pytest.mark.usefixtures("_near")
def test_another_process_takes_as_many_parts(tmp_path: Path) -> None:
    store = ContentStore(tmp_path)
    first = decoded(clock_of(1.0, 0.5, 0.5, 0.4), store)
    again = decoded(clock_of(), store)
    assert (again.parts, len(again.kernels)) == (first.parts, len(first.kernels)) == (16, 2)


@pytest.mark.usefixtures("_near")
def test_parts_that_there_are_no_kernels_for_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another machine may have them."""
    known = RegionTrial.entries

    def entries(*given: Any) -> Any:
        return {key: {**entry, "parts": 7} for key, entry in known(*given).items()}

    monkeypatch.setattr(RegionTrial, "entries", entries)
    region = decoded(clock_of(1.0, 0.4, 0.5, 0.5))
    assert region.kernels and region.parts == 1
    assert "measured in 7 parts, of which there are no kernels here" in region.explained
