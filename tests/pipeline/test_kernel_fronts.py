"""A clock says whether products take in the norm in front of them, and what may not be taken in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import Function
from torch import Tensor

import tilewright
from tilewright.analysis.size_hints import SizeHints
from tilewright.capture.fx import from_fx
from tilewright.capture.trace import trace
from tilewright.ir.graph import Graph
from tilewright.ir.kernel import Cover, Kernel
from tilewright.options import Options
from tilewright.partition.cover import OutputMemory, cover_unfused, partition
from tilewright.partition.regions import is_product
from tilewright.pipeline import phases
from tilewright.pipeline.backends import BACKENDS
from tilewright.pipeline.build import Clock, JoinedKernelRefused, KernelBuilder, Kernels, in_silence
from tilewright.pipeline.replay_trial import ReplayContestant, ReplayTrial
from tilewright.pipeline.timed import kernel_fronts
from tilewright.pipeline.timed.kernel_fronts import REASON, find_fronts, join_fronts
from tilewright.rewrite.normal.normalise import normalise
from tilewright.runtime.cpu.toolchain import host_target
from tilewright.runtime.store.cache import ContentStore
from tilewright.runtime.store.decisions import Decisions
from tilewright.schedule.cpu.scheduler import VectorScheduler
from tilewright.schedule.solver import Solver

K = 64


@pytest.fixture(autouse=True)
def _repeating(monkeypatch: pytest.MonkeyPatch) -> None:
    """What schedulers of GPUs have, on this machine, whatever the model says of it."""
    monkeypatch.setattr(VectorScheduler, "repeating", lambda self, form, by: by.chosen(form))  # type: ignore[misc]
    monkeypatch.setattr(kernel_fronts, "PRODUCTS", replace(kernel_fronts.PRODUCTS, max_joined_ratio=1e9))


def builder(options: Options | None = None, store: ContentStore | None = None) -> KernelBuilder:
    options = options or Options()
    target = host_target()
    decisions = Decisions(target, store or ContentStore(None), options, {})
    return KernelBuilder(in_silence, BACKENDS["cpu"], Solver(target, options), decisions)


def normed(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (K,), w)


def layers(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    for _ in range(2):
        x = (normed(x, w) @ a) @ b.T
    return x


def one(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return normed(x, w) @ a


def two(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = normed(x, w)
    return h @ a, h @ b


def kept(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = normed(x, w)
    return h @ a, h


def looked_at(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = normed(x, w)
    return h @ a, h.cumsum(1)


def in_turn(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = normed(x, w)
    square, root = h.square().sum(1, keepdim=True) * h, h.abs().sum(1, keepdim=True) * h
    return root @ a + square[:, :32]


def scaled(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (x.cumsum(1) * w).sin() @ a


def product(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (x @ a) @ b.T


def summed(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = x @ a
    return h * torch.rsqrt(h.square().mean(1, keepdim=True) + 1e-3)


def separable(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.conv2d(F.conv2d(x, w, padding=1, groups=x.shape[1]), v)


def twice(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = F.conv2d(x, w, padding=1, groups=x.shape[1])
    return F.conv2d(h, v), F.conv2d(h, 2 * v)


def dense(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The sum in front has as many terms as there are channels, and nine times."""
    return F.conv2d(F.conv2d(x, w.expand(-1, x.shape[1], -1, -1), padding=1), v)


IMAGES = (torch.randn(1, 8, 6, 6), torch.randn(8, 1, 3, 3), torch.randn(5, 8, 1, 1))


def cover_of(made: KernelBuilder, function: Callable[..., object], inputs: Sequence[Tensor] = ()) -> Cover:
    """With each product in a kernel of its own."""
    inputs = inputs or (torch.randn(2, K), torch.randn(K), torch.randn(K, 32), torch.randn(K, 32))
    graph = normalise(from_fx(trace(Function(function), inputs, [()] * len(inputs)).gm))
    ops = [
        replace(op, kernel=n) if is_product(op) and op.expr is not None and op.expr.reduce else op
        for n, op in enumerate(graph.ops)
    ]
    return partition(graph.with_ops(ops), made.solver.price, made.hints)


def clock_of(*times: float) -> Callable[[Callable[[], object]], float]:
    left = iter(times)

    def clock(run: Callable[[], object]) -> float:
        run()
        return next(left)

    return clock


def kernels(cover: Cover) -> list[Kernel]:
    return [step for step in cover.steps if isinstance(step, Kernel)]


@pytest.mark.parametrize(("function", "apart"), [(one, 2), (two, 3)])
@pytest.mark.parametrize(("times", "joins"), [((1.0, 0.7), True), ((1.0, 0.99), False), ((1.0, 1.5), False)])
def test_the_clock_decides(
    function: Callable[..., object], apart: int, times: tuple[float, float], joins: bool
) -> None:
    made = builder()
    cover = cover_of(made, function)
    assert len(kernels(cover)) == apart
    found = join_fronts(cover, made, "cpu", clock_of(*times), "here").cover
    assert [k.reason == REASON for k in kernels(found)] == (
        [True] * (apart - 1) if joins else [False] * apart
    )
    assert (found is cover) != joins
    if joins:
        assert {v for k in kernels(found) for v in k.outputs} == cover.graph.kept()


@pytest.mark.parametrize(("function", "inputs"), [(summed, ()), (separable, IMAGES)])
@pytest.mark.parametrize(("times", "joins"), [((1.0, 0.7), True), ((1.0, 0.99), False)])
def test_a_product_that_one_kernel_reads_goes_there_too(
    function: Callable[..., object], inputs: Sequence[Tensor], times: tuple[float, float], joins: bool
) -> None:
    """Its results agree with those of kernels apart, or it would not be taken."""
    made = builder()
    cover = cover_of(made, function, inputs)
    before = kernels(cover)
    found = kernels(join_fronts(cover, made, "cpu", clock_of(*times), "here").cover)
    assert len(found) == len(before) - joins
    assert any(k.reason == REASON and sum(map(is_product, k.ops)) > 0 for k in found) == joins


