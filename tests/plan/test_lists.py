"""Which kernels come together in lists, and that lists that are none are refused."""

# Ops over lists that torch names with underscores.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tilewright.errors import VerifyError
from tilewright.ir.dtype import f32
from tilewright.ir.sizes.dims import integer
from tilewright.pipeline.phases import check_phases
from tilewright.plan import Buffer, Home, Launch, Launches, Plan, PlanSegment, Spec
from tilewright.plan.verify import check_memory

SIZES = (40000, 40001, 40002, 40003)
"""Distinct sizes are distinct programs, and so large are not one kernel."""


def compiled(function: Callable[..., object], given: Sequence[object]) -> tuple[Plan, Callable[..., object]]:
    """The plan of a program, and the program."""
    torch.compiler.reset()
    found: list[Plan | None] = []
    run = torch.compile(function, backend="tilewright")
    with check_phases(lambda name, state: found.append(state.plan) if name == "plan" else None):
        run(*given)
    (plan,) = found
    assert plan is not None
    return plan, run


def lists_of(plan: Plan) -> list[int]:
    """How many kernels each launch runs."""
    steps = [s for segment in plan.segments for s in segment.steps]
    return [len(x) for s in steps if isinstance(s, Launches) for x in s.together()]


def same(function: Callable[..., object], make: Callable[[], list[Tensor]]) -> Plan:
    """The plan of a program, whose results and inputs must be as eager's."""
    ours, theirs = make(), make()
    plan, run = compiled(function, [ours])
    function(theirs)
    torch.testing.assert_close(ours, theirs)
    before = torch.get_num_threads()
    try:
        for threads in (4, 1):
            torch.set_num_threads(threads)
            ours, theirs = make(), make()
            torch.testing.assert_close(run(ours), function(theirs))
            torch.testing.assert_close(ours, theirs)
    finally:
        torch.set_num_threads(before)
    return plan


def tensors(count: int, sizes: Sequence[int] = SIZES[:1]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(sizes[k % len(sizes)], generator=draw, dtype=torch.float64) for k in range(count)]


def test_updates_of_many_tensors_are_a_few_launches() -> None:
    def step(xs: list[Tensor]) -> None:
        torch._foreach_mul_(xs, 0.5)
        torch._foreach_add_(xs, 1.0)

    assert sorted(lists_of(same(step, lambda: tensors(20, SIZES)))) == [5, 5, 5, 5]


def test_chains_stay_chains() -> None:
    def chain(xs: list[Tensor]) -> list[Tensor]:
        made = [xs[0]]
        for _ in range(6):
            made.append(made[-1].cumsum(0) * 0.5)
        return made[1:]

    plan = same(chain, lambda: tensors(1))
    assert lists_of(plan) == [1] * len(lists_of(plan))


def test_nobody_reads_what_another_of_its_list_writes() -> None:
    def shift(xs: list[Tensor]) -> None:
        new = [torch.roll(x, 1) for x in xs[1:]]
        for x, n in zip(xs, new, strict=False):
            x.copy_(n)

    plan = same(shift, lambda: tensors(9))
    check_memory(plan)


def test_order_of_writes_to_one_tensor_stays() -> None:
    def rotate(xs: list[Tensor]) -> list[Tensor]:
        sums = [x.cumsum(0) for x in xs]
        for x, y in zip(xs, [*xs[1:], xs[0]], strict=True):
            x.add_(y)
        return [*sums, *(x.cumsum(0) for x in xs)]

    same(rotate, lambda: tensors(8))


def test_what_a_list_makes_for_others_is_little() -> None:
    def two(xs: list[Tensor]) -> list[Tensor]:
        return [x.cumsum(0).flip(0).cumsum(0) for x in xs]

    few = same(two, lambda: tensors(8, (9000,)))
    assert max(lists_of(few)) == 8
    many, _ = compiled(two, [tensors(8, (400000,))])
    large = 400000 * 8
    held = [b for b in many.buffers if b.home is Home.ARENA]
    assert len(held) == 8 and large > 1 << 20
    starts = sorted(b.start for b in held)
    assert all(b.end <= starts[k + 2] for k, b in enumerate(sorted(held, key=lambda b: b.start)[:-2]))


SPEC = Spec(f32, (integer(4),), (integer(1),))


def plan_of(buffers: Sequence[Buffer], *launches: Launch, written: tuple[int, ...] = ()) -> Plan:
    given = tuple(b.spec for b in buffers if b.home is Home.INPUT)
    steps = (Launches(launches),)
    arguments = tuple(range(len(given)))
    return Plan(given, arguments, (), tuple(buffers), (PlanSegment(steps),), (), written=written)


def arena(start: int, end: int) -> Buffer:
    return Buffer(SPEC, Home.ARENA, start=start, end=end)


INPUT = Buffer(SPEC, Home.INPUT, 0)


def test_a_list_that_is_one() -> None:
    check_memory(
        plan_of(
            (INPUT, arena(0, 2), arena(0, 2)), Launch(0, (0, 1), stores=1, list=0), Launch(0, (0, 2), stores=1, list=0)
        )
    )  # fmt: skip


BROKEN = {
    "one reads what another makes": (
        (INPUT, arena(0, 3), arena(0, 3)),
        Launch(0, (0, 1), stores=1, list=0), Launch(0, (1, 2), stores=1, list=0),
    ),
    "two share a part of the arena": (
        (INPUT, arena(0, 1), arena(1, 2)),
        Launch(0, (0, 1), stores=1, list=0), Launch(0, (0, 2), stores=1, list=0),
    ),
    "one writes an input that another reads": (
        (INPUT, arena(0, 2), Buffer(SPEC, Home.VIEW, source=0, version=1)),
        Launch(0, (0, 1), stores=1, list=0), Launch(0, (0, 2), stores=1, list=0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_list_that_is_none_is_refused(name: str) -> None:
    buffers, *launches = BROKEN[name]
    apart = [replace(x, list=-1) for x in launches]
    check_memory(plan_of(buffers, *apart, written=(0,)))
    with pytest.raises(VerifyError, match=r"a list of 2 times kernel 0|list"):
        check_memory(plan_of(buffers, *launches, written=(0,)))
