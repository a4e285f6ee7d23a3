"""The thread pool: coverage, several callers, resizing, scratch, fork, the end of the process, wake latency."""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.runtime.child_process import script, within

from tilewright.options import Options
from tilewright.runtime.cpu import pool, toolchain
from tilewright.runtime.store.cache import ContentStore

_STORE = ContentStore(None)
LONGEST_ALONE = 0.4
"""Seconds, somewhat more than `longest_lone_ns`."""


class Calls:
    """A pool of its own and the probe, with typed arguments."""

    def __init__(self) -> None:
        options = Options()
        self.pool = pool.Pool(toolchain.load(toolchain.build_texts([pool.source()], (), _STORE, options)))
        probe = (Path(__file__).parent / "pool_probe.cpp").read_text(encoding="utf-8")
        self.library = toolchain.load(toolchain.build_texts([probe], (), _STORE, options))

    def __call__(self, name: str, *args: int | np.ndarray) -> int:
        function = getattr(self.library, name)
        function.restype = ctypes.c_int64
        values = [ctypes.c_int64(a if isinstance(a, int) else a.ctypes.data) for a in args]
        return function(ctypes.c_void_p(self.pool.parallel), *values)


@pytest.fixture(scope="module", params=["own", "team"])
def shared(request: pytest.FixtureRequest) -> Iterator[Calls]:
    """A pool with threads of its own, and one that joins those of torch."""
    calls = Calls()
    before = torch.get_num_threads()
    if request.param == "team":
        team = pool.team()
        if team is None:
            pytest.skip("torch's threads cannot be joined here")
        calls.pool.join(team)
        torch.set_num_threads(2)
    yield calls
    torch.set_num_threads(before)
    assert calls.pool.shutdown()


@pytest.fixture
def calls(shared: Calls) -> Calls:
    shared.pool.resize(2)
    return shared


def test_every_index_once(calls: Calls) -> None:
    seen = np.zeros(5000, "i4")
    for n in (0, 1, 2, 3, 16, 17, 100, 4999):
        for grain in (1, 7, 64, 10_000):
            assert calls("cover", seen, n, grain, 40) == 0


def test_every_size_of_pool(calls: Calls) -> None:
    seen = np.zeros(600, "i4")
    for threads in (1, 2, 3, 8, 2, 1, 5):
        calls.pool.resize(threads)
        assert calls.pool.workers == threads
        assert calls("cover", seen, 600, 4, 200) == 0


def test_size_is_clamped(calls: Calls) -> None:
    calls.pool.resize(-3)
    assert calls.pool.workers == 1
    calls.pool.resize(100_000)
    assert calls.pool.workers == 200


def test_workers_take_part(calls: Calls) -> None:
    assert within(20.0, lambda: calls("who", 64, 20_000) == 0b11)


def test_small_work_stays_on_the_caller(calls: Calls) -> None:
    seen = np.zeros(64, "i4")
    assert calls("who", 1, 100) == 1
    assert calls("cover", seen, 64, 64, 10) == 0


def test_pinned_workers(calls: Calls) -> None:
    mine = threading.get_native_id()
    before = Path(f"/proc/self/task/{mine}/status").read_text() if sys.platform == "linux" else ""
    calls.pool.resize(2, pin=True)
    assert calls("cover", np.zeros(100, "i4"), 100, 1, 100) == 0
    if before:

        def allowed(status: str) -> str:
            return next(line for line in status.splitlines() if line.startswith("Cpus_allowed:"))

        assert allowed(before) == allowed(Path(f"/proc/self/task/{mine}/status").read_text())


def test_many_callers(calls: Calls) -> None:
    faults: list[int] = []

    def caller() -> None:
        seen = np.zeros(500, "i4")
        faults.extend(calls("cover", seen, 500, 8, 50) for _ in range(10))

    threads = [threading.Thread(target=caller) for _ in range(6)]
    for t in threads:
        t.start()
    for size in (1, 3, 2, 4):  # resized under way
        calls.pool.resize(size)
        time.sleep(0.005)
    for t in threads:
        t.join()
    assert faults == [0] * 60


def test_region_in_a_region_runs_on_its_caller(calls: Calls) -> None:
    assert calls("nested", np.zeros(100, "i4"), 50) == 0


def test_held_regions_end_before_the_next_begins(calls: Calls) -> None:
    seen = np.zeros(1000, "i4")
    for n in (1, 2, 3, 17, 100, 999):
        for grain in (1, 7, 64, 10_000):
            assert calls("held", calls.pool.hold, seen, n, grain, 300) & 0xFFFFFFFF == 0


