"""Calls of a model whose graph is replayed: from the first call to the one native function that serves the others, on a
driver without a GPU and memory of the CPU."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tests.support.cuda.fake_driver import STREAM
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32
from tilewright.ir.expr import integer
from tilewright.ir.kernel import Cover
from tilewright.plan.build import build_plan
from tilewright.runtime.call.around.surroundings import Surroundings
from tilewright.runtime.call.fast_path import Direct, Pick, Returned
from tilewright.runtime.call.model import CompiledModel
from tilewright.runtime.cuda import executable as executable_module
from tilewright.runtime.cuda import graph as graph_module
from tilewright.runtime.cuda.driver import Device
from tilewright.runtime.cuda.executable import CudaExecutable
from tilewright.runtime.cuda.graph import Graphs
from tilewright.runtime.cuda.replay import native
from tilewright.runtime.cuda.replay.exits import Exit
from tilewright.runtime.plan.executable import TRUSTED

GRAPH = ctypes.create_string_buffer(1 << 16)
RESULT = torch.arange(4.0)


def executable_of(device: Device) -> CudaExecutable:
    b = Builder()
    x, w = (b.value((integer(4),), f32) for _ in range(2))
    plan = build_plan(Cover(b.finish((x, w), (x,)), ()), {}, ()).on("cpu")
    return CudaExecutable(plan, guards=TRUSTED, graphs=Graphs(plan, device))


@pytest.fixture
def made(fake: ctypes.CDLL, gpu: Device, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A compiled model of one weight, which takes one tensor; what stands for its graph does nothing."""
    captured = SimpleNamespace(raw_cuda_graph_exec=lambda: ctypes.addressof(GRAPH))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", mock.Mock)
    for module in (graph_module, native, executable_module):
        monkeypatch.setattr(module, "current_stream", lambda ordinal: STREAM)
    monkeypatch.setattr(executable_module, "capturing_on", lambda ordinal: lambda: False)
    monkeypatch.setattr(Graphs, "_written_down", lambda *_: (captured, [Exit(None, 0)], [RESULT]))
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4), requires_grad=False)
    run = executable_of(gpu)
    around = Surroundings(model)
    short = Direct(run, [Pick(0), Pick(-1, model.weight)], [Returned(0)], pytree.tree_structure(0), around)
    calls = list[object]()

    def way(args: tuple[object, ...], kwargs: object, out: object) -> tuple[object, Direct]:
        calls.append(args)
        return run([args[0], model.weight])[0], short  # type: ignore[list-item]

    stub = mock.Mock(side_effect=way, source=None, device=None)
    return SimpleNamespace(call=CompiledModel(stub), model=model, long=calls, run=run)


@pytest.mark.parametrize("inputs", [1, 4])
def test_calls_with_a_graph_become_one_native_function(made: SimpleNamespace, inputs: int) -> None:
    xs = [torch.full((4,), float(k)) for k in range(inputs)]
    for k in range(6):
        made.call(xs[k % inputs])
    assert len(made.long) == 1 and len(made.call._calls) == 1
    with mock.patch.object(CompiledModel, "_look_up", side_effect=AssertionError("the long way")):
        for k in range(6):
            y = made.call(xs[k % inputs])
            assert torch.equal(y, RESULT) and y is not RESULT


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "moved": lambda m: setattr(m.weight, "data", torch.zeros(4)),
    "replaced": lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(4), requires_grad=False)),
    "loaded by assignment": lambda m: m.load_state_dict({"weight": torch.zeros(4)}, assign=True),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_weight_that_changes_between_two_calls_is_noticed(made: SimpleNamespace, what: str) -> None:
    x = torch.ones(4)
    for _ in range(4):
        made.call(x)
    CHANGES[what](made.model)
    looked = mock.Mock(side_effect=AssertionError("the long way"))
    with mock.patch.object(CompiledModel, "_look_up", looked), pytest.raises(AssertionError):
        made.call(x)
