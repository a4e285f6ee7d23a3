"""Replays of CUDA graphs on a driver without a GPU: what is looked at, and what is copied."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import replace
from unittest import mock

import pytest
import torch
from tests.support.cuda.fake_driver import STREAM
from torch import Tensor

from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32
from tilewright.ir.expr import symbol
from tilewright.ir.kernel import Cover
from tilewright.plan import Plan
from tilewright.plan.build import build_plan
from tilewright.runtime.cuda.driver import Device, DriverError
from tilewright.runtime.cuda.graph import Fixed, Graphs, Quick, _Exit, _Sizes, ports_of
from tilewright.runtime.plan.tensors import maker_on


def plan_of() -> Plan:
    b = Builder()
    x, y = (b.value((symbol("n"),), f32) for _ in range(2))
    return build_plan(Cover(b.finish((x, y), (x,)), ()), {}, ("n",))


def quick(device: Device, held: Tensor, result: Tensor) -> Quick:
    """A graph that copies input 1 in, and one result out."""
    ports = ports_of(plan_of(), (1,), (held,), [result], [_Exit(None, 0)])
    assert ports is not None
    return Quick(device, instance=ctypes.addressof(GRAPH), make=maker_on("cpu"), captured=ports)


GRAPH = ctypes.create_string_buffer(1 << 16)
"""Stands for an instantiated graph of no nodes."""


def test_inputs_are_copied_in_and_results_out(fake: ctypes.CDLL, gpu: Device) -> None:
    held, result = torch.zeros(4), torch.arange(6.0).view(2, 3).t()
    run, weight, x = quick(gpu, held, result), torch.randn(3), torch.randn(4)
    for _ in range(2):
        made = run.run([weight, x], STREAM)
        assert made is not None
        (y,) = made
        assert isinstance(y, Tensor) and torch.equal(held, x) and torch.equal(y, result)
        assert y.data_ptr() != result.data_ptr() and y.stride() == result.stride()
        x = torch.randn(4)
    assert ctypes.c_int.in_dll(fake, "copies_made").value == 4
    assert ctypes.c_int.in_dll(fake, "context_depth").value == 0


def test_an_input_in_another_layout_goes_the_long_way(fake: ctypes.CDLL, gpu: Device) -> None:
    run = quick(gpu, torch.zeros(4), torch.ones(2))
    assert run.run([torch.randn(3), torch.randn(8)[::2]], STREAM) is None
    assert ctypes.c_int.in_dll(fake, "copies_made").value == 0


def test_a_driver_that_refuses_a_copy_is_heard(fake: ctypes.CDLL, gpu: Device) -> None:
    with pytest.raises(DriverError):
        quick(gpu, torch.zeros(4), torch.ones(2)).run([torch.randn(3), torch.randn(4)], 0)


def test_what_needs_more_than_copies_has_no_quick_way() -> None:
    plan, held, plain = plan_of(), (torch.zeros(4),), [_Exit(None, 0)]
    result = [torch.ones(2, 3)]
    assert ports_of(plan, (1,), held, result, plain) is not None
    assert ports_of(replace(plan, written=(1,)), (1,), held, result, plain) is None  # it is written back
    assert ports_of(replace(plan, host=(1,)), (1,), held, result, plain) is None  # it comes from the host
    assert ports_of(plan, (1,), held, [torch.ones(3).expand(2, 3)], plain) is None
    assert ports_of(plan, (1,), (torch.zeros(8)[::2],), result, plain) is None
    shown = [
        _Exit(None, 0, False, (torch.Size((3,)), (1,), 0)),
        _Exit(None, 1, True),
        _Exit(3),
        _Exit(None, 0),
    ]
    for exit_ in shown[:3]:
        assert ports_of(plan, (1,), held, result, [*plain, exit_]) is None
    assert ports_of(plan, (1,), held, result, [*plain, shown[3]]) is None  # one copy would leave twice


def test_what_stands_is_compared(gpu: Device) -> None:
    weights = {0: torch.randn(3), 2: torch.nn.Parameter(torch.randn(2, 3))}
    fixed = Fixed(weights)
    args: list[Tensor] = [weights[0], torch.randn(1), weights[2]]
    assert fixed.stand(args)
    assert fixed.stand([weights[0].view(3), torch.randn(1), weights[2].detach()])
    assert not fixed.stand([torch.randn(3), *args[1:]])
    assert not fixed.stand([*args[:2], weights[2].detach().t()])
    weights[2].data = torch.randn(2, 3)
    assert not fixed.stand(args)


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
