"""Replays of CUDA graphs on a driver without a GPU: what is looked at, and what is copied."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import weakref
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.cuda.fake_driver import STREAM
from torch import Tensor

from tilewright.capture.autograd.rng import may_draw
from tilewright.errors import IndexOutOfRange
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32
from tilewright.ir.expr import integer, symbol
from tilewright.ir.graph import LibraryCall, Operand
from tilewright.ir.kernel import Cover, LibraryStep
from tilewright.plan import Plan
from tilewright.plan.build import build_plan
from tilewright.runtime.cuda import graph as graph_module
from tilewright.runtime.cuda.driver import Device, DriverError, DriverOutOfMemory
from tilewright.runtime.cuda.graph import Graphs, _Sizes, draws_numbers, refusal
from tilewright.runtime.cuda.replay import native
from tilewright.runtime.cuda.replay.exits import Exit
from tilewright.runtime.cuda.replay.native import Fixed, Shared, Written, native_replay, ports_of
from tilewright.runtime.plan.known_sizes import Quick
from tilewright.runtime.plan.tensors import Make, maker_on


def plan_of() -> Plan:
    b = Builder()
    x, y = (b.value((symbol("n"),), f32) for _ in range(2))
    return build_plan(Cover(b.finish((x, y), (x,)), ()), {}, ("n",))


class NoNodes:
    """An instantiated graph."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(1 << 16)

    def raw_cuda_graph_exec(self) -> int:
        return ctypes.addressof(self.memory)


class Replay:
    """A graph that reads argument 0 in place and copies argument 1 in, and one result out."""

    def __init__(
        self, device: Device, make: Make | None = None, written: Written | None = None, last: int = STREAM
    ) -> None:
        self.weight, self.held = torch.randn(3), torch.zeros(4)
        self.result = torch.arange(6.0).view(2, 3).t()
        self.shared, self.fixed = Shared(threading.Lock(), array("q", [last])), Fixed({0: self.weight})
        ports = ports_of(plan_of(), (1,), (self.held,), [self.result], [Exit(None, 0)])
        assert ports is not None
        rest = make or maker_on("cpu"), written
        self.graph = NoNodes()
        run = native_replay(device, self.graph, ports, self.fixed, self.shared, rest)
        assert run is not None
        self.run: Quick = run


@pytest.fixture(autouse=True)
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "current_stream", lambda ordinal: STREAM)


def number(fake: ctypes.CDLL, name: str) -> int:
    return ctypes.c_int.in_dll(fake, name).value


def test_inputs_are_copied_in_and_results_out(fake: ctypes.CDLL, gpu: Device) -> None:
    graph = Replay(gpu)
    for _ in range(2):
        x = torch.randn(4)
        args: list[Tensor | int | float | bool] = [graph.weight, x]
        made = graph.run(args)
        assert made is not None and not args
        (y,) = made
        assert isinstance(y, Tensor) and torch.equal(graph.held, x) and torch.equal(y, graph.result)
        assert y.data_ptr() != graph.result.data_ptr() and y.stride() == graph.result.stride()
    assert number(fake, "copies_made") == 4 and number(fake, "context_depth") == 0
    assert not graph.shared.lock.locked()


def test_the_graph_lives_as_long_as_its_replay(fake: ctypes.CDLL, gpu: Device) -> None:
    """A known call keeps the replay when another graph has been captured for such calls."""
    replay = Replay(gpu)
    alive, run, weight = weakref.ref(replay.graph), replay.run, replay.weight
    del replay
    gc.collect()
    assert alive() is not None and run([weight, torch.randn(4)]) is not None
    del run
    gc.collect()
    assert alive() is None


