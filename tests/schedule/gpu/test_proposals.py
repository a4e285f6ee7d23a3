"""Schedules that are proposed for products of matrices: they mean the same, fit, and are ranked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.support.lowered import agree
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from torch import Tensor

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.errors import IllegalSchedule
from tilewright.interp import EXACT, exact_random, run_graph
from tilewright.interp.algebra import Array
from tilewright.ir.graph import Graph, Value
from tilewright.ir.schedule import Role, Schedule
from tilewright.options import Options
from tilewright.schedule.scheduler import Solution
from tilewright.schedule.solver import Solver, replay
from tilewright.target import preset
from tilewright.tuning.search_limits import PROPOSALS


def halves(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float16)


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def layer(x: Tensor, w: Tensor, bias: Tensor, y: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, bias)) + y


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.relu(F.linear(x, gate)) * F.linear(x, up)


SMALL: dict[str, tuple[Callable[..., Tensor], Sequence[Tensor]]] = {
    "product": (product, (halves(35, 20), halves(20, 50))),
    "few rows": (product, (halves(5, 40), halves(40, 68))),
    "batched": (product, (halves(3, 17, 18), halves(3, 18, 20))),
    "layer": (layer, (halves(35, 20), halves(50, 20), halves(50), halves(35, 50))),
    "gated": (gated, (halves(20, 18), halves(35, 18), halves(35, 18))),
}
"""Ragged in all directions, and small: the exact oracle computes the padding of each block."""


def proposed(graph: Graph, machine: str = "sm_90") -> tuple[Solver, tuple[Solution, ...]]:
    solver = Solver(preset(machine), Options())
    return solver, solver.proposals(one_kernel(graph), graph.layouts)


def square(n: int = 4096) -> Graph:
    return capture(product, (halves(n, n), halves(n, n)))


@pytest.mark.parametrize("machine", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("name", SMALL)
def test_all_mean_the_same(name: str, machine: str) -> None:
    run, given = SMALL[name]
    graph = capture(run, given)
    kernel = one_kernel(graph)
    inputs: list[Array] = [exact_random(tuple(t.shape), 10 + k) for k, t in enumerate(given)]
    wanted: list[object] = list(run_graph(graph, inputs, algebra=EXACT))
    solver, found = proposed(graph, machine)
    assert found
    for solution in found:
        made = solver.solve(kernel, graph.layouts, solution.schedule)
        assert agree(graph, made, inputs, wanted), str(solution.schedule)
        assert made.seconds == pytest.approx(solution.seconds) and made.schedule is solution.schedule
        again = replay(kernel, graph.layouts, solution.schedule, solver.target, Options(), NO_HINTS)
        assert again == made.program


def test_sizes_may_be_unknown() -> None:
    graph = capture(product, (halves(35, 16), halves(16, 32)), [{0: "m"}, {}])
    inputs: list[Array] = [exact_random((35, 16), 1), exact_random((16, 32), 2)]
    wanted: list[object] = list(run_graph(graph, inputs, algebra=EXACT))
    solver, found = proposed(graph)
    assert found
    for solution in found[-4:]:
        made = solver.solve(one_kernel(graph), graph.layouts, solution.schedule)
        assert agree(graph, made, inputs, wanted), str(solution.schedule)


def test_they_are_ranked_and_few() -> None:
    _, found = proposed(square())
    seconds = [s.seconds for s in found]
    assert seconds == sorted(seconds) and 8 <= len(found) <= PROPOSALS.max_kept
    assert len({s.schedule for s in found}) == len(found)
    best = found[0].schedule
    tiles = sorted(c.tile for c in best.tiling.classes if c.role is Role.GRID)
    assert tiles == [128, 256] and best.launch.warps == 8 and best.launch.stages >= 3
    assert {s.schedule.launch.order > 0 for s in found} == {True, False}, "operands exceed the cache"
    assert {s.schedule.memory.descriptors for s in found} == {True, False}


def test_few_rows_lie_along_the_columns_of_a_unit() -> None:
    """Matrix units take 64 rows: of fewer, those of the other side serve."""
    graph = capture(product, (halves(16, 4096), halves(4096, 4096)))
    _, found = proposed(graph)
    first = {tuple(c.axis.name for c in s.schedule.tiling.classes if c.tile > 1) for s in found}
    assert len(first) == 2
    assert all(s.schedule.launch.order == 0 for s in found)


@pytest.mark.parametrize(
    ("run", "given"),
    [
        (lambda x, w: torch.softmax(x @ w, -1), (halves(64, 64), halves(64, 64))),
        (lambda x: x.relu(), (halves(64, 64),)),
        (lambda x, w: x.float() @ w.float(), (halves(64, 64).float(), halves(64, 64).float())),
        (lambda x, w, v: (x @ w) @ v, (halves(64, 64), halves(64, 64), halves(64, 64))),
        (lambda x, v: x @ v, (halves(64, 64), halves(64))),
    ],
    ids=["softmax", "pointwise", "singles", "two products", "vector"],
)
def test_nothing_is_proposed_for_others(run: Callable[..., Tensor], given: Sequence[Tensor]) -> None:
    assert proposed(capture(run, given))[1] == ()


def test_nothing_is_proposed_for_cpus() -> None:
    assert proposed(square(128), "x86-64-v4")[1] == ()


# --- what is refused -------------------------------------------------------------


def tiled(schedule: Schedule, *tiles: int) -> Schedule:
    """The same with other tiles of rows, columns and depth."""
    plans = zip(schedule.tiling.classes, tiles, strict=True)
    classes = [replace(c, tile=n, chunk=n if c.chunk else 0) for c, n in plans]
    return schedule.changed(classes=tuple(classes))


def test_a_tile_that_registers_cannot_hold() -> None:
    graph = square()
    solver, found = proposed(graph)
    large = tiled(found[0].schedule, 256, 256, 64)
    with pytest.raises(
        IllegalSchedule, match=r"registers hold 255 numbers of a thread, and a tile needs 312"
    ):
        solver.solve(one_kernel(graph), graph.layouts, large)


def test_a_tile_that_shared_memory_cannot_hold() -> None:
    graph = square()
    solver, found = proposed(graph)
    deep = tiled(found[0].schedule, 128, 256, 128).changed(stages=4, persistent=False, stored_pieces=0)
    said = r"shared memory holds 232448 bytes of a block, and a tile needs 395264 \[law: a tile fits"
    with pytest.raises(IllegalSchedule, match=said):
        solver.solve(one_kernel(graph), graph.layouts, deep)


def test_roles_that_a_law_forbids() -> None:
    graph = square()
    solver, found = proposed(graph)
    plans = found[0].schedule.tiling.classes
    summed = found[0].schedule.changed(classes=tuple(replace(c, role=Role.GRID) for c in plans))
    with pytest.raises(IllegalSchedule, match="no reduction runs over a grid class"):
        solver.solve(one_kernel(graph), graph.layouts, summed)


def test_the_usual_schedule_may_be_given() -> None:
    graph = square()
    solver, _ = proposed(graph)
    usual = solver.solve(one_kernel(graph), graph.layouts)
    assert isinstance(usual.schedule, Schedule)
    given = solver.solve(one_kernel(graph), graph.layouts, usual.schedule)
    assert given.program == usual.program and all(isinstance(v, Value) for v in given.params)
