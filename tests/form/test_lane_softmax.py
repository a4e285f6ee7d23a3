"""Exponentials of lanes with maxima of their own: one per element, and one for all neighbours of an access."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.attention.cascades import online_class, roles
from tests.support.corpus import Case
from tests.support.lowered import agree, data, execute
from tests.support.one_kernel import capture, one_kernel, sizes_of
from torch import Tensor

from tilewright.form.classes import make_form
from tilewright.form.lane_softmax import if_divisible, with_neighbours
from tilewright.interp import EXACT, FLOATS, run_graph
from tilewright.ir.expr import Expr, walk
from tilewright.ir.graph import Graph, Value
from tilewright.ir.kernel import Scheduled
from tilewright.ir.program import Compute, Loop, Update
from tilewright.ir.schedule import Schedule
from tilewright.ir.sizes import dims
from tilewright.lower.lower import lower
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.target import PRESETS

N = 616
"""Accesses of four singles, more than two steps and no whole number of them."""


def loss(x: Tensor, place: Tensor) -> Tensor:
    shifted = x - x.amax(-1, keepdim=True)
    return (shifted - shifted.exp().sum(-1, keepdim=True).log()).gather(1, place[:, None])


CASES = {
    "logsumexp": Case("lse", lambda x: torch.logsumexp(x, -1), ((3, N),)),
    "softmax": Case("softmax", lambda x: torch.softmax(x, -1), ((3, N),)),
    "loss": Case("loss", loss, ((3, N), (3,)), high=(0, N)),
}


def made(case: Case, quick: bool = True) -> tuple[Graph, Scheduled]:
    """With steps of two warps' accesses."""
    graph = capture(case, False)
    kernel = one_kernel(graph)
    form = make_form(kernel, graph.layouts)
    schedule = roles(form, online_class(form), 256, peel=False)
    form, schedule = with_neighbours(form, schedule.changed(warps=2), PRESETS["sm_90"])
    schedule = schedule if quick else schedule.changed(fast=())
    return graph, Scheduled(kernel, schedule, lower(form, schedule), (*kernel.inputs, *kernel.outputs), ())


def exponentials(scheduled: Scheduled, tile: int) -> list[Expr]:
    """Those of whole steps, by the innermost loops of `tile`."""
    loops = [s for s in scheduled.program.statements() if isinstance(s, Loop) and s.tile == tile]
    computed = [s for s in loops[0].body if isinstance(s, (Compute, Update))]
    found = (s.values if isinstance(s, Update) else (s.expr,) for s in computed)
    return list({x: None for e in found for v in e for x in walk(v) if x.op in ("exp", "exp2", "quick_exp2")})


@pytest.mark.parametrize("name", CASES)
def test_neighbours_are_taken_at_once(name: str) -> None:
    _, scheduled = made(CASES[name])
    (near,) = scheduled.schedule.reductions.merged_each_step
    assert near.extent.value == 4
    assert len(exponentials(scheduled, 64)) == 2, "one for each element, one for the lane"
    assert ("quick_exp2" in {x.op for x in exponentials(scheduled, 64)}) == (name != "softmax")


def test_one_exponential_without_neighbours() -> None:
    _, scheduled = made(replace(CASES["loss"], shapes=((3, N - 1), (3,))))
    assert not scheduled.schedule.reductions.merged_each_step and len(exponentials(scheduled, 256)) == 1


@pytest.mark.parametrize("name", CASES)
def test_meaning_is_exact(name: str) -> None:
    graph, scheduled = made(CASES[name], quick=False)
    inputs = data(CASES[name], graph, EXACT)
    wanted: list[object] = [*run_graph(graph, inputs, EXACT)]
    assert agree(graph, scheduled, inputs, wanted)


def _plain(x: Tensor) -> Tensor:
    return x


def _large(x: Tensor) -> Tensor:
    return (x * 1e4).sort(-1).values


def _special(x: Tensor) -> Tensor:
    x = x.clone()
    x[0] = -math.inf
    x[1, :300] = -math.inf
    x[2, 5] = math.inf
    return x


@pytest.mark.parametrize("change", [_plain, _large, _special])
@pytest.mark.parametrize("size", [N, N - 1])
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, size: int, change: Callable[[Tensor], Tensor]) -> None:
    given = CASES[name]
    case = replace(given, shapes=((3, size), *given.shapes[1:]), high=given.high and (0, size))
    x, *rest = case.inputs()
    inputs = [change(x), *rest]
    graph, scheduled = made(case)
    results = execute(graph, scheduled, [t.numpy() for t in inputs], FLOATS)
    (found,) = (results[v] for v in graph.outputs if isinstance(v, Value))
    wanted = given.run(*inputs)
    assert isinstance(wanted, Tensor)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_rows_of_unknown_length_are_taken_so_where_they_are_whole(name: str) -> None:
    """One program for every length that is a multiple of an access."""
    dynamic = ({0: "rows", 1: "length"}, *({0: "rows"} for _ in CASES[name].shapes[1:]))
    case = replace(CASES[name], dynamic=dynamic)
    graph = capture(case, True)
    kernel = one_kernel(graph)
    form = make_form(kernel, graph.layouts)
    schedule = roles(form, online_class(form), 256, peel=False).changed(warps=2)
    assert with_neighbours(form, schedule, PRESETS["sm_90"])[0] is form
    whole, split, joined = if_divisible(form, schedule, PRESETS["sm_90"]) or pytest.fail("it is not asked")
    made = Scheduled(kernel, joined, lower(split, joined), (*kernel.inputs, *kernel.outputs), ())
    for rows, length, holds in ((3, N, True), (2, 4, True), (5, 1028, True), (2, N + 2, False)):
        given = replace(case, shapes=((rows, length), *((rows,) for _ in case.shapes[1:])))
        inputs = replace(given, high=given.high and (0, length)).inputs()
        arrays = [t.numpy() for t in inputs]
        assert (dims.evaluate(whole.args[0], sizes_of(graph, arrays)) == 0) == holds
        if holds:
            results = execute(graph, made, arrays, FLOATS)
            wanted = case.run(*inputs)
            assert isinstance(wanted, Tensor)
            (found,) = (results[v] for v in graph.outputs if isinstance(v, Value))
            np.testing.assert_allclose(found, wanted.numpy(), rtol=2e-5, atol=2e-6)


def test_long_rows_on_a_gpu_are_folded_so() -> None:
    case = replace(CASES["loss"], shapes=((2, 40000), (2,)), high=(0, 40000))
    graph = capture(case, False)
    solved = Solver(PRESETS["sm_90"], Options()).solve(one_kernel(graph), graph.layouts)
    assert "online" in str(solved.schedule)
    assert "quick_exp2" in {
        x.op for s in solved.program.statements() if isinstance(s, Compute) for x in walk(s.expr)
    }


def test_vectors_of_one_thread_stay_whole() -> None:
    case = replace(CASES["softmax"], shapes=((512, 4096),))
    graph = capture(case, False)
    solved = Solver(PRESETS["x86-64-v4"], Options()).solve(one_kernel(graph), graph.layouts)
    schedule = solved.schedule
    assert isinstance(schedule, Schedule) and not schedule.reductions.merged_each_step
    assert schedule.tiling.lane is not None and schedule.tiling.lane.extent.value == 4096
