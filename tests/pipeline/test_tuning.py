"""Choices of a graph from a tuning file: nothing is timed again; what cannot be had costs speed alone."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import Function
from tests.support.triton.absent_gpu import Device, compiled
from torch import Tensor

from tilewright.capture.fx import from_fx
from tilewright.capture.trace import trace
from tilewright.errors import BuildError, CacheWarning, InputError, KernelRefused
from tilewright.library.select import select
from tilewright.options import Options
from tilewright.partition.cover import partition
from tilewright.pipeline.backends import BACKENDS
from tilewright.pipeline.backends.cuda import CudaBackend
from tilewright.pipeline.build import KernelBuilder, in_silence
from tilewright.pipeline.replay_trial import Contest, ReplayContestant, ReplayTrial
from tilewright.pipeline.trial import CoverTrial
from tilewright.rewrite.normal.normalise import normalise
from tilewright.runtime.cpu.toolchain import host_target
from tilewright.runtime.plan.arguments import Argument
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.stats import STATS
from tilewright.runtime.store import cache
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.runtime.store.decisions import Decisions
from tilewright.runtime.store.tuned import Tuned, TuningSession, tuning
from tilewright.runtime.store.tuning_file import TuningFile, entry_name
from tilewright.schedule.product_table import (
    FastestProduct,
    MeasuredBlocks,
    ProductShape,
    ProductTable,
)
from tilewright.schedule.solver import Solver


def mlp(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, a)) * F.linear(x, b), c) + x


def heads(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
    rows, width = x.shape
    a, b, c = (F.linear(x, w).view(1, rows, 2, width // 2).transpose(1, 2) for w in (q, k, v))
    return F.linear(F.scaled_dot_product_attention(a, b, c).transpose(1, 2).reshape(rows, width), o) + x


SHAPES: Sequence[tuple[int, ...]] = ((40, 64), (96, 64), (96, 64), (64, 96))


TABLED = {2: (96, 64, 40 * 64), 1: (64, 96, 40 * 96)}
"""n, k and elements of the first operand of both groups, by their numbers of products."""


def halves(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).half() / 4 for shape in shapes]


def made(
    run: Callable[..., Tensor] = mlp, shapes: Sequence[tuple[int, ...]] = SHAPES, **options: Any
) -> Device:
    """The kernels of a program on a GPU; no library call may be left."""
    given = halves(*shapes)
    device = compiled(run, given, contractions="modelled", **options)
    results, _ = device.run(given)
    torch.testing.assert_close(results[0], run(*given), rtol=4e-3, atol=4e-3)
    return device


class Clock:
    """Our kernels take half of the library's second."""

    asked = 0

    def __call__(self, trial: ReplayTrial, contests: Sequence[Contest]) -> list[list[float | None]]:
        self.asked += len(contests)
        return [[1.0, *[0.5] * (len(ways) - 1)] for ways in contests]


@pytest.fixture
def clock() -> Iterator[Clock]:
    found = Clock()
    with (
        mock.patch.object(CudaBackend, "replay_clock", lambda backend, device: lambda run: 0.0),
        mock.patch.object(ReplayTrial, "__call__", lambda trial, contests: found(trial, contests)),
    ):
        yield found


def tuned_file(path: Path, run: Callable[[], object], seconds: float = 1000) -> TuningFile:
    """What tuning some program writes."""
    with tuning(TuningSession(seconds)) as session:
        run()
    session.found.write(path)
    return session.found


