"""The timer: the fastest way wins, what fails or is impossible does not, and choices outlive the process."""

from __future__ import annotations

import gc
import itertools
import json
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Expr, symbol
from tilewright.ir.graph import LibraryCall, Operand, Value
from tilewright.ir.sizes import dims
from tilewright.library.choose import Pass, TimedOffer
from tilewright.options import Options
from tilewright.runtime.cpu.toolchain import host_target
from tilewright.runtime.own.timer import Timer
from tilewright.runtime.store.cache import ContentStore
from tilewright.runtime.store.tuned import Tuned, TuningSession, tuned_for, tuning
from tilewright.tuning.search_limits import TIMER

ROWS = symbol("rows")
X = Value(0, (ROWS, dims.integer(256)), f32)


def timer(store: ContentStore, **sizes: int) -> Timer:
    return Timer(host_target(), store, Options.make({}), sizes)


def candidate(name: str, function: Callable[[Tensor], Tensor], *passes: Pass) -> TimedOffer:
    return TimedOffer(name, LibraryCall(name, function, (Operand(0),)), (X,), passes)


def slow(seconds: float) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        time.sleep(seconds)
        return x

    return run


def fail(x: Tensor) -> Tensor:
    raise RuntimeError("not here")


def test_the_fastest_wins_and_is_remembered(tmp_path: Path) -> None:
    store = ContentStore(tmp_path / "kernels")
    ways = [
        candidate("a", slow(0.006)),
        candidate("b", slow(0.002)),
        candidate("c", slow(0.009)),
        candidate("d", fail),
    ]
    for _ in range(TIMER.max_measurements):  # on a busy machine one is not enough
        assert timer(store).measure("task", ways) == "b"
    assert timer(store).known_choice("task") == "b"
    assert timer(ContentStore(tmp_path / "kernels")).known_choice("task") == "b"
    assert timer(store).known_choice("another task") is None


def disturbed(seconds: float) -> Callable[[Tensor], Tensor]:
    """Only every third run is as fast as it should be."""
    count = itertools.count()
    return lambda x: slow(seconds if next(count) % 3 == 0 else 20 * seconds)(x)


def test_a_noisy_choice_is_not_final() -> None:
    store = ContentStore(None)
    ways = [candidate("a", disturbed(0.002)), candidate("b", slow(0.05))]
    for _ in range(TIMER.max_measurements - 1):
        assert timer(store).measure("task", ways) == "a"
        assert measuring(store).known_choice("task") is None
    timer(store).measure("task", ways)
    assert measuring(store).known_choice("task") == "a"


def measuring(store: ContentStore) -> Timer:
    """The timer of a compilation that has measured something."""
    made = timer(store)
    made.measure("another", [candidate("a", slow(0.001))])
    return made


def test_a_compilation_that_knows_every_choice_measures_nothing() -> None:
    store = ContentStore(None)
    timer(store).measure("task", [candidate("a", disturbed(0.002)), candidate("b", slow(0.05))])
    assert timer(store).known_choice("task") == "a"


def test_one_compilation_repeats_few_measurements() -> None:
    store = ContentStore(None)
    for task in ("first", "second"):
        timer(store).measure(task, [candidate("a", disturbed(0.002)), candidate("b", slow(0.05))])
    later = measuring(store)
    assert [later.known_choice("first"), later.known_choice("second")] == [None, "a"]


def test_the_best_times_of_all_trials_count() -> None:
    store = ContentStore(None)
    timer(store).measure("task", [candidate("a", disturbed(0.002)), candidate("b", slow(0.03))])
    again = [candidate("a", slow(0.05)), candidate("b", slow(0.03))]
    assert timer(store).measure("task", again) == "a"


def test_defects_are_logged_and_refusals_are_not(caplog: pytest.LogCaptureFixture) -> None:
    def broken(x: Tensor) -> Tensor:
        raise KeyError("a defect")

    with caplog.at_level("WARNING", "tilewright"):
        ways = [candidate("a", fail), candidate("b", broken), candidate("c", slow(0.001))]
        assert timer(ContentStore(None)).measure("task", ways) == "c"
    (record,) = caplog.records
    assert record.levelname == "ERROR" and record.exc_info is not None and "b failed" in record.message


def test_a_way_that_runs_out_of_memory_later_is_dropped() -> None:
    """Whenever that is; what it read goes with it."""
    for good in (0, 1, 2):
        count, held = itertools.count(), list[weakref.ref[Tensor]]()

        def run(x: Tensor, count: itertools.count[int] = count, good: int = good) -> Tensor:
            held.append(weakref.ref(x))  # noqa: B023
            if next(count) >= good:
                raise torch.OutOfMemoryError("none left")
            return x

        ways = [candidate("a", slow(0.002)), candidate("b", run)]
        assert timer(ContentStore(None)).measure("task", ways) == "a"
        gc.collect()
        assert held and not any(ref() is not None for ref in held)


