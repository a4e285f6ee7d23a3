"""Collectives in a graph: never merged, dropped, folded or moved past each other; operands that live until the wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import tilewright
from tilewright.options import Options
from tilewright.pipeline.compiler import Compiled, compile_fx
from tilewright.plan import CallStep, Home, Launches, Plan
from tilewright.runtime.cuda.graph import refusal
from tilewright.runtime.plan.bound import BoundSegment, BuiltPlan

OPS = torch.ops._c10d_functional


@pytest.fixture(autouse=True)
def group() -> Iterator[str]:
    """A group of two in which nobody answers."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD.group_name  # type: ignore[union-attr]
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    dist.destroy_process_group()


def compiled(function: Callable[..., object], *inputs: Tensor, frozen: tuple[int, ...] = ()) -> Compiled:
    gm: fx.GraphModule = make_fx(function, tracing_mode="fake")(*inputs)
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    return compile_fx(gm, Options.make({}), trusted=True, frozen={names[k]: inputs[k] for k in frozen})


def plan_of(made: Compiled) -> Plan:
    plan = made.trace["plan"]
    assert isinstance(plan, Plan)
    return plan


def calls(plan: Plan) -> list[CallStep]:
    return [s for segment in plan.segments for s in segment.steps if isinstance(s, CallStep)]


def names(plan: Plan) -> list[str]:
    return [c.call.name.removeprefix("_c10d_functional.") for c in calls(plan)]


def test_equal_starts_stay_two(group: str) -> None:
    def program(x: Tensor) -> Tensor:
        a = OPS.wait_tensor(OPS.all_reduce(x, "sum", group))
        b = OPS.wait_tensor(OPS.all_reduce(x, "sum", group))
        return a + b

    assert names(plan_of(compiled(program, torch.randn(8)))) == ["all_reduce", "wait_tensor"] * 2


def test_a_start_whose_result_nobody_reads_stays(group: str) -> None:
    def program(x: Tensor) -> Tensor:
        return OPS.wait_tensor(OPS.all_reduce(x, "sum", group)) * 0 + x

    gm: fx.GraphModule = make_fx(program, tracing_mode="fake")(torch.randn(8))
    output = next(n for n in gm.graph.nodes if n.op == "output")
    output.args = (next(n for n in gm.graph.nodes if n.op == "placeholder"),)
    plan = plan_of(compile_fx(gm, Options.make({}), trusted=True))
    assert names(plan) == ["all_reduce", "wait_tensor"]


def test_frozen_operands_are_not_reduced_while_compiling(group: str) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return x + OPS.wait_tensor(OPS.all_reduce(w * 2, "sum", group))

    plan = plan_of(compiled(program, torch.randn(8), torch.randn(8), frozen=(1,)))
    assert names(plan) == ["all_reduce", "wait_tensor"]


def test_starts_and_waits_keep_their_order(group: str) -> None:
    """Independent ones too: another process has the same order."""

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        b = OPS.all_reduce(torch.exp(y), "max", group)
        a = OPS.all_gather_into_tensor(torch.sin(x), 2, group)
        return torch.relu(OPS.wait_tensor(a)), torch.relu(OPS.wait_tensor(b))

    plan = plan_of(compiled(program, torch.randn(8), torch.randn(8)))
    assert names(plan) == ["all_reduce", "all_gather_into_tensor", "wait_tensor", "wait_tensor"]


def test_an_operand_lives_until_behind_its_wait(group: str) -> None:
    """What is made between start and wait has other memory than what the start reads, as it is still being read."""

    def program(x: Tensor, y: Tensor) -> Tensor:
        started = OPS.all_reduce(torch.exp(x), "sum", group)
        z = torch.sort(torch.cos(torch.sort(torch.sin(y))[0]))[0]
        return OPS.wait_tensor(started) + z

    plan = plan_of(compiled(program, torch.randn(32, 32), torch.randn(32, 32)))
    start, wait = (c for c in calls(plan) if c.call.group is not None)
    (operand,), (made,) = start.inputs, wait.outputs
    assert plan.buffers[operand].home is Home.ARENA
    assert plan.buffers[made].source == start.outputs[0], "a wait's result is its operand"
    part = BoundSegment(BuiltPlan(plan), 0, {})
    between = [
        b
        for b in part.place
        if b != operand and plan.buffers[operand].start < plan.buffers[b].start < plan.buffers[made].start
    ]
    size = part.layouts.bytes_of(plan, operand)
    low = part.place[operand]
    assert between, "something is made meanwhile"
    for b in between:
        assert part.place[b] >= low + size or part.place[b] + part.layouts.bytes_of(plan, b) <= low


def test_an_operand_whose_wait_is_elsewhere_has_memory_of_its_own(group: str) -> None:
    plan = plan_of(compiled(lambda x: OPS.all_reduce(torch.exp(x), "sum", group), torch.randn(32)))
    (start,) = calls(plan)
    assert start.call.starts and plan.buffers[start.inputs[0]].home is Home.OUTPUT


def test_no_graph_of_the_driver_holds_collectives(group: str) -> None:
    made = compiled(lambda x: OPS.wait_tensor(OPS.all_reduce(x, "sum", group)), torch.randn(8))
    assert "all_reduce" in refusal(plan_of(made))


def test_other_calls_are_no_collectives(group: str) -> None:
    plan = plan_of(compiled(lambda x: torch.sort(x)[0] + 1, torch.randn(8)))
    assert [c.call.group for c in calls(plan)] == [None]
    plan = plan_of(compiled(lambda x: OPS.wait_tensor(OPS.all_reduce(x, "sum", group)), torch.randn(8)))
    assert [(c.call.group, c.call.starts) for c in calls(plan)] == [(group, True), ("", False)]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def test_modules_with_tensors_over_processes_compile(group: str) -> None:
    """Torch lifts their mesh into the graphs as an object that only passes through."""
    mesh = init_device_mesh("cpu", (2,))
    block = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fast = torch.compile(block, backend="tilewright")
    before = len(tilewright.compilations())
    x = torch.randn(4, 16, requires_grad=True)
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    fast(x).sum().backward()
    forward, backward = tilewright.compilations()[before:]
    assert (forward.kind, backward.kind) == ("forward", "backward")
    for graph in (forward, backward):
        assert graph.coverage.generated > 0 and graph.kernels, str(graph)
    plan = forward.trace["plan"]
    assert isinstance(plan, Plan) and names(plan)[-2:] == ["all_reduce", "wait_tensor"]
    assert any(isinstance(s, Launches) for s in plan.segments[0].steps)
    assert x.grad is not None and all(p.grad is not None for p in block.parameters())
    eager = block(x)
    torch.testing.assert_close(fast(x), eager)
