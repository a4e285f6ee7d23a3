"""Steps of a loop as one body: which loops have such, and that it does what its steps do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tests.support.cpp_harness import host_target
from torch import Tensor, nn

from tilewright.capture.fx import from_fx
from tilewright.capture.loops.op import loop_op
from tilewright.capture.trace import trace
from tilewright.interp.graph import run_graph
from tilewright.ir.graph import Loop, Value
from tilewright.partition.loops.call import distinct
from tilewright.partition.loops.steps import steps_together, unroll_steps
from tilewright.target import preset
from tilewright.tuning.search_limits import GROUPS

Step = Callable[..., list[Tensor]]
GPU = preset("sm_90")


class Steps(nn.Module):
    """Two carried values, two that are sliced, one that is the same in every step; `step` stacks two."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, h: Tensor, g: Tensor, x: Tensor, y: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return loop_op(self.step, x.shape[0], None, 2, False, [h, g], [x, y], [k])


def turns(t: Tensor, h: Tensor, g: Tensor, x: Tensor, y: Tensor, k: Tensor) -> list[Tensor]:
    """The two change places, and the number of the step counts."""
    made = g * k + x
    return [made, (h - t) * y, made.clone(), (h + g).sum(-1)]


def products(t: Tensor, h: Tensor, g: Tensor, x: Tensor, y: Tensor, k: Tensor) -> list[Tensor]:
    return [torch.tanh(h @ k + x), g + y, h.clone(), g.clone()]


def calls(t: Tensor, h: Tensor, g: Tensor, x: Tensor, y: Tensor, k: Tensor) -> list[Tensor]:
    return [h.sort().values, g + y, h.clone(), g.clone()]


def long(t: Tensor, h: Tensor, g: Tensor, x: Tensor, y: Tensor, k: Tensor) -> list[Tensor]:
    for _ in range(GROUPS.max_joined_step_ops // 8):
        h = (h + x).sin()
    return [h, g + y, h.clone(), g.clone()]


def operands(steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((4, 4), (4, 4), (steps, 4, 4), (steps, 4, 4), (4, 4))
    return [torch.randn(s) for s in shapes]


def loop_of(step: Step) -> Loop:
    given = operands(7)
    graph = from_fx(trace(Steps(step), given, [[] for _ in given]).gm)
    (found,) = (op.call.loop for op in graph.ops if op.call is not None and op.call.loop is not None)
    return found


def one_by_one(
    loop: Loop, first: int, state: Sequence[Tensor], parts: list[list[Tensor]], k: Tensor
) -> list[Tensor]:
    """What the steps make: the last carried values, then what each stacks."""
    stacked: list[Tensor] = []
    for n, now in enumerate(parts):
        made = [torch.as_tensor(v) for v in run_graph(loop.body, [torch.tensor(first + n), *state, *now, k])]
        state, stacked = made[: loop.carried], [*stacked, *made[loop.carried :]]
    return [*state, *stacked]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("step", [turns, products])
def test_a_body_of_several_steps_does_what_they_do(step: Step, count: int) -> None:
    loop = loop_of(step)
    body = unroll_steps(loop, count)
    body.verify()
    assert len(
        {v.id for v in (*body.inputs, *(o for op in body.ops for o in op.outputs)) if isinstance(v, Value)}
    ) == (len([v for v in body.inputs if isinstance(v, Value)]) + sum(len(op.outputs) for op in body.ops))
    h, g, x, y, k = operands(count)
    parts = [[x[n], y[n]] for n in range(count)]
    wanted = one_by_one(loop, 3, [h, g], parts, k)
    made = run_graph(body, [torch.tensor(3), h, g, *(p for now in parts for p in now), k])
    once, order = distinct(body)
    again = run_graph(once, [torch.tensor(3), h, g, *(p for now in parts for p in now), k])
    for n, want in enumerate(wanted):
        torch.testing.assert_close(torch.as_tensor(made[n]), want, rtol=0, atol=0)
        torch.testing.assert_close(torch.as_tensor(again[order[n]]), want, rtol=0, atol=0)


def test_each_step_has_origins_of_its_own() -> None:
    loop = loop_of(turns)
    body = unroll_steps(loop, 3)
    assert [o.id for o in body.origins] == list(range(3 * len(loop.body.origins)))
    each = [op.origin for op in loop.body.ops if op.origin >= 0]
    count = len(loop.body.origins)
    assert each
    assert [op.origin for op in body.ops if op.origin >= 0] == [o + k * count for k in range(3) for o in each]


def test_which_loops_take_several_steps_at_once() -> None:
    """Those of which each step is a few kernels of its own anyway, or that data may end, do not."""
    loop = loop_of(turns)
    assert steps_together(loop, GPU) == GPU.loop_steps == 16
    assert steps_together(loop, replace(GPU, loop_steps=11)) == 8
    assert steps_together(loop, host_target()) == 1
    assert steps_together(replace(loop, conditional=True), GPU) == 1
    assert steps_together(loop_of(products), GPU) == steps_together(loop_of(calls), GPU) == 1
    few = steps_together(loop_of(long), GPU)
    assert 1 < few < 16 and few * len(loop_of(long).body.ops) <= GROUPS.max_joined_step_ops
