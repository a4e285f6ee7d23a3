"""Writes in place: what plans become of them, why others copy, and that a wrong decision is refused whoever made it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tilewright.errors import IndexOutOfRange, VerifyError
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.sizes import dims
from tilewright.ir.writes import DoneInPlace, StoredInInput, WriteCopied, WriteVerdict
from tilewright.pipeline.build import number_kernels
from tilewright.pipeline.phases import check_phases
from tilewright.pipeline.state import State
from tilewright.plan import Copy, Launch, Launches, Plan
from tilewright.plan.build import build_plan
from tilewright.plan.overwritten import check_overwritten
from tilewright.plan.verify import check_memory
from tilewright.runtime.plan.layouts import copied_bytes


def state_of(program: Callable[..., object], *args: object) -> State:
    """What the phases made of a program."""
    torch.compiler.reset()
    found: list[State] = []
    with check_phases(lambda name, state: found.append(state) if name == "plan" else None):
        torch.compile(program, backend="tilewright")(*args)
    return found[-1]


def plan_of(program: Callable[..., object], *args: object) -> Plan:
    """The plan of a program."""
    plan = state_of(program, *args).plan
    assert plan is not None
    return plan


def steps_of(plan: Plan, kind: type) -> list[object]:
    """Steps of one kind."""
    return [s for segment in plan.segments for s in segment.steps if isinstance(s, kind)]


def grid(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


# --- in place ------------------------------------------------------------------------


def one_line(cache: Tensor, k: Tensor) -> Tensor:
    cache[:, 3] = k * 2
    return cache.sum(-1)


def a_slice(cache: Tensor, k: Tensor) -> None:
    cache[:, 2:5, 1:].copy_(k)


def a_place(cache: Tensor, k: Tensor, at: Tensor) -> Tensor:
    cache.index_copy_(1, at, k)
    return cache * 2


def two_lines(cache: Tensor, k: Tensor) -> Tensor:
    cache[:, 3] = k
    seen = cache.sum()
    cache[:, 4] = k * seen
    return seen


def everything(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(0.9).add_(y)
    return x.sum()


IN_PLACE: dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]] = {
    "one line": (one_line, (grid(2, 8, 4), grid(2, 4))),
    "a slice of a slice": (a_slice, (grid(2, 8, 4), grid(2, 3, 3))),
    "lines at places from data": (a_place, (grid(2, 8, 4), grid(2, 1, 4), torch.tensor([5]))),
    "written, read, written": (two_lines, (grid(2, 8, 4), grid(2, 4))),
    "all elements": (everything, (grid(40, 30), grid(40, 30))),
    "columns side by side": (everything, (grid(30, 40).t(), grid(40, 30))),
    "a part of another tensor": (everything, (grid(40, 50)[:, 3:33], grid(40, 30))),
    "nothing": (everything, (grid(0, 30), grid(0, 30))),
}


LINE = 2 * 4 * 4
LINES = ("written, read, written",)
"""Where the kernel that makes lines still reads what lies there: these are copied, and nothing else."""


@pytest.mark.parametrize("name", list(IN_PLACE))
def test_nothing_is_copied(name: str) -> None:
    program, args = IN_PLACE[name]
    plan = plan_of(
        program, *(a.clone(memory_format=torch.preserve_format) if name[0] != "a" else a for a in args)
    )
    assert [why for _, why in plan.writes] == [""] * len(plan.writes) != []
    assert copied_bytes(plan, {}) == (LINE if name in LINES else 0)


def test_places_at_free_sizes() -> None:
    def program(cache: Tensor, k: Tensor, at: int) -> Tensor:
        cache[:, at : at + 3] = k
        return cache * 2

    torch.compiler.reset()
    plans: list[Plan | None] = []
    compiled = torch.compile(program, backend="tilewright", dynamic=True)
    with check_phases(lambda name, state: plans.append(state.plan) if name == "plan" else None):
        for at in (3, 5, 6, 13):
            mine, eager, k = grid(2, 16, 4), grid(2, 16, 4), grid(2, 3, 4)
            assert torch.equal(compiled(mine, k, at), program(eager, k, at))
            assert torch.equal(mine, eager)
    assert len(plans) == 1 and not any(steps_of(p, Copy) for p in plans if p is not None)


# --- copies --------------------------------------------------------------------------


def neighbours(x: Tensor) -> None:
    x.copy_(torch.cat([x[1:], x[:-1] * 2])[: x.shape[0]])


def transposed(x: Tensor) -> None:
    x.copy_(x.t() + 1)


def read_later(x: Tensor, at: Tensor, k: Tensor) -> Tensor:
    old = x[2:4] * 3
    x[at] = k
    return old + x[2:4]


def by_a_call(x: Tensor) -> None:
    x.copy_(torch.sort(x, -1).values)


def of_another(x: Tensor, y: Tensor) -> None:
    x.copy_(y.index_fill(0, torch.tensor([1]), 3.0))


def from_a_table(x: Tensor, table: Tensor, at: Tensor) -> None:
    x.copy_(table[at] + x)


COPIED: dict[str, tuple[Callable[..., object], tuple[Tensor, ...], WriteCopied]] = {
    "neighbours": (neighbours, (grid(30, 30),), WriteCopied.OTHER_ELEMENTS),
    "transposed": (transposed, (grid(30, 30),), WriteCopied.OTHER_ELEMENTS),
    "read later": (read_later, (grid(8, 4), torch.tensor([3, 2]), grid(2, 4)), WriteCopied.READ_LATER),
    "a call makes it": (by_a_call, (grid(8, 4),), WriteCopied.CALL),
    "a bad index": (from_a_table, (grid(3, 4), grid(8, 4), torch.tensor([1, 7, 0])), WriteCopied.MAY_FAIL),
    "another tensor": (of_another, (grid(8, 4), grid(8, 4)), WriteCopied.OTHER_BASE),
}


@pytest.mark.parametrize("name", list(COPIED))
def test_why_a_write_copies(name: str) -> None:
    program, args, why = COPIED[name]
    mine, eager = ([a.clone() for a in args] for _ in range(2))
    plan = plan_of(program, *mine)
    program(*eager)
    assert [said for _, said in plan.writes] == [why.value] and steps_of(plan, Copy)
    assert why.value in plan.show() and torch.equal(mine[0], eager[0])


# --- decisions that are forced -------------------------------------------------------


def forced(state: State, number: int = 0) -> Plan:
    """The plan if it were decided that the kernel that makes write `number` stores in place."""
    assert state.cover is not None and state.kernels is not None
    graph = state.cover.graph
    w = graph.writes[number]
    value = w.value
    given_value = graph.inputs[w.input]
    assert isinstance(given_value, Value)
    stored = StoredInInput(w.input, (dims.ZERO,) * len(value.shape), frozenset({given_value}))
    decided = DoneInPlace((WriteVerdict(w.input, None),), {value: stored}, {})
    assert any(isinstance(s, Kernel) and value in s.outputs for s in state.cover.steps)
    kernels, cover = state.kernels, replace(state.cover, in_place=decided)
    plan = build_plan(cover, number_kernels(state.cover, kernels.numbers), (), state.request.shares)
    numbers = list(kernels.numbers)
    check_overwritten(plan, lambda k: kernels.scheduled[numbers.index(k)].programs)
    return plan


def sums(x: Tensor) -> None:
    x.copy_(x.sum(0).unsqueeze(1) + x)


def shifted(x: Tensor) -> None:
    x.copy_(x.roll(1, 0) + x)


WRONG: dict[str, tuple[Callable[..., object], Sequence[Tensor]]] = {
    "the element beside": (shifted, (grid(30, 30),)),
    "transposed": (transposed, (grid(30, 30),)),
    "what a sum reads": (sums, (grid(30, 30),)),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_decision_is_refused(name: str) -> None:
    program, args = WRONG[name]
    state = state_of(program, *(a.clone() for a in args))
    assert state.plan is not None and steps_of(state.plan, Copy)
    with pytest.raises(VerifyError, match="stored over"):
        forced(state)


def read_once_more(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return x * 2


def test_a_step_behind_that_reads_the_old_value_is_refused() -> None:
    """A later step, and an output, that read the input itself."""
    state = state_of(read_once_more, grid(30, 30), grid(30, 30))
    plan = state.plan
    assert plan is not None and not steps_of(plan, Copy)
    check_memory(plan)
    (segment,) = plan.segments
    (first,) = segment.steps
    assert isinstance(first, Launches)
    again = replace(segment, steps=(first, Launches((Launch(0, (0, 1, 3), stores=1),))), frees=((), ()))
    late = replace(plan.buffers[-1], start=0, end=9)
    with pytest.raises(VerifyError, match="b0 .* something else was written"):
        check_memory(replace(plan, segments=(again,), buffers=(*plan.buffers[:-1], late)))
    with pytest.raises(VerifyError, match="b0 .* was stored over"):
        check_memory(replace(plan, segments=(replace(segment, frees=((),)),), outputs=(0,)))
    with pytest.raises(VerifyError, match="another order"):
        wrong = [replace(b, version=2 * b.version) for b in plan.buffers]
        check_memory(replace(plan, buffers=tuple(wrong)))
    with pytest.raises(VerifyError, match="does not write"):
        check_memory(replace(plan, written=()))


def test_a_bad_index_writes_nothing() -> None:
    torch.compiler.reset()
    compiled = torch.compile(from_a_table, backend="tilewright")
    x = grid(3, 4)
    with pytest.raises(IndexOutOfRange):
        compiled(x, grid(8, 4), torch.tensor([1, 9, 0]))
    assert torch.equal(x, grid(3, 4))
    compiled(x, grid(8, 4), torch.tensor([1, 2, 0]))
    assert torch.equal(x, grid(8, 4)[[1, 2, 0]] + grid(3, 4))
