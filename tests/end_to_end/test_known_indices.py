"""Indices that a compiler knows are held against the dim that they index, as those from data are, and divisors are
not taken for other numbers than 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import capture
from tests.support.one_kernel import one_kernel
from torch import Tensor

import tilewright
from tilewright.analysis.size_hints import NO_HINTS
from tilewright.errors import IndexOutOfRange
from tilewright.options import Options
from tilewright.schedule.solver import Solver
from tilewright.target import preset

TABLE = torch.arange(48.0).reshape(16, 3)


def positions(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of tables at the positions of a sequence, as language models learn them."""
    places = torch.arange(ids.shape[1])
    return ids[..., None] + F.embedding(places, TABLE), TABLE[places + 1] * 2


@pytest.mark.parametrize("freeze", [False, True])
def test_positions_beyond_their_table_raise(*, freeze: bool) -> None:
    compiled = tilewright.compile(
        positions, (torch.ones(2, 5),), dims={"ids": {1: "n"}}, options={"freeze": freeze}
    )
    for n in (7, 15):
        for got, want in zip(compiled(torch.ones(2, n)), positions(torch.ones(2, n)), strict=True):
            torch.testing.assert_close(got, want)
    for n in (16, 17, 40):
        with pytest.raises(IndexOutOfRange):
            compiled(torch.ones(2, n))


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "even steps": lambda x: x[torch.tensor([0, 4])] * 2,
    "from the end": lambda x: x[torch.tensor([-5, 0])] * 2,
    "counted": lambda x: x[torch.arange(5)] * 2,
    "one number": lambda x: x.gather(0, torch.full((2, 3), 4)),
    "flat": lambda x: x.take(torch.arange(15)),
    "rows": lambda x: x.index_select(0, torch.arange(5)) + 1,
    "scattered": lambda x: x.scatter(0, torch.full((1, 3), 4), 1.0),
    "selected": lambda x: torch.select_scatter(x, torch.ones(3), 0, 4),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_known_indices_are_in_bounds_or_raise(name: str) -> None:
    program = PROGRAMS[name]
    free = tilewright.compile(program, (torch.ones(6, 3),), dims={"x": {0: "n"}})
    for n in (5, 9):
        x = torch.randn(n, 3)
        torch.testing.assert_close(free(x), program(x))
    for n in (4, 3):
        for compiled in (free, tilewright.compile(program)):
            with pytest.raises((IndexError, RuntimeError), match="out of"):
                compiled(torch.ones(n, 3))


@pytest.mark.parametrize(
    "divide",
    [torch.floor_divide, torch.remainder, torch.fmod, lambda x, y: torch.div(x, y, rounding_mode="trunc")],
)
def test_known_divisors_are_no_zero_or_raise(divide: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = torch.tensor([7, -7, 9])
    for count, what in ((lambda n: torch.arange(n) + 1, True), (torch.arange, False)):

        def program(x: Tensor, count: Callable[[int], Tensor] = count) -> Tensor:
            return divide(x, count(x.shape[0]))

        compiled = tilewright.compile(program)
        if what:
            assert compiled(x).equal(program(x))
        else:
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                compiled(x)


def bucketed(table: Tensor, x: Tensor) -> Tensor:
    """A bias by buckets of distances, near ones their own, others by their logarithms: as in T5."""
    i = torch.arange(x.shape[0])
    away = (i[:, None] - i[None, :]).abs()
    far = 8 + (torch.log(away.float() / 8 + 1e-6) * 4).long()
    return x + table[torch.where(away < 8, away, far.clamp(8, 15))]


def test_what_is_proved_to_lie_inside_is_not_tested() -> None:
    graph = capture(bucketed, [torch.empty(16), torch.empty(64, 64)])
    solver = Solver(preset("sm_90"), Options(), hints=NO_HINTS)
    assert not solver.solve(one_kernel(graph), graph.layouts).program.is_checked()
