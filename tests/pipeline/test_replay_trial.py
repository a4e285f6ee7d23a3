"""What counts as the same result of two ways to compute it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import Function
from torch import Tensor

from tilewright.analysis.size_hints import SizeHints
from tilewright.capture.fx import from_fx
from tilewright.capture.trace import trace
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, axis, call, read, symbol
from tilewright.ir.graph import Op
from tilewright.ir.ops import contract, pointwise, view
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.library.select import select
from tilewright.options import Options
from tilewright.partition.cover import partition
from tilewright.pipeline.backends import BACKENDS
from tilewright.pipeline.build import KernelBuilder, in_silence
from tilewright.pipeline.replay_trial import ReplayContestant, ReplayTrial, agree
from tilewright.rewrite.normal.normalise import normalise
from tilewright.runtime.cpu.toolchain import host_target
from tilewright.runtime.plan.tensors import drawn
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.runtime.store.decisions import Decisions
from tilewright.schedule.solver import Solver


def product(dtype: torch.dtype = torch.float16) -> Tensor:
    return (drawn(torch.empty(64, 512), 0) @ drawn(torch.empty(512, 48), 1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    made = product(dtype)
    assert agree([made, None, 3], [(made.float() * (1 + 2**-8)).to(dtype), None, 3])


def test_what_is_mixed_up_differs() -> None:
    made = product()
    for wrong in (
        made.flip(0),
        made.roll(1, 1),
        -made,
        made.index_fill(0, torch.tensor([63]), 0.0),
        made[:32],
    ):
        assert not agree([made], [wrong])
    holed = made.clone()
    holed[5, 7] = torch.nan
    assert not agree([made], [holed])


def test_what_is_not_finite_is_not_judged() -> None:
    made = product()
    overflown = made.clone()
    overflown[3] = torch.inf
    assert agree([overflown], [made]) and agree([torch.full((4,), torch.nan)], [torch.zeros(4)])


def test_operands_of_several_seeds_differ() -> None:
    assert not torch.equal(drawn(torch.empty(8), 0), drawn(torch.empty(8), 1))
    assert torch.equal(drawn(torch.empty(8), 1), drawn(torch.empty(8), 1))


def builder() -> KernelBuilder:
    target, options = host_target(), Options()
    store = ContentStore(default_root(options))
    solver = Solver(target, options)
    return KernelBuilder(in_silence, BACKENDS["cpu"], solver, Decisions(target, store, options, {}))


def right(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(F.linear(x, w))


def ways(dynamic: Sequence[int] = ()) -> tuple[ReplayContestant, ReplayContestant]:
    """With a call for the product, and with a kernel."""
    x, w = torch.randn(8, 24), torch.randn(16, 24)
    graph = normalise(from_fx(trace(Function(right), (x, w), [dynamic, ()]).gm))
    solver = Solver(host_target(), Options())
    library, ours = (partition(g, solver.price, solver.hints) for g in (normalise(select(graph)), graph))
    return ReplayContestant(library), ReplayContestant(ours)


def test_ways_are_run_beside_each_other() -> None:
    """(On a CPU, by the wall's clock: what runs them is the same.)"""

    def clock(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    library, ours = ways()
    trial = ReplayTrial(builder(), "cpu", clock)
    assert trial.fits([library])
    ((first, second),) = trial([[library, ours]])
    assert first is not None and second is not None


@pytest.mark.parametrize("turned", [True, False])
def test_operands_that_are_made_once(*, turned: bool) -> None:
    """w @ x, and w' @ x where w' is w turned around; of what is made wrongly, nothing is timed."""
    size = dims.integer(16)
    b = Builder()
    x, w, other = (b.value((size, size), f32) for _ in range(3))
    i, j = Axis("i", size), Axis("j", size)
    index = (axis(j), axis(i)) if turned else (axis(i), axis(j))
    fold = Op("turn", (w,), (other,), expr=TensorExpr((i, j), (read(0, index, f32),)))
    solver = Solver(host_target(), Options())
    library = normalise(b.finish((x, w), (contract.matmul(b, w, x),)))
    second = Builder(library.fresh_id())
    ours = second.finish((x, w, other), (contract.matmul(second, view.permute(second, other, (1, 0)), x),))
    covers = [partition(g, solver.price, solver.hints) for g in (library, normalise(ours))]
    ways = ReplayContestant(covers[0]), ReplayContestant(covers[1], prepared_once=(fold,))
    trial = ReplayTrial(builder(), "cpu", lambda run: 1.0)
    assert trial([ways]) == [[1.0, 1.0 if turned else None]]


def test_a_way_that_is_wrong_is_named_and_not_timed(caplog: pytest.LogCaptureFixture) -> None:
    library, found = ways()
    trial = ReplayTrial(builder(), "cpu", lambda run: 1.0)
    with mock.patch("tilewright.pipeline.replay_trial.agree", lambda a, b: a is b):
        assert trial([[library, found]]) == [[1.0, None]]
    assert "differs from the library" in caplog.text


def test_a_contest_that_fails_takes_no_other_with_it() -> None:
    library, ours = ways()
    times = iter([None, 1.0])

    def clock(run: Callable[[], object]) -> float:
        seconds = next(times)
        if seconds is None:
            raise RuntimeError("out of memory")
        return seconds

    with pytest.warns(RuntimeWarning, match="the library is taken: out of memory"):
        assert ReplayTrial(builder(), "cpu", clock)([[library], [ours]]) == [[None], [1.0]]


def test_what_does_not_tell_its_sizes_takes_no_other_with_it() -> None:
    """Elements of s * s places: a plan finds no s in that."""
    size, solver = symbol("s", 2, 64), Solver(host_target(), Options())
    b = Builder()
    x = b.value((dims.mul(size, size),), f32)
    graph = normalise(b.finish((x,), (pointwise.pointwise(b, "neg", lambda e: call("neg", e), x),)))
    untold = ReplayContestant(partition(graph, solver.price, solver.hints))
    library, ours = ways()
    assert ReplayTrial(builder(), "cpu", lambda run: 1.0)([[untold], [library, ours]]) == [[None], [1.0, 1.0]]


@pytest.mark.parametrize(("slow_rows", "told"), [((), 0.5), ((64,), None), ((1,), None), ((8,), 2.0)])
def test_what_is_slower_at_other_sizes_is_not_taken(slow_rows: Sequence[int], told: float | None) -> None:
    """Where rows are not known: at the typical number, and at an eighth and eight times of it."""
    asked: list[int] = []

    def clock(run: Callable[[], object]) -> float:
        (made,) = cast("list[Tensor]", run())
        asked.append(len(made))
        ours = asked.count(len(made)) > 1
        return 1.0 if not ours else 2.0 if len(made) in slow_rows else 0.5

    library, ours = ways(dynamic=(0,))
    (rows,) = library.cover.graph.symbols()
    solver = Solver(host_target(), Options(), hints=SizeHints({repr(rows): 8}))
    trial = ReplayTrial(replace(builder(), solver=solver), "cpu", clock)
    ((first, second),) = trial([[library, ours]])
    assert first == 1.0 and second == told
    assert asked[:2] == [8, 8] and set(asked) <= {1, 8, 64}


def test_sizes_that_a_program_cannot_have_are_not_tried() -> None:
    """8 planes of s by s are rows of 200 numbers: s is 5, whatever n is."""
    n, s = symbol("n", 1), symbol("s", 1)
    b = Builder()
    x, w = b.value((n, dims.integer(8), s, s), f32), b.value((dims.integer(200), dims.integer(16)), f32)
    made = contract.matmul(b, view.reshape(b, x, (n, dims.integer(200))), w)
    solver = Solver(host_target(), Options(), hints=SizeHints({"n": 8, "s": 5}))
    library = partition(normalise(select(normalise(b.finish((x, w), (made,))))), solver.price, solver.hints)
    asked: list[int] = []

    def clock(run: Callable[[], object]) -> float:
        (found,) = cast("list[Tensor]", run())
        asked.append(len(found))
        return 0.5 if len(asked) % 2 == 0 else 1.0

    ways = ReplayContestant(library), ReplayContestant(library)
    trial = ReplayTrial(replace(builder(), solver=solver), "cpu", clock)
    assert trial([ways]) == [[1.0, 0.5]]
    assert asked == [8, 8, 1, 1, 64, 64]


def test_no_clock_decides_where_results_are_to_be_the_same_each_time() -> None:
    backend = BACKENDS["cuda"]
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        assert backend.replay_clock("cuda:0") is not None
        torch.use_deterministic_algorithms(True)
        try:
            assert backend.replay_clock("cuda:0") is None
        finally:
            torch.use_deterministic_algorithms(False)
