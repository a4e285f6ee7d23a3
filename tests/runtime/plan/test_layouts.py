"""A plan under new sizes, of which most is taken from the sizes before: it is the plan as if they were the first."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import Function
from torch import Tensor

from tilewright.capture.trace import trace
from tilewright.options import Options
from tilewright.pipeline.compiler import compile_fx
from tilewright.plan.data import Plan
from tilewright.runtime.plan.bound import BoundSegment
from tilewright.runtime.plan.executable import Executable
from tilewright.runtime.plan.layouts import Layouts


def attention(q: Tensor, cache: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """One query over a cache that grows, with a sort that a library does."""
    keys = torch.cat([cache, new], 1)
    scores = torch.sort(q @ keys.mT, -1)[0]
    return torch.softmax(scores, -1) @ keys, keys.narrow(1, 1, keys.shape[1] - 1) * 2


def parts(x: Tensor, y: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return F.pad(left.cumsum(0) * right.sin(), (1, 2)).sum(-1, keepdim=True) + y.exp().mean(-1)


def inputs_of_attention(a: int, b: int) -> Sequence[Tensor]:
    return torch.randn(a, 1, 16), torch.randn(a, b, 16), torch.randn(a, 1, 16)


def inputs_of_parts(a: int, b: int) -> Sequence[Tensor]:
    return torch.randn(a, 2 * b), torch.randn(a, b)


PROGRAMS = {"attention": (attention, inputs_of_attention), "parts": (parts, inputs_of_parts)}
SIZES = (
    (2, 7), (2, 8), (2, 9), (3, 9), (3, 8), (40, 300), (40, 301), (2, 7), (2, 2), (5, 64), (5, 63), (2, 1000),
)  # fmt: skip


def same(a: Layouts, b: Layouts, plan: Plan) -> bool:
    numbers = range(len(plan.buffers))
    return (a.shapes, a.strides, a.offsets, a.ready) == (b.shapes, b.strides, b.offsets, b.ready) and (
        [a.bytes_of(plan, k) for k in numbers] == [b.bytes_of(plan, k) for k in numbers]
    )


def check_arena(part: BoundSegment) -> None:
    """No two buffers that live at one step share bytes, and all lie within the arena."""
    plan, layouts = part.plan, part.layouts
    for k, low in part.place.items():
        one, high = plan.buffers[k], low + layouts.bytes_of(plan, k)
        assert 0 <= low and high <= part.arena_bytes
        for m, other in part.place.items():
            meets = m != k and max(one.start, plan.buffers[m].start) < min(one.end, plan.buffers[m].end)
            assert not meets or other >= high or other + layouts.bytes_of(plan, m) <= low


def executable(function: Callable[..., object], inputs: Sequence[Tensor]) -> Executable:
    gm = trace(Function(function), inputs, [range(t.dim()) for t in inputs]).gm
    made = compile_fx(gm, Options()).executable
    assert isinstance(made, Executable)
    return made


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("seed", range(3))
def test_it_is_as_if_they_were_the_first(name: str, seed: int) -> None:
    function, inputs = PROGRAMS[name]
    run = executable(function, inputs(3, 5))
    plan, order = run.plan, list(SIZES)
    random.Random(seed).shuffle(order)
    before: BoundSegment | None = None
    taken = 0
    for a, b in order if seed else SIZES:
        sizes = run.bound_for(list(inputs(a, b))).sizes
        found, fresh = BoundSegment(run.built, 0, sizes, before), BoundSegment(run.built, 0, sizes)
        assert same(found.layouts, fresh.layouts, plan)
        assert found.outputs == fresh.outputs and found.made == fresh.made
        assert found.arena_bytes <= max(2 * fresh.arena_bytes, 1 << 16)
        check_arena(found)
        taken += before is not None and found.arena is before.arena
        before = found
    assert seed or taken, "a cache that grows by one place stays where it is"


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_right_whatever_came_before(name: str) -> None:
    function, inputs = PROGRAMS[name]
    run = executable(function, inputs(3, 5))
    for a, b in (*SIZES, *reversed(SIZES)):
        given = inputs(a, b)
        wanted = function(*given)
        made = run(list(given))
        for got, want in zip(made, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
            torch.testing.assert_close(got, want)


def test_numbers_of_sizes_that_stay_are_kept() -> None:
    run = executable(*(attention, inputs_of_attention(3, 5)))
    one, two = (Layouts(run.plan, run.bound_for(list(inputs_of_attention(3, b))).sizes) for b in (6, 7))
    again = Layouts(run.plan, two.sizes, one)
    assert 0 < len(again.changed) < len(run.plan.buffers)
    assert all(again.shapes[k] is one.shapes[k] for k in range(len(one.shapes)) if k not in again.changed)
    assert not Layouts(run.plan, one.sizes, one).changed