def test_a_process_with_the_file_times_nothing(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    found = tuned_file(path, made)
    STATS.reset()
    before = clock.asked
    first, again = (made(tuning_file=str(path), tune_seconds=s) for s in (0, 60))
    assert clock.asked == before > 0 and STATS.timed == 0
    assert [str(k.schedule) for k in first.kernels] == [str(k.schedule) for k in again.kernels]
    said = [e["schedule"] for name, e in found.devices["cuda:0"].items() if name.startswith("product ")]
    assert said and set(said) <= {str(k.schedule) for k in first.kernels}


def test_what_the_file_does_not_know_is_decided_as_without_it(clock: Clock, tmp_path: Path) -> None:
    """By the table of the package, where nothing may be timed."""
    path, blocks = tmp_path / "t.json", MeasuredBlocks((16, 32), 32, 4, 3)
    found = tuned_file(path, made)
    entries = found.devices["cuda:0"]
    kept, *_ = (name for name in entries if name.startswith("product "))
    TuningFile({"cuda:0": {kept: entries[kept]}}).write(path)
    shapes = [ProductShape("contraction", 2, n, True, 1, "kkn", 1, 40, *s) for n, s in TABLED.items()]
    table = ProductTable(tuple(FastestProduct(s, blocks, 8.0, 10.0, "somewhere") for s in shapes))
    before = clock.asked
    with mock.patch("tilewright.pipeline.products.product_table", lambda target: table):
        device = made(tuning_file=str(path), tune_seconds=0)
    assert clock.asked == before and len(device.kernels) == 2
    assert entries[kept]["schedule"] in {str(k.schedule) for k in device.kernels}


def test_attention_is_in_the_file(clock: Clock, tmp_path: Path) -> None:
    path, shapes = tmp_path / "t.json", ((40, 64), *[(64, 64)] * 4)
    found = tuned_file(path, lambda: made(heads, shapes))
    kinds = {name.partition(" ")[0] for name in found.devices["cuda:0"]}
    assert kinds == {"product", "attention"}
    before = clock.asked
    made(heads, shapes, tuning_file=str(path), tune_seconds=0)
    assert clock.asked == before


def test_a_library_that_won_stays(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    found = tuned_file(path, made)
    won = {name: {**e, "schedule": ""} for name, e in found.devices["cuda:0"].items()}
    TuningFile({"cuda:0": won}).write(path)
    before = clock.asked
    with pytest.raises(AssertionError, match="a library call is left"):
        made(tuning_file=str(path))
    assert clock.asked == before


@pytest.mark.parametrize(
    ("old", "new"),
    [(r"\bc(\d)", r"d\1"), (r":grid/\d+x\d+", ":grid/8388608x8388608")],
    ids=["other classes", "too large"],
)
def test_a_schedule_that_does_not_fit_is_not_taken(old: str, new: str, clock: Clock, tmp_path: Path) -> None:
    """The library's plan, and a warning that says why."""
    path = tmp_path / "t.json"
    found = tuned_file(path, made).devices["cuda:0"]
    wrong = {name: {**e, "schedule": re.sub(old, new, str(e["schedule"]))} for name, e in found.items()}
    TuningFile({"cuda:0": wrong}).write(path)
    with pytest.warns(RuntimeWarning, match="a schedule that was measured before is not taken for") as said:
        with pytest.raises(AssertionError, match="a library call is left"):
            made(tuning_file=str(path))
    words = "is none of" if new.startswith("d") else "level|bytes|registers|threads"
    assert all(re.search(words, str(w.message)) for w in said), [str(w.message) for w in said]


def test_a_file_that_says_nonsense_is_refused_and_not_left_out(clock: Clock, tmp_path: Path) -> None:
    """(What only makes a graph faster is left out where it fails: not so what the user wrote.)"""
    path = tmp_path / "t.json"
    text = tuned_file(path, made).text().replace(":grid/", ":grid/-", 1)
    path.write_text(text)
    with pytest.raises(InputError, match=r"tiles are at least 1.*t\.json: cuda:0: product"):
        made(tuning_file=str(path))


def test_without_time_nothing_is_timed_and_it_is_told(clock: Clock, tmp_path: Path) -> None:
    with tuning(TuningSession(0)) as session, pytest.raises(AssertionError, match="a library call is left"):
        made()
    assert not clock.asked and session.found.devices == {"cuda:0": {}}
    assert {name.partition(" ")[0] for name in session.unsettled} == {"product"}


def test_who_measures_nothing_takes_nothing(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    tuned_file(path, made)
    with pytest.raises(AssertionError, match="a library call is left"):
        made(tuning_file=str(path), measure=False)


# --- builders and memory that fail ------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        BuildError("no worker starts", phase="build"),
        KernelRefused("the Triton compiler died (exit status -9)"),
    ],
    ids=["no worker", "died"],
)
def test_a_builder_that_fails_is_told_once(error: BuildError, tmp_path: Path) -> None:
    with (
        mock.patch.object(CudaBackend, "replay_clock", lambda backend, device: lambda run: 0.0),
        mock.patch.object(CudaBackend, "built", side_effect=error),
        pytest.warns(RuntimeWarning, match="kernels are not timed, the library is taken") as said,
    ):
        for _ in range(2):
            with pytest.raises(AssertionError, match="a library call is left"):
                made()
    assert len(said) == 1


def builder(tuned: Tuned | None = None) -> KernelBuilder:
    target, options = host_target(), Options()
    store = ContentStore(default_root(options))
    decisions = Decisions(target, store, options, {})
    solver = Solver(target, options)
    return KernelBuilder(in_silence, BACKENDS["cpu"], solver, decisions, tuned=tuned or Tuned())


def ways() -> list[ReplayContestant]:
    """With a call for the product, and with a kernel, twice."""
    x, w = torch.randn(8, 24), torch.randn(16, 24)
    run = Function(lambda x, w: torch.relu(F.linear(x, w)))
    graph = normalise(from_fx(trace(run, (x, w), [(), ()]).gm))
    solver = Solver(host_target(), Options())
    library, ours = (partition(g, solver.price, solver.hints) for g in (normalise(select(graph)), graph))
    return [ReplayContestant(library), ReplayContestant(ours), ReplayContestant(replace(ours))]


@pytest.mark.parametrize("error", [MemoryError("none"), torch.OutOfMemoryError("none left")])
def test_a_candidate_without_memory_is_dropped_and_leaves_nothing(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are timed. (A log that is kept holds no operands.)"""
    held: list[weakref.ref[Tensor]] = []
    runs: list[int] = []

    def clock(run: Callable[[], object]) -> float:
        runs.append(1)
        if len(runs) == 2:
            raise error
        run()
        return 1.0

    call = Executable.__call__

    def watched(executable: Executable, arguments: list[Argument]) -> object:
        held.extend(weakref.ref(t) for t in arguments if isinstance(t, Tensor))
        return call(executable, arguments)

    with caplog.at_level("DEBUG", "tilewright"), mock.patch.object(Executable, "__call__", watched):
        assert ReplayTrial(builder(), "cpu", clock)([ways()]) == [[1.0, None, 1.0]]
    assert "a way is dropped" in caplog.text
    error.__traceback__ = None  # this test's own
    gc.collect()
    assert held and not any(ref() is not None for ref in held)


def test_times_of_covers_are_noted_and_taken(tmp_path: Path) -> None:
    torch.manual_seed(0)
    graph = ways()[1].cover.graph
    numbered = graph.with_ops([replace(op, kernel=0) for op in graph.ops])
    session = TuningSession(1000)
    found = CoverTrial(builder(Tuned("here", {}, session)), "cpu")([numbered, graph])
    assert found is not None and len(found) == 2
    ((name, entry),) = session.found.devices["here"].items()
    assert name.startswith("cover ") and entry["seconds"] == found and "->" in str(entry["what"])
    known = Tuned("here", {name: {"seconds": [3.0, 4.0]}})
    STATS.reset()
    assert CoverTrial(builder(known), "cpu")([numbered, graph]) == [3.0, 4.0] and STATS.timed == 0
    given_up = Tuned("here", {name: {"seconds": None}})  # no clock could tell: the next one need not try
    assert CoverTrial(builder(given_up), "cpu")([numbered, graph]) is None and STATS.timed == 0
    over = TuningSession(0)
    assert CoverTrial(builder(Tuned("here", {}, over)), "cpu")([numbered, graph]) is None
    assert over.unsettled == {name} and not over.found.devices.get("here")
    assert name == entry_name("cover", name.removeprefix("cover "))


def test_a_full_disk_costs_speed_alone(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was decided is taken by this process, and timed again by the next."""
    store = ContentStore(tmp_path / "kernels")
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(cache, "_write_entry", _only_in_memory(full))
    with mock.patch("tests.support.triton.absent_gpu.ContentStore", lambda root: store):
        with pytest.warns(CacheWarning, match="No space left"):
            made()
        before = clock.asked
        made()
        assert clock.asked == before > 0
    with mock.patch(
        "tests.support.triton.absent_gpu.ContentStore", lambda root: ContentStore(tmp_path / "kernels")
    ):
        with pytest.warns(CacheWarning, match="No space left"):
            made()
    assert clock.asked == 2 * before


def _only_in_memory(full: Callable[..., object]) -> Callable[..., object]:
    """The store's own folder takes nothing; a temporary one does."""
    write = cache._write_entry  # pyright: ignore[reportPrivateUsage]

    def written(folder: Path, files: dict[str, bytes | Path]) -> object:
        return full() if "kernels" in folder.parts else write(folder, files)

    return written