def test_operands_that_do_not_fit_are_not_timed() -> None:
    huge = symbol("huge")
    large = Value(1, (huge, dims.integer(1 << 20)), f32)
    ways = [candidate("a", slow(0.001)), replace(candidate("b", slow(0.0)), inputs=(large,))]
    assert timer(ContentStore(None), huge=1 << 36).measure("task", ways) == "a"
    assert timer(ContentStore(None), huge=1 << 36).measure("task", ways[1:]) == "b"  # the only one


def test_who_tunes_gives_the_time_and_hears_of_noisy_choices() -> None:
    store, ways = ContentStore(None), [candidate("a", disturbed(0.002)), candidate("b", slow(0.05))]
    with tuning(TuningSession(1000)) as session:
        tuned = tuned_for(Options(), "here")
        made = [replace(timer(store), tuned=tuned) for _ in range(TIMER.max_measurements)]
        for each in made:
            assert each.known_choice("task") is None and each.measure("task", ways) == "a"
            assert bool(session.unsettled) == (each is not made[-1])
    ((name, entry),) = session.found.devices["here"].items()
    assert entry["fastest"] == "a"
    known = replace(timer(ContentStore(None)), tuned=Tuned("here", {name: {**entry, "fastest": "b"}}))
    assert known.known_choice("task") == "b"
    with tuning(TuningSession(0)) as over:
        late = replace(timer(ContentStore(None)), tuned=tuned_for(Options(), "here"))
        assert late.measure("task", ways[::-1]) == "b" and over.unsettled == {name}


def test_other_threads_are_another_choice() -> None:
    store = ContentStore(None)
    for _ in range(TIMER.max_measurements):
        timer(store).measure("task", [candidate("a", slow(0.001))])
    assert timer(store).known_choice("task") == "a"
    many = Timer(host_target(), store, Options.make({"threads": 7}), {})
    assert many.known_choice("task") is None


def test_a_pass_behind_a_way_counts() -> None:
    huge = Pass(Value(1, (dims.integer(1 << 22),), f32), 400)
    ways = [candidate("a", slow(0.001), huge), candidate("b", slow(0.002))]
    assert timer(ContentStore(None)).measure("task", ways) == "b"


def test_what_is_faster_than_memory_did_not_do_the_work() -> None:
    ways = [candidate("honest", lambda x: x * 2), candidate("empty", lambda x: x)]
    assert timer(ContentStore(None), rows=1 << 16).measure("task", ways) == "honest"


def test_ways_see_operands_of_the_example_sizes() -> None:
    seen: set[torch.Size] = set()

    def look(x: Tensor) -> Tensor:
        seen.add(x.shape)
        return x

    timer(ContentStore(None), rows=77).measure("task", [candidate("a", look)])
    assert seen == {torch.Size([77, 256])}


def test_ways_share_operands_and_each_operand_is_another_tensor() -> None:
    seen: list[list[int]] = []

    def look(x: Tensor, y: Tensor) -> Tensor:
        seen.append([t.data_ptr() for t in (x, y)])
        return x + y

    def way(name: str, *wants: tuple[Expr, ...] | None) -> TimedOffer:
        return TimedOffer(name, LibraryCall(name, look, (Operand(0), Operand(1)), wants=wants), (X, X), ())

    across = (dims.ONE, ROWS)
    timer(ContentStore(None), rows=64).measure("task", [way("a"), way("b"), way("c", None, across)])
    first, second, *_ = seen
    third = next(s for s in seen if s != first)
    assert first == second
    assert first[0] != first[1]
    assert (third[0], third[1]) == (first[0], third[1])
    assert third[1] not in first


def test_if_all_fail_the_first_is_named() -> None:
    assert timer(ContentStore(None)).measure("task", [candidate("a", fail), candidate("b", fail)]) == "a"


@pytest.mark.parametrize("measure", [True, False])
def test_compiling_measures_unless_told_not_to(
    measure: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    m = nn.Sequential(nn.Linear(96, 256), nn.GELU(), nn.Linear(256, 96)).eval().requires_grad_(False)
    x = torch.randn(200, 96)
    options = {"measure": measure}
    compiled = tilewright.compile(m, (x,), freeze=True, options=options)
    torch.testing.assert_close(compiled(x), m(x), rtol=1e-4, atol=1e-5)
    choices = [json.loads(path.read_text()) for path in tmp_path.rglob("choice.json")]
    assert len(choices) == (2 if measure else 0)
    assert all(len(v["seconds"]) > 1 for v in choices)
