"""A clock says whether the warps of a kernel are specialised, once for each kernel and device."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.normal_graph import Function
from tests.support.triton.absent_gpu import compiled
from tests.support.triton.specialised import CHANGES, attention

from tilewright.capture.fx import from_fx
from tilewright.capture.trace import trace
from tilewright.ir.kernel import Cover, Kernel, Scheduled
from tilewright.options import Options
from tilewright.partition.cover import partition
from tilewright.pipeline.backends import BACKENDS
from tilewright.pipeline.build import KernelBuilder, in_silence
from tilewright.pipeline.phases import PHASES
from tilewright.pipeline.region_kernels import _is_near
from tilewright.pipeline.timed.kernel_ways import (
    choose_ways,
    fastest_schedules,
    keep_schedules,
    other_ways,
    verdicts_of,
)
from tilewright.rewrite.normal.normalise import normalise
from tilewright.runtime.cpu.toolchain import host_target
from tilewright.runtime.store.cache import ContentStore
from tilewright.runtime.store.decisions import Decisions
from tilewright.schedule.cpu.scheduler import VectorScheduler
from tilewright.schedule.scheduler import Comparison, Solution
from tilewright.schedule.solver import Solver
from tilewright.target import preset

OTHER = 1 << 20


def proposed(self: VectorScheduler, found: Solution, by: Comparison) -> Sequence[Solution]:
    """Something that can be told from the usual schedule, on this machine too."""
    return (
        Solution(found.schedule.changed(min_bytes_per_task=OTHER), found.form, found.seconds, found.rows),
    )


@pytest.fixture(autouse=True)
def _proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VectorScheduler, "specialised", proposed)


def builder(options: Options, store: ContentStore | None = None) -> KernelBuilder:
    target = host_target()
    decisions = Decisions(target, store or ContentStore(None), options, {})
    return KernelBuilder(in_silence, BACKENDS["cpu"], Solver(target, options), decisions)


def cover_of(made: KernelBuilder, dynamic: Sequence[int] = ()) -> Cover:
    x = torch.randn(64, 256)
    graph = normalise(from_fx(trace(Function(lambda x: x * 2 + 1), (x,), [dynamic]).gm))
    return partition(graph, made.solver.price, made.hints)


def clock_of(*times: float) -> Callable[[Callable[[], object]], float]:
    left = iter(times)

    def clock(run: Callable[[], object]) -> float:
        run()
        return next(left)

    return clock


def scheduled(made: KernelBuilder, cover: Cover) -> Scheduled:
    (kernel,) = (s for s in cover.steps if isinstance(s, Kernel))
    return made.solver.solve(kernel, cover.layouts)


@pytest.mark.parametrize(("times", "taken"), [((1.0, 0.7), True), ((1.0, 0.995), False), ((1.0, 1.5), False)])
def test_the_clock_decides(times: tuple[float, float], taken: bool) -> None:
    made = builder(Options())
    cover = cover_of(made)
    choose_ways(cover, made, "cpu", clock_of(*times), "here")
    assert ("min_bytes_per_task=1048576" in str(scheduled(made, cover).schedule)) == taken


@pytest.mark.parametrize("times", [(1.0, 0.7), (1.0, 1.5)], ids=["taken", "left"])
def test_it_is_asked_once(times: tuple[float, float], tmp_path: Path) -> None:
    options = Options()
    store = ContentStore(tmp_path)
    first = builder(options, store)
    choose_ways(cover_of(first), first, "cpu", clock_of(*times), "here")
    again = builder(options, store)
    cover = cover_of(again)
    choose_ways(cover, again, "cpu", clock_of(), "here")
    assert ("min_bytes_per_task=1048576" in str(scheduled(again, cover).schedule)) == (times[1] < 1)
    with pytest.raises(StopIteration):
        clock_of()(lambda: None)


def test_without_time_nothing_is_asked() -> None:
    made = builder(Options(tune_seconds=0))
    cover = cover_of(made)
    choose_ways(cover, made, "cpu", clock_of(), "here")
    assert "min_bytes" not in str(scheduled(made, cover).schedule)


@pytest.mark.parametrize(("cores", "asked"), [(2, 3), (1, 2)], ids=["all", "the first"])
def test_as_many_are_timed_as_there_is_time_to_build(
    monkeypatch: pytest.MonkeyPatch, cores: int, asked: int
) -> None:
    """Two other ways, and cores that build a kernel in a second each."""

    def two(self: VectorScheduler, found: Solution, by: Comparison) -> Sequence[Solution]:
        return [*proposed(self, found, by)] * 2

    monkeypatch.setattr(VectorScheduler, "specialised", two)
    monkeypatch.setattr("tilewright.pipeline.timed.kernel_ways.usable_cores", lambda: cores)
    made = builder(Options(tune_seconds=1))
    calls: list[None] = []

    def clock(run: Callable[[], object]) -> float:
        calls.append(None)
        return 1.0

    choose_ways(cover_of(made), made, "cpu", clock, "here")
    assert len(calls) == asked


def test_who_does_not_ask_for_them_has_none() -> None:
    made = builder(Options(specialise_warps=False))
    cover = cover_of(made)
    assert not list(other_ways(cover.graph, made))
    choose_ways(cover, made, "cpu", clock_of(), "here")
    assert "min_bytes" not in str(scheduled(made, cover).schedule)


def test_each_kernel_of_a_region_has_the_schedule_that_is_fastest() -> None:
    """All ways of the region were timed beside its usual one, each with one other kernel."""
    made = builder(Options())
    cover = cover_of(made)
    (way,) = other_ways(cover.graph, made)
    slow, other = replace(way, schedule=way.schedule.changed(warps=2)), replace(way, key="other")
    found = fastest_schedules(1.0, [(way, 0.6), (slow, 0.7), (other, 0.995)], "a region")
    assert found[way.key]["schedule"] == str(way.schedule) and found[way.key]["seconds"] == 0.6
    assert found["other"]["schedule"] == "" and found["other"]["usual_seconds"] == 1.0
    keep_schedules(found, verdicts_of(made, "here", stored=True))
    choose_ways(cover, made, "cpu", clock_of(), "here")
    assert "min_bytes_per_task=1048576" in str(scheduled(made, cover).schedule)


def test_what_is_not_built_is_not_preferred_any_more() -> None:
    made = builder(Options())
    cover = cover_of(made)
    choose_ways(cover, made, "cpu", clock_of(1.0, 0.7), "here")
    (kernel,) = (s for s in cover.steps if isinstance(s, Kernel))
    assert made.solver.forget_preferred(kernel) and not made.solver.forget_preferred(kernel)
    assert "min_bytes" not in str(scheduled(made, cover).schedule)


def test_what_is_not_built_is_not_stored_any_more(tmp_path: Path) -> None:
    """Else each process would build it once more."""
    (tmp_path / "store").mkdir(mode=0o700)
    store = ContentStore(tmp_path / "store")
    for clock, built in ((clock_of(1.0, 0.7), False), (clock_of(1.0, 0.7), True), (clock_of(), True)):
        made = builder(Options(), store)
        cover = cover_of(made)
        choose_ways(cover, made, "cpu", clock, "here")
        (kernel,) = (s for s in cover.steps if isinstance(s, Kernel))
        if not built:
            assert made.solver.forget_preferred(kernel)
    assert "min_bytes" in str(scheduled(made, cover).schedule)


def test_sizes_that_are_not_known_are_left() -> None:
    made = builder(Options())
    cover = cover_of(made, (0,))
    assert not list(other_ways(cover.graph, made))
    choose_ways(cover, made, "cpu", clock_of(), "here")
    assert "min_bytes" not in str(scheduled(made, cover).schedule)


def test_the_phase_stands_before_kernels_are_built() -> None:
    names = [phase.name for phase in PHASES]
    assert names.index("partition") < names.index("ways") < names.index("kernels")


@pytest.mark.parametrize(
    ("dtype", "seconds", "near"),
    [
        (torch.float16, 1.3, True),
        (torch.float16, 1.8, True),
        (torch.float16, 2.5, False),
        (torch.float32, 1.8, False),
    ],
)
def test_attention_is_timed_that_may_have_specialised_warps(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, seconds: float, near: bool
) -> None:
    """The model knows how much the usual warps take."""
    monkeypatch.undo()
    (region,) = compiled(attention(CHANGES["full"]), [torch.zeros(1, 64, 256, 64, dtype=dtype)] * 3).regions
    target, options = preset("sm_90"), Options()
    decisions = Decisions(target, ContentStore(None), options, {})
    made = KernelBuilder(in_silence, BACKENDS["cuda"], Solver(target, options), decisions)
    assert _is_near(replace(region, seconds=seconds, library=1.0), made) == near