def test_held_threads_take_part(calls: Calls, request: pytest.FixtureRequest) -> None:
    seen = np.zeros(4, "i4")
    assert within(20.0, lambda: calls("held", calls.pool.hold, seen, 4, 1, 20_000) >> 32 == 0b11)
    torch.set_num_threads(2)
    if request.node.callspec.params["shared"] == "team":

        def is_one_region() -> bool:
            calls.pool.rejoin()  # another program may have kept the team's threads before
            before = calls.pool.regions
            together = calls("held", calls.pool.hold, seen, 4, 1, 20_000) >> 32 == 0b11
            return together and calls.pool.regions - before < 1000

        assert within(20.0, is_one_region), "all of them are one region of the team"


def test_a_held_thread_that_does_not_come_is_not_waited_for() -> None:
    """The second thread of this team comes when the first has ended."""
    calls = Calls()
    late = calls.library.join_late_team
    late.restype, late.argtypes = ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64]
    calls.pool.resize(2)
    late(ctypes.cast(calls.pool._library.tw_join, ctypes.c_void_p), 1000)  # pyright: ignore[reportPrivateUsage]
    assert calls("held", calls.pool.hold, np.zeros(100, "i4"), 100, 1, 50) == 1 << 32
    assert calls.pool.shutdown()


def test_a_held_thread_whose_long_share_ends_a_little_later_is_asked_again(calls: Calls) -> None:
    torch.set_num_threads(2)

    def again() -> bool:
        calls.pool.rejoin()  # another program may have kept the team's threads before
        return calls("uneven", calls.pool.hold, 20_000, 25_000) == 0b11

    assert within(20.0, lambda: sum(again() for _ in range(9)) > 4)


def taken_by_others() -> float:
    """Seconds that the cores have worked for other processes."""
    user, nice, system, *_ = (int(n) for n in Path("/proc/stat").read_text().split()[1:9])
    own = os.times()
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - own.user - own.system


@pytest.mark.skipif(sys.platform != "linux", reason="asks for the cores of threads")
def test_a_thread_that_wakes_on_its_callers_core_leaves_it(calls: Calls) -> None:
    torch.set_num_threads(2)
    found: list[int] = []
    for _ in range(10):
        start, before = time.monotonic(), taken_by_others()
        late = calls("together", calls.pool.hold, 10, 20_000)
        if taken_by_others() - before < 0.1 * (time.monotonic() - start):
            found.append(late)
    if not found:
        pytest.skip("other programs have the cores")
    assert min(found) <= 2


@pytest.mark.slow  # other programs on the machine may take the cores meanwhile
@pytest.mark.skipif(
    sys.platform != "linux" or not pool.sleeps_at_once(os.environ),
    reason="asks for the cores of passive threads",
)
def test_a_thread_that_sleeps_at_once_leaves_its_callers_core_at_once(calls: Calls) -> None:
    """A team that waits passively, as in `make test`, sleeps between any two regions, not only after a pause."""
    torch.set_num_threads(2)

    def late() -> int:
        calls.pool.rejoin()  # another program may have kept the team's threads before
        return calls("together", calls.pool.hold, 10, 100)

    assert min(late(), late()) <= 5, "without an offer of the core, all ten regions"


@pytest.mark.parametrize(
    ("environment", "at_once"),
    [
        ({}, False),
        ({"OMP_WAIT_POLICY": "active"}, False),
        ({"OMP_WAIT_POLICY": " Passive "}, True),
        ({"GOMP_SPINCOUNT": "0"}, True),
        ({"KMP_BLOCKTIME": "0"}, True),
    ],
)
def test_who_sleeps_at_once(environment: dict[str, str], at_once: bool) -> None:
    assert pool.sleeps_at_once(environment) is at_once


def test_scratch_belongs_to_one_thread(calls: Calls) -> None:
    for size in (8, 4096, 100_000, 64):
        assert calls("scratch_faults", calls.pool.scratch, 40, size) == 0
    faults: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: faults.append(calls("scratch_faults", calls.pool.scratch, 40, 50_000))
        )
        for _ in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert faults == [0] * 4


def test_shutdown_then_serial_then_again(calls: Calls) -> None:
    assert calls.pool.shutdown()
    assert calls.pool.workers == 1
    assert calls("who", 64, 1000) == 1
    assert calls.pool.shutdown()
    calls.pool.resize(2)
    assert calls("cover", np.zeros(100, "i4"), 100, 1, 20) == 0


def test_team_is_joined_where_its_size_fits() -> None:
    """With torch at one thread, two threads are our own: they then start, which resizing alone does not do."""
    team = pool.team()
    if team is None:
        pytest.skip("torch's threads cannot be joined here")
    calls, torch_threads = Calls(), torch.get_num_threads()
    calls.pool.join(team)
    own = lambda: sum(1 for _ in Path("/proc/self/task").iterdir())  # noqa: E731
    torch.set_num_threads(2)
    calls("cover", np.zeros(100, "i4"), 100, 1, 20)
    assert calls.pool.shutdown()
    calls.pool.resize(2)
    before = own()
    calls("cover", np.zeros(100, "i4"), 100, 1, 20)
    assert own() == before
    torch.set_num_threads(1)
    calls("cover", np.zeros(100, "i4"), 100, 1, 20)
    assert own() == before + 1
    torch.set_num_threads(torch_threads)
    assert calls("cover", np.zeros(100, "i4"), 100, 1, 20) == 0
    assert calls.pool.shutdown()


