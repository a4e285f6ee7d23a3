"""Other blocks of sums of long rows: they mean the same, and nothing else has any."""

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

from tilewright.interp import EXACT, exact_random, run_graph
from tilewright.interp.algebra import Array
from tilewright.ir.schedule import Role
from tilewright.options import Options
from tilewright.schedule.gpu.proposed import row_sums
from tilewright.schedule.scheduler import Solution
from tilewright.schedule.solver import Solver
from tilewright.target import preset

GPU = preset("sm_90")
Program = Callable[..., Tensor | tuple[Tensor, ...]]


def halves(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float16)


def linear(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return y + F.linear(x, w)


def gated(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.relu(F.linear(x, a)) * F.linear(x, b)


PROGRAMS: dict[str, tuple[Program, Sequence[Tensor]]] = {
    "a row that ends inside a piece": (linear, [halves(1, 1100), halves(7, 1100), halves(1, 7)]),
    "two products of one vector": (gated, [halves(1, 2048), halves(6, 2048), halves(6, 2048)]),
    "sums of rows": (lambda x: x.sum(1), [halves(5, 2500)]),
}


def proposed(run: Program, tensors: Sequence[Tensor]) -> tuple[Solution, ...]:
    graph = capture(run, tensors)
    return Solver(GPU, Options()).other_blocks(one_kernel(graph), graph.layouts)


@pytest.fixture
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sums, "ROW_SUMS", replace(row_sums.ROW_SUMS, min_bytes=0))


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_mean_the_same(name: str) -> None:
    run, tensors = PROGRAMS[name]
    graph = capture(run, tensors)
    kernel, solver = one_kernel(graph), Solver(GPU, Options())
    inputs: list[Array] = [exact_random(tuple(t.shape), 10 + k) for k, t in enumerate(tensors)]
    wanted: list[object] = list(run_graph(graph, inputs, algebra=EXACT))
    usual = solver.solve(kernel, graph.layouts)
    found = solver.other_blocks(kernel, graph.layouts)
    assert {p.role for s in found for p in s.schedule.tiling.classes} >= {Role.GRID, Role.STREAMED}
    assert all(s.schedule.tiling != usual.schedule.tiling for s in found)
    for solution in found:
        made = solver.solve(kernel, graph.layouts, solution.schedule)
        assert agree(graph, made, inputs, wanted), str(solution.schedule)


def test_what_moves_little_is_not_timed() -> None:
    assert not proposed(linear, [halves(1, 2048), halves(512, 2048), halves(1, 512)])
    assert proposed(linear, [halves(1, 2048), halves(2048, 2048), halves(1, 2048)])


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize(
    "run",
    [
        lambda x: torch.softmax(x, -1),
        lambda x: (x - x.sum(1, keepdim=True)).abs().sum(1),
        lambda x: x.sum(0),
        lambda x: x.reshape(4, 8, 2048).sum((0, 2)),
    ],
    ids=["rows that are stored", "folds of folds", "columns", "sums over two classes"],
)
def test_other_folds_have_none(run: Program) -> None:
    assert not proposed(run, [halves(32, 2048)])