OTHERWISE: dict[str, Callable[[Replay], list[Tensor | int | float | bool]]] = {
    "an input lies in another way": lambda g: [g.weight, torch.randn(8)[::2]],
    "a weight is another tensor": lambda g: [g.weight.clone(), torch.randn(4)],
    "an input is no tensor": lambda g: [g.weight, 3],
    "an input is missing": lambda g: [g.weight],
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_what_is_otherwise_goes_the_long_way(fake: ctypes.CDLL, gpu: Device, what: str) -> None:
    graph = Replay(gpu)
    args = OTHERWISE[what](graph)
    count = len(args)
    assert graph.run(args) is None and len(args) == count
    assert number(fake, "copies_made") == 0 and not graph.shared.lock.locked()


MOVES: dict[str, Callable[[Replay], object]] = {
    "moved": lambda g: setattr(g.weight, "data", g.weight.clone()),
    "resized": lambda g: g.weight.resize_(2),
    "retyped": lambda g: setattr(g.weight, "data", g.weight.view(torch.int32)),
    "laid out anew": lambda g: setattr(g.weight, "data", torch.zeros(6)[::2]),
}


@pytest.mark.parametrize("what", MOVES)
def test_a_weight_that_changes_is_noticed(fake: ctypes.CDLL, gpu: Device, what: str) -> None:
    graph = Replay(gpu)
    assert graph.run([graph.weight, torch.randn(4)]) is not None
    MOVES[what](graph)
    assert graph.run([graph.weight, torch.randn(4)]) is None
    assert number(fake, "copies_made") == 2


@pytest.mark.parametrize("captures", [False, True])
def test_another_stream_and_a_capture_are_left_to_python(
    fake: ctypes.CDLL, gpu: Device, captures: bool
) -> None:
    graph = Replay(gpu, last=STREAM if captures else STREAM + 1)
    ctypes.c_int.in_dll(fake, "stream_captures").value = captures
    assert graph.run([graph.weight, torch.randn(4)]) is None
    assert number(fake, "copies_made") == 0


def test_memory_that_another_thread_uses_is_left_alone(fake: ctypes.CDLL, gpu: Device) -> None:
    graph = Replay(gpu)
    with graph.shared.lock:
        assert graph.run([graph.weight, torch.randn(4)]) is None
    assert graph.run([graph.weight, torch.randn(4)]) is not None


def test_a_check_that_failed_is_raised_and_the_next_call_works(fake: ctypes.CDLL, gpu: Device) -> None:
    graph = Replay(gpu)
    gpu._word.value = 1
    with pytest.raises(IndexOutOfRange):
        graph.run([graph.weight, torch.randn(4)])
    assert not graph.shared.lock.locked()
    assert graph.run([graph.weight, torch.randn(4)]) is not None


@pytest.mark.parametrize("writes", [False, True])
def test_results_without_memory_are_left_to_python(fake: ctypes.CDLL, gpu: Device, writes: bool) -> None:
    """What writes into its inputs has not run then: it could not run again."""
    full = [True]

    def make(*how: object) -> Tensor:
        if full[0]:
            raise torch.OutOfMemoryError("none")
        return maker_on("cpu")(*how)  # type: ignore[arg-type]

    told: list[int] = []
    graph = Replay(gpu, make, (lambda args: told.append(len(args))) if writes else None)
    assert graph.run([graph.weight, torch.randn(4)]) is None
    assert number(fake, "copies_made") == (0 if writes else 1) and not told
    full[0] = False
    assert graph.run([graph.weight, torch.randn(4)]) is not None
    assert told == [2] * writes and not graph.shared.lock.locked()


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("what", ["fail_copy", "fail_replay"])
def test_what_the_driver_refuses_before_the_graph_runs_is_left_to_python(
    fake: ctypes.CDLL, gpu: Device, what: str, writes: bool
) -> None:
    told: list[int] = []
    graph = Replay(gpu, written=(lambda args: told.append(len(args))) if writes else None)
    ctypes.c_int.in_dll(fake, what).value = 700
    args: list[Tensor | int | float | bool] = [graph.weight, torch.randn(4)]
    assert graph.run(args) is None and len(args) == 2 and not told
    assert number(fake, "replays") == 0 and number(fake, "context_depth") == 0
    assert not graph.shared.lock.locked()
    ctypes.c_int.in_dll(fake, what).value = 0
    assert graph.run(args) is not None and told == [2] * writes


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("code", [2, 700])
def test_copies_that_fail_behind_the_graph(fake: ctypes.CDLL, gpu: Device, code: int, writes: bool) -> None:
    """What it has written is told of, and nothing is left with which it would run again."""
    told: list[int] = []
    graph = Replay(gpu, written=(lambda args: told.append(len(args))) if writes else None)
    ctypes.c_int.in_dll(fake, "fail_copy").value = code
    ctypes.c_int.in_dll(fake, "copies_before_failure").value = 1
    args: list[Tensor | int | float | bool] = [graph.weight, torch.randn(4)]
    with pytest.raises(DriverOutOfMemory if code == 2 else DriverError):
        graph.run(args)
    assert number(fake, "replays") == 1 and told == [2] * writes and len(args) == (0 if writes else 2)
    assert not graph.shared.lock.locked() and number(fake, "context_depth") == 0


def test_an_error_of_who_is_told_is_raised(fake: ctypes.CDLL, gpu: Device) -> None:
    def written(args: object) -> None:
        raise RuntimeError("refused")

    graph = Replay(gpu, written=written)
    with pytest.raises(RuntimeError, match="refused"):
        graph.run([graph.weight, torch.randn(4)])
    assert not graph.shared.lock.locked()


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("where", ["make", "stream", "stand"])
def test_what_a_signal_raises_is_not_lost(
    fake: ctypes.CDLL, gpu: Device, monkeypatch: pytest.MonkeyPatch, where: str, writes: bool
) -> None:
    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    if where == "stream":
        monkeypatch.setattr(native, "current_stream", interrupted)
    elif where == "stand":
        monkeypatch.setattr(native.Fixed, "stand", interrupted)
        monkeypatch.setattr(native, "standing", lambda places: None)
    told: list[int] = []
    written = (lambda args: told.append(len(args))) if writes else None
    graph = Replay(gpu, interrupted if where == "make" else None, written)
    with pytest.raises(KeyboardInterrupt):
        graph.run([graph.weight, torch.randn(4)])
    assert not graph.shared.lock.locked() and not told
    assert number(fake, "replays") == (1 if where == "make" and not writes else 0)


@pytest.mark.parametrize("writes", [False, True])
def test_python_s_replay_writes_once(monkeypatch: pytest.MonkeyPatch, writes: bool) -> None:
    """A call for whose results there is no memory is made again: what writes into its inputs has not run by then."""
    monkeypatch.setattr(graph_module, "current_stream", lambda ordinal: STREAM)
    told: list[int] = []
    device, state = mock.Mock(failed=lambda: 0), _Sizes()
    graphs = Graphs(plan_of().on("cpu"), device)
    graphs._written = (lambda args: told.append(len(args))) if writes else None
    full = mock.Mock(side_effect=[torch.OutOfMemoryError("none"), torch.zeros(2)])
    graphs._make = full
    state.captured = found = mock.Mock(moving=(), held=(), copied=[torch.ones(2)], exits=[Exit(None, 0)])
    args: list[Tensor | int | float | bool] = [torch.ones(1)]
    with pytest.raises(torch.OutOfMemoryError):
        graphs._replay(state, found, args, plan_of())
    assert device.replay.call_count == (0 if writes else 1) and len(args) == 1 and not told
    (made,) = graphs._replay(state, found, args, plan_of())
    assert isinstance(made, Tensor) and made.tolist() == [1.0, 1.0] and not args and told == [1] * writes


def test_what_needs_more_than_copies_has_no_quick_way() -> None:
    plan, held, plain = plan_of(), (torch.zeros(4),), [Exit(None, 0)]
    result = [torch.ones(2, 3)]
    assert ports_of(plan, (1,), held, result, plain) is not None
    assert ports_of(replace(plan, written=(1,)), (1,), held, result, plain) is None  # it is written back
    assert ports_of(replace(plan, host=(1,)), (1,), held, result, plain) is None  # it comes from the host
    assert ports_of(plan, (1,), held, [torch.ones(3).expand(2, 3)], plain) is None
    assert ports_of(plan, (1,), (torch.zeros(8)[::2],), result, plain) is None
    shown = [
        Exit(None, 0, False, (torch.Size((3,)), (1,), 0)),
        Exit(None, 1, True),
        Exit(3),
        Exit(None, 0),
    ]
    for exit_ in shown[:3]:
        assert ports_of(plan, (1,), held, result, [*plain, exit_]) is None
    assert ports_of(plan, (1,), held, result, [*plain, shown[3]]) is None  # one copy would leave twice


@pytest.mark.parametrize("looks", [True, False])
def test_what_stands_is_compared(gpu: Device, monkeypatch: pytest.MonkeyPatch, looks: bool) -> None:
    if not looks:
        monkeypatch.setattr(native, "standing", lambda places: None)
    weights = {0: torch.randn(3), 2: torch.nn.Parameter(torch.randn(2, 3))}
    fixed = Fixed(weights)
    args: list[Tensor | int | float | bool] = [weights[0], torch.randn(1), weights[2]]
    assert fixed.stand(args) and fixed.still(args)
    assert fixed.stand([weights[0].view(3), torch.randn(1), weights[2].detach()])
    assert fixed.stand(args)
    assert not fixed.stand([torch.randn(3), *args[1:]])
    assert not fixed.stand([*args[:2], weights[2].detach().t()])
    assert not fixed.stand([*args[:2], weights[2].detach().view(torch.int32)])
    weights[2].data = torch.randn(2, 3)
    assert not fixed.stand(args) and not fixed.still(args)


def test_what_moves_while_it_is_read_is_not_taken_for_standing(gpu: Device) -> None:
    weight = torch.randn(3)
    fixed, args = Fixed({0: weight}), [weight]
    read, first = fixed._read, weight.data
    assert read is not None

    def moved(args: Any, bases: int) -> bool:
        same = read(args, bases)
        weight.data = torch.randn(3)  # as another thread may
        return same

    weight.data = torch.randn(3)
    weight.data = first.view(3)  # of the same place, but not as noted
    fixed._look = fixed._look and fixed._look._replace(still=lambda args: False)
    fixed._read = moved
    assert fixed.stand(args)  # as it was when it was read
    fixed._read = read
    assert not fixed.still(args) and not fixed.stand(args)


def test_a_weight_that_moves_during_a_capture_leaves_no_graph() -> None:
    plan, weight = plan_of(), torch.randn(3)
    graphs, state = Graphs(plan.on("cpu"), None), _Sizes()

    def captured(*_: object) -> Any:
        weight.data = torch.randn(3)
        return mock.Mock(raw_cuda_graph_exec=lambda: 1), [], []

    with (
        mock.patch.object(torch.cuda, "device", lambda *_: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "Stream"),
        mock.patch.object(Graphs, "_written_down", side_effect=captured),
    ):
        graphs._capture(mock.Mock(plan=plan), state, [weight])
    assert state.captured is None and not graphs.refused


def test_what_is_read_in_place_is_not_held(gpu: Device) -> None:
    """A forward pass lends its memory to the backward pass, and counts who holds it."""
    lent = torch.randn(3)
    fixed = Fixed({0: lent.view(3)})
    assert fixed.stand([lent.view(3)]) and fixed.looked_at == (0,)
    users = torch._C._storage_Use_Count  # type: ignore[attr-defined]
    own, other = lent.untyped_storage(), torch.randn(3).untyped_storage()
    assert users(own._cdata) == users(other._cdata) + 1  # here, `lent` itself


@pytest.mark.parametrize("failures", [1, 2])
def test_a_capture_without_memory_is_tried_again_once(failures: int) -> None:
    """After the first one torch has given back what it kept for later calls."""
    plan, captured = plan_of(), mock.Mock(raw_cuda_graph_exec=lambda: 1)
    tries = [torch.OutOfMemoryError("none")] * failures + [(captured, [], [])]
    graphs, state = Graphs(plan.on("cpu"), None), _Sizes()
    with (
        mock.patch.object(torch.cuda, "device", lambda *_: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "Stream"),
        mock.patch.object(Graphs, "_written_down", side_effect=tries) as written,
    ):
        if failures == 1:
            graphs._capture(mock.Mock(plan=plan), state, [])
            assert state.captured is not None and written.call_count == 2
        else:
            with pytest.raises(torch.OutOfMemoryError):
                graphs._capture(mock.Mock(plan=plan), state, [])
            assert state.captured is None and not graphs.refused


@pytest.mark.parametrize("chance", [0.0, 0.5])
def test_attention_that_drops_nothing_draws_nothing(chance: float) -> None:
    """Torch says of every attention that it may draw; what draws is replayed by torch, which counts the numbers."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert may_draw(attend)
    b = Builder()
    q = b.value((integer(1), integer(2), symbol("n"), integer(8)), f32)
    one = tuple(integer(n) for n in (16, 8, 8, 1))
    call = LibraryCall("attention", attend, (Operand(0),) * 3, (("dropout_p", chance),), (one,), "random")
    (y,) = b.library(call, (q,), [(q.shape, f32)])
    cover = Cover(b.finish((q,), (y,)), (LibraryStep(b.ops[-1], choice=True),))
    plan = build_plan(cover, {}, ("n",))
    assert draws_numbers(plan) is bool(chance) and not refusal(plan)