def test_a_team_that_keeps_its_caller_waiting_is_left_for_a_while() -> None:
    """A thread of the team is not scheduled for 5 ms: the next regions are the caller's, until it tries again."""
    calls = Calls()
    join = calls.pool._library.tw_join  # pyright: ignore[reportPrivateUsage]
    calls.pool.resize(2)
    late = calls.library.join_late_team
    late.restype, late.argtypes = ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64]
    place = ctypes.cast(join, ctypes.c_void_p)
    teams = lambda lag: int(late(place, lag))  # noqa: E731
    teams(0)
    time.sleep(LONGEST_ALONE)  # what an earlier test may have met
    for _ in range(100):
        calls("who", 64, 10)
    # Where other programs keep the team's threads at each try, it is tried once in 0.32 seconds.
    assert within(60.0, lambda: calls("who", 64, 10) > 0 and teams(0) > 20), "a team in time is taken again"
    before, start = teams(5000), time.monotonic()
    for _ in range(1000):
        calls("who", 64, 10)
    tries, seconds = teams(0) - before, time.monotonic() - start
    assert 1 <= tries <= 2 + seconds / 0.01, "one try, then at most one in 10 ms"
    time.sleep(LONGEST_ALONE)
    calls("who", 64, 10)
    assert teams(0) == before + tries + 1, "it is tried again"
    assert calls.pool.shutdown()


def test_alone_is_one_thread_for_regions_and_for_torch(calls: Calls, request: pytest.FixtureRequest) -> None:
    counted = torch.get_num_threads()
    seen: list[int] = []
    calls.pool.alone()
    try:
        before = calls.pool.regions
        assert calls("who", 64, 1000) == 1
        assert calls.pool.regions == before
        joined = request.node.callspec.params["shared"] == "team"
        if counted > 1:
            inside = torch.get_num_threads()
            other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            other.start()
            other.join()
            assert (inside, seen) == (1 if joined else counted, [counted])
    finally:
        calls.pool.together()
    calls.pool.together()  # without a beginning: nothing
    assert torch.get_num_threads() == counted
    assert within(20.0, lambda: calls("who", 64, 10) > 0 and calls.pool.regions > before)


FORK = """
import os
import numpy as np
from tests.runtime.cpu.test_pool import Calls
from tilewright.runtime.cpu import pool
calls = Calls()
calls.pool.join(pool.team())
calls.pool.resize(2)
seen = np.zeros(500, "i4")
assert calls("cover", seen, 500, 4, 50) == 0
for _ in range(4):
    child = os.fork()
    if not child:
        bad = calls("cover", seen, 500, 4, 200)
        ok = calls.pool.shutdown() and not bad
        os._exit(0 if ok else 1)
    assert calls("cover", seen, 500, 4, 50) == 0
    assert os.waitpid(child, 0)[1] == 0
assert calls.pool.shutdown()
print("fine")
"""
END = """
import threading
import numpy as np
from tilewright.options import Options
from tilewright.runtime.cpu import pool
from tilewright.runtime.store.cache import ContentStore
from tests.runtime.cpu.test_pool import Calls
p = pool.pool(ContentStore(None), Options())
assert p is pool.pool(ContentStore(None), Options())
p.resize(2)
calls = Calls()
calls.pool = p

def forever():
    while True:
        calls("cover", np.zeros(500, "i4"), 500, 4, 50)

calls("cover", np.zeros(500, "i4"), 500, 4, 50)
threading.Thread(target=forever, daemon=True).start()
print("fine")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
@pytest.mark.parametrize(
    "text", [FORK, FORK.replace("calls.pool.join(pool.team())", ""), END], ids=["fork", "own", "end"]
)
def test_processes(text: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script(text)], capture_output=True, timeout=120, check=False
    )
    assert run.stdout.strip() == b"fine", run.stderr.decode()
    assert run.returncode == 0, run.stderr.decode()


def test_wake_latency(calls: Calls) -> None:
    """Printed, not gated: a shared machine decides it."""
    calls("many_empty", 2, 2000)
    start = time.perf_counter()
    calls("many_empty", 2, 2000)
    hot = (time.perf_counter() - start) / 2000
    cold: list[float] = []
    for _ in range(30):
        time.sleep(0.002)
        start = time.perf_counter()
        calls("empty", 2)
        cold.append(time.perf_counter() - start)
    print(
        f"region of an empty task: {hot * 1e6:.2f} us hot, {statistics.median(cold) * 1e6:.1f} us after 2 ms"
    )