@pytest.mark.parametrize("function", [twice, dense])
def test_long_sums_and_what_two_products_read_stay_apart(function: Callable[..., object]) -> None:
    made = builder()
    assert not find_fronts(cover_of(made, function, IMAGES), made)


def test_it_is_asked_once(tmp_path: Path) -> None:
    store = ContentStore(tmp_path)
    for times in ((1.0, 0.5), ()):
        made = builder(store=store)
        found = join_fronts(cover_of(made, two), made, "cpu", clock_of(*times), "here").cover
        assert len(kernels(found)) == 2


def test_equal_ones_are_timed_once() -> None:
    made = builder()
    cover = cover_of(made, layers)
    assert len(find_fronts(cover, made)) == 2
    found = join_fronts(cover, made, "cpu", clock_of(1.0, 0.5), "here").cover
    assert sum(k.reason == REASON for k in kernels(found)) == 2


def test_readers_stay_in_order() -> None:
    """The first result of the kernel in front is read by the second reader alone, which reads the first one, too."""
    made = builder()
    cover = cover_of(made, in_turn)
    (front,) = find_fronts(cover, made)
    first, second = front.readers
    assert set(first.outputs) & set(second.inputs)
    assert front.kernel.outputs[0] not in first.inputs and front.kernel.outputs[1] in first.inputs
    found = join_fronts(cover, made, "cpu", clock_of(1.0, 0.5), "here").cover
    assert [set(k.outputs) for k in kernels(found)] == [set(first.outputs), set(second.outputs)]


@pytest.mark.parametrize("function", [kept, looked_at, product, scaled])
def test_what_others_read_products_and_what_folds_nothing_stay(function: Callable[..., object]) -> None:
    made = builder()
    cover = cover_of(made, function)
    assert not find_fronts(cover, made)
    assert join_fronts(cover, made, "cpu", clock_of(), "here").cover is cover


def test_a_machine_without_such_schedules_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    made = builder()
    assert not find_fronts(cover_of(made, one), made)


def test_what_is_joined_has_the_schedule_that_was_timed() -> None:
    made = builder()
    found = join_fronts(cover_of(made, one), made, "cpu", clock_of(1.0, 0.5), "here").cover
    (kernel,) = kernels(found)
    with pytest.raises(JoinedKernelRefused, match="too many registers"):
        made.solver.forget_preferred(kernel, "too many registers")
    assert not made.solver.preferred


def softened(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.softmax(x, 1), torch.softmax(y, 1)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("sizes", [{3 * K}, {2 * K, 3 * K}])
def test_kernels_stay_apart_where_the_joined_one_does_not_build(
    timed: bool, sizes: set[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Joined under the schedule that the model prefers, each grid point would fold anew in the slowest way. They may be
    refused where their other schedules are `timed`. Others stay joined."""
    last: list[Kernel] = []

    def ways(cover: Cover, builder: KernelBuilder, device: str, clock: Clock, where: str) -> None:
        if timed:
            ReplayTrial(builder, device, clock)([[ReplayContestant(cover)]])

    def built(
        self: KernelBuilder, covers: Sequence[Cover], *args: object, only_timed: bool = False
    ) -> Kernels:
        last[:] = [k for c in covers for k in kernels(c) if k.reason == REASON]
        for k in last:
            (size,) = {int(str(v.shape[1])) for v in k.outputs}
            if size in sizes and self.solver.is_preferred(k):
                self.solver.forget_preferred(k, f"ptxas refuses {size} of {sizes}, {timed}")
        return build(self, covers, *args, only_timed=only_timed)  # type: ignore[arg-type]

    def unfused(
        graph: Graph, _: object, hints: SizeHints, *__: object, outputs: OutputMemory, **___: object
    ) -> Cover:
        return cover_unfused(graph, hints, outputs)

    build = KernelBuilder.built
    monkeypatch.setattr(phases, "choose_ways", ways)
    monkeypatch.setattr(phases, "partition", unfused)
    monkeypatch.setattr(KernelBuilder, "built", built)
    monkeypatch.setattr(type(BACKENDS["cpu"]), "replay_clock", lambda self, device: clock_of(*9 * (1.0, 0.5)))
    inputs = torch.randn(2, 2 * K), torch.randn(2, 3 * K)
    options = {"cache_dir": str(tmp_path), "measure": True, "tune_seconds": 60}
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="they stay apart: ptxas refuses") as told:
        fast = tilewright.compile(softened, inputs, options=options)
        found = fast(*inputs)
    assert {n for n in sizes if any(f"refuses {n} of {sizes}" in str(w.message) for w in told)} == sizes
    left = {int(str(v.shape[1])) for k in last for v in k.outputs}
    assert left == {2 * K, 3 * K} - sizes and fast.kernels
    torch.testing.assert_close(found, softened(*inputs))


def test_much_slower_ones_by_the_model_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_fronts, "PRODUCTS", replace(kernel_fronts.PRODUCTS, max_joined_ratio=0.0))
    made = builder()
    assert not find_fronts(cover_of(made, one), made)


def test_without_time_nothing_is_asked() -> None:
    made = builder(Options(tune_seconds=0))
    cover = cover_of(made, one)
    assert join_fronts(cover, made, "cpu", clock_of(), "here").cover is cover
