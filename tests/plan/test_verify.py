"""The law of memory: plans that break it are refused, each with a name for what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tilewright
from tilewright.errors import VerifyError
from tilewright.ir.dtype import f32
from tilewright.ir.graph import LibraryCall, Operand
from tilewright.ir.sizes.dims import integer
from tilewright.pipeline.compiler import COMPILATIONS
from tilewright.plan import Buffer, CallStep, Copy, Home, Launch, Launches, Plan, PlanSegment, Spec, View
from tilewright.plan.verify import check_memory, written_operands

SPEC = Spec(f32, (integer(4),), (integer(1),))
SORT = LibraryCall("aten.neg", torch.ops.aten.neg.default, (Operand(0),))
ADD_INTO = LibraryCall("aten.add_", torch.ops.aten.add_.Tensor, (Operand(0), Operand(1)), reuses=0)


def kernel(number: int, *params: int) -> Launches:
    """A kernel that makes its last parameter."""
    return Launches((Launch(number, params, stores=1),))


def arena(start: int, end: int) -> Buffer:
    return Buffer(SPEC, Home.ARENA, start=start, end=end)


def plan(*steps: Launches | CallStep | View | Copy, frees: dict[int, tuple[int, ...]] | None = None) -> Plan:
    """b0 is an input; b1 and b2 lie in the arena one after the other; b3 is a tensor of its own; b4 and b5 are what
    calls return; b6 is a view of b1; b7 is a call's result in the memory of b4."""
    buffers = (
        Buffer(SPEC, Home.INPUT, 0), arena(0, 2), arena(2, 4), Buffer(SPEC, Home.OUTPUT),
        Buffer(SPEC, Home.LIBRARY), Buffer(SPEC, Home.LIBRARY), Buffer(SPEC, Home.VIEW, source=1),
        Buffer(SPEC, Home.LIBRARY, source=4),
    )  # fmt: skip
    given = tuple((frees or {}).get(k, ()) for k in range(len(steps)))
    return Plan((SPEC,), (0,), (), buffers, (PlanSegment(steps, frees=given),), (3,))


GOOD = (kernel(0, 0, 1), View(6), CallStep(SORT, (6,), (4,)), kernel(1, 4, 2), kernel(2, 2, 3))


def test_a_plan_that_keeps_the_law() -> None:
    check_memory(plan(*GOOD, frees={3: (4,)}))


BROKEN: dict[str, tuple[Plan, str]] = {
    "read too early": (plan(GOOD[0], kernel(2, 2, 3)), "b2 .* read before it is made"),
    "a view without a tensor": (plan(GOOD[0], *GOOD[2:]), "b6 .* read before it is made"),
    "made twice": (plan(*GOOD, kernel(3, 0, 3)), "b3 .* made twice"),
    "freed too early": (plan(*GOOD, frees={2: (4,)}), "b4 .* given back"),
    "an output that is freed": (plan(*GOOD, frees={4: (3,)}), "b3 .* given back"),
    "the arena's next owner came": (plan(*GOOD[:4], kernel(2, 1, 3)), "b1 .* another's"),
    "a view of what was overwritten": (plan(*GOOD[:4], kernel(2, 6, 3)), "b6 .* another's"),
    "an operand that a call overwrote": (
        plan(*GOOD[:3], CallStep(ADD_INTO, (4, 0), (7,)), kernel(2, 4, 3)),
        "b4 .* something else was written",
    ),
    "an input that was overwritten": (plan(*GOOD[:4], Copy(0, 2), kernel(2, 0, 3)), "b0 .* something else"),
    "a result of memory that is not there": (plan(GOOD[0], CallStep(ADD_INTO, (0, 1), (7,))), "b7 .* not made yet"),
    "an output that is never made": (plan(*GOOD[:4]), "b3 .* never made"),
    "an output in the arena": (replace(plan(*GOOD), outputs=(2,)), "b2 .* its memory does not"),
    "memory that comes late": (
        replace(plan(*GOOD), segments=(replace(plan(*GOOD).segments[0], makes=((), (), (), (), ())),)),
        "b3 .* before it has memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_plan_that_breaks_the_law_is_refused(name: str) -> None:
    broken, said = BROKEN[name]
    with pytest.raises(VerifyError, match=said):
        check_memory(broken)


def test_the_operand_that_was_overwritten_lives_on_in_the_result() -> None:
    check_memory(plan(*GOOD[:3], CallStep(ADD_INTO, (4, 0), (7,)), kernel(2, 7, 3)))


def test_a_schema_says_what_is_written() -> None:
    assert written_operands(ADD_INTO) == (0,)
    assert written_operands(SORT) == ()
    assert written_operands(replace(ADD_INTO, function=lambda x, y: x, reuses=1)) == (1,)


def made(program: Callable[..., object], *inputs: Tensor) -> Plan:
    """The plan of a program, in its first segment with steps swapped or dropped by the tests."""
    torch._dynamo.reset()
    tilewright.reset()
    with torch.no_grad():
        torch.compile(program, backend="tilewright")(*inputs)
    (compilation,) = COMPILATIONS()
    found = compilation.trace["plan"]
    assert isinstance(found, Plan)
    return found


def test_real_plans_with_a_step_left_out_are_refused() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x.exp() + 1).sort(0)[0]
        z = torch.linalg.inv(y @ y.t() + torch.eye(5))
        x.add_(z.sum())
        return z.softmax(0) * y.sum(), y.t()

    whole = made(program, torch.randn(5, 5))
    check_memory(whole)
    (segment,) = whole.segments
    for k, step in enumerate(segment.steps):
        if isinstance(step, Copy) and whole.buffers[step.target].home is Home.INPUT:
            continue  # nothing of the plan reads what it wrote last
        rest = (*segment.steps[:k], *segment.steps[k + 1 :])
        frees = (*segment.frees[:k], *segment.frees[k + 1 :])
        with pytest.raises(VerifyError, match="before it is made|never made|not made yet"):
            check_memory(replace(whole, segments=(replace(segment, steps=rest, frees=frees),)))
