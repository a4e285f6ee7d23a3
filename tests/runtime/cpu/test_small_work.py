"""Small work stays on the caller's thread: counted in regions entered and in what other threads do, not in time."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable

import pytest
import torch
from tests.runtime.child_process import within
from torch import Tensor

import tilewright
from tilewright.ir.expr import Expr
from tilewright.ir.sizes.host import number
from tilewright.options import Options
from tilewright.plan import CallStep, Launches, Plan
from tilewright.plan.bind import names_in
from tilewright.runtime.cpu import pool
from tilewright.runtime.plan import steps
from tilewright.runtime.store.cache import ContentStore
from tilewright.target import preset


class Voice(torch.nn.Module):
    """What detects speech in small parts of sound: frames, their spectra, convolutions, a cell, one number."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = torch.nn.Conv1d(1, 130, 128, stride=64, bias=False)
        self.body = torch.nn.Conv1d(65, 64, 3, padding=1, stride=2)
        self.cell = torch.nn.LSTMCell(64, 64)
        self.head = torch.nn.Linear(64, 1)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.frames(x[:, None])
        power = torch.sqrt(s[:, :65] ** 2 + s[:, 65:] ** 2 + 1e-9)
        h, c = self.cell(torch.relu(self.body(power))[..., -1], (h, c))
        return torch.sigmoid(self.head(torch.relu(h))), h, c


def voice() -> tuple[Callable[..., object], tuple[Tensor, ...]]:
    args = (torch.randn(1, 512), torch.randn(1, 64), torch.randn(1, 64))
    with torch.no_grad():
        return tilewright.compile(Voice().eval(), args, freeze=True), args


def regions() -> int:
    running = pool.running()
    assert running is not None
    return running.regions


def test_a_small_model_wakes_nobody() -> None:
    fast, args = voice()
    with torch.no_grad():
        for _ in range(3):
            fast(*args)
        time.sleep(0.3)  # what compiled may still spin
        before = regions(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        others = time.process_time() - time.thread_time()
        mine = time.thread_time()
        for _ in range(100):
            fast(*args)
        mine = time.thread_time() - mine
        others = time.process_time() - time.thread_time() - others
    assert regions() == before[0]
    assert others < 0.1 * mine, "other threads work, or wait without sleep"
    waited = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before[1]
    assert waited < 20, "the caller waits for others"
    assert torch.get_num_threads() == 2


def test_large_work_is_shared() -> None:
    x = torch.randn(2048, 2048)
    fast = tilewright.compile(lambda x: torch.relu(x) * 2, (x,))
    fast(x)
    before, end = regions(), time.monotonic() + 20
    while regions() == before and time.monotonic() < end:  # a busy team is left alone for a while
        fast(x)
    assert regions() > before


def times_of(plan: Plan) -> list[Expr | None]:
    found: list[Expr | None] = []
    for segment in plan.segments:
        for step in segment.steps:
            if isinstance(step, Launches):
                found += [x.core_ns for x in step.launches]
            elif isinstance(step, CallStep):
                found.append(step.core_ns)
    return found


def test_what_is_small_depends_on_the_size_of_a_call() -> None:
    w = torch.randn(64, 64)
    fast = tilewright.compile(
        lambda x, w: torch.softmax(x @ w, -1), (torch.randn(8, 64), w), dims={"x": {0: "n"}}
    )
    fast(torch.randn(8, 64), w)
    graph = tilewright.compilations()[-1]
    plan = graph.trace["plan"]
    found = times_of(plan)
    (name,) = set(names_in(e for e in found if e is not None))
    small, large = (
        [e is not None and number(e, {name: n}) <= plan.alone_ns for e in found] for n in (8, 1 << 16)
    )
    assert len(small) > 1 and all(small) and not any(large)


def test_only_cores_that_other_programs_use_have_a_limit() -> None:
    assert preset("x86-64-v3").alone_seconds > 0
    assert preset("sm_90").alone_seconds == 0


@pytest.fixture
def threads() -> pool.Pool:
    return pool.pool(ContentStore(None), Options())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_fails_alone_leaves_the_thread_count(threads: pool.Pool, error: type[BaseException]) -> None:
    seen: list[int] = []

    def fails(tensors: steps.Tensors) -> None:
        seen.append(torch.get_num_threads())
        raise error

    (act,) = steps.alone([fails])
    with pytest.raises(error):
        act([])
    assert seen == [1 if pool.team() else 2]
    assert torch.get_num_threads() == 2
    assert threads.workers >= 1


def test_calls_that_came_late_are_the_callers_for_a_while(threads: pool.Pool) -> None:
    """Torch's threads are its own: a call that takes far longer than one core would need is taken from them."""
    if pool.team() is None:
        pytest.skip("torch's threads cannot be set here")
    seen: list[int] = []

    def act(tensors: steps.Tensors) -> None:
        seen.append(torch.get_num_threads())
        time.sleep(0.02)

    quick = steps.sharing(lambda tensors: seen.append(torch.get_num_threads()), 10**9)

    def shared() -> bool:
        """Twenty calls in a row are shared. A team that sleeps is asked first, and left where the machine is busy."""
        seen.clear()
        time.sleep(0.4)
        for _ in range(20):
            quick([])
        return seen == [2] * 20

    late = steps.sharing(act, 1000)
    assert within(30.0, shared), "calls in time are shared"
    seen.clear()
    late([])
    late([])
    assert seen == [2, 1] and torch.get_num_threads() == 2
    torch.use_deterministic_algorithms(True)
    try:
        late([])
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [2, 1, 2], "the same bits are asked for"
    assert within(30.0, shared), "it is tried again"
    assert threads.workers >= 1


def test_a_new_thread_keeps_the_count_that_the_user_set(threads: pool.Pool) -> None:
    """Torch gives a thread its count when that thread first asks, also inside."""
    seen: list[int] = []
    (act,) = steps.alone([lambda tensors: seen.append(torch.get_num_threads())])

    def run() -> None:
        act([])
        torch.ones(100_000).exp()
        seen.append(torch.get_num_threads())

    torch.set_num_threads(3)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(2)
    assert seen == [1 if pool.team() else 3, 3]
    assert threads.workers >= 1
