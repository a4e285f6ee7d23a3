"""What may fail is computed once where all that asks for it is: steps of choices take no time of 2^steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.support.cpp_harness import host_target
from tests.support.one_kernel import one_kernel
from torch import Tensor

import tilewright
from tilewright.capture.fx import from_fx
from tilewright.errors import IllegalSchedule
from tilewright.ir.graph import Graph
from tilewright.options import Options
from tilewright.rewrite.normal.normalise import normalise
from tilewright.schedule.solver import Solver

Step = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def _by_itself(y: Tensor, x: Tensor, d: Tensor, k: int) -> Tensor:
    return torch.where(y % 3 == 0, y // 2 + k, y * 3 + 1) + y // d


def _by_another(y: Tensor, x: Tensor, d: Tensor, k: int) -> Tensor:
    return torch.where((x + k) % 3 == 0, y // d + k, y * 3 + 1) % (d + k)


def _inside_others(y: Tensor, x: Tensor, d: Tensor, k: int) -> Tensor:
    return torch.where((x + k) % 3 == 0, torch.where(x > 3, y // d, y + 1), y * 3) + k


def _used_later(y: Tensor, x: Tensor, d: Tensor, k: int) -> Tensor:
    return torch.where((x + k) % 3 == 0, y // d, 5) + y % d


def _by_several(y: Tensor, x: Tensor, d: Tensor, k: int) -> Tensor:
    c = (x + k) % 3
    return torch.where(c == 0, y // d, 0) + torch.where(c == 1, y * 3 // (d + 1), 0)


SHARED: tuple[Step, ...] = (_by_itself, _by_another, _inside_others, _used_later)


def _steps(step: Step, count: int, places: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, d: Tensor) -> Tensor:
        y = torch.arange(x.shape[0]) if places else x * 2
        for k in range(count):
            y = step(y, x, d, k)
        return y

    return run


class _Module(torch.nn.Module):
    def __init__(self, run: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor, d: Tensor) -> Tensor:
        return self.run(x, d)


def _inputs() -> tuple[Tensor, Tensor]:
    return torch.randint(-50, 50, (2000,)), torch.randint(1, 50, (2000,))


def _graph(step: Step, count: int) -> Graph:
    program = torch.export.export(_Module(_steps(step, count)), _inputs(), strict=False)
    return normalise(from_fx(program.run_decompositions().graph_module))


@pytest.mark.parametrize("step", SHARED)
def test_a_kernel_grows_with_its_steps(step: Step) -> None:
    few, many = (
        len(Solver(host_target(), Options()).solve(one_kernel(graph), graph.layouts).program.body[0].body)
        for graph in (_graph(step, 4), _graph(step, 12))
    )
    assert 10 < many < 3.5 * few


def test_what_is_computed_again_too_often_is_no_kernel() -> None:
    graph = _graph(_by_several, 16)
    with pytest.raises(IllegalSchedule, match="computed again under more than"):
        Solver(host_target(), Options()).price(one_kernel(graph), graph.layouts)


@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize("step", [*SHARED, _by_several])
def test_many_steps_compile_and_mean_the_same(step: Step, places: bool) -> None:
    torch._dynamo.reset()
    run, (x, d) = _steps(step, 12, places), _inputs()
    compiled = torch.compile(run, backend=tilewright.backend)
    assert torch.equal(compiled(x, d), run(x, d))
    d[7] = 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(x, d)


@pytest.mark.parametrize("places", [False, True])
def test_long_chains_of_integers(places: bool) -> None:
    def run(x: Tensor, d: Tensor) -> Tensor:
        y = torch.arange(x.shape[0]) if places else x
        for k in range(100):
            y = y * y + (y ^ k)
        return y

    x, d = _inputs()
    assert torch.equal(torch.compile(run, backend=tilewright.backend)(x, d), run(x, d))


@pytest.mark.parametrize("divide", [torch.floor_divide, torch.remainder])
def test_a_divisor_that_is_a_number_in_the_margin(divide: Callable[[Tensor, Tensor], Tensor]) -> None:
    def program(x: Tensor, d: Tensor) -> Tensor:
        return divide(F.pad(x, (1, 1)), F.pad(d, (1, 1), value=3))

    x, d = torch.randint(-50, 50, (1003,)), torch.randint(1, 9, (1003,))
    made = torch.compile(program, backend=tilewright.backend)
    assert torch.equal(made(x, d), program(x, d))
    with pytest.raises(Exception, match="division by zero|ZeroDivisionError"):
        made(x, d - d)


def test_one_divisor_under_a_condition_of_many_elements() -> None:
    """Of the first elements the divisor is a number, whether they are divided is not."""

    def program(x: Tensor, d: Tensor, at: Tensor) -> Tensor:
        n = x.shape[0]
        first = torch.where(torch.arange(n) < 5, x // d, x)
        quotient = (x // torch.cat([d[5:], d[:5]]))[at]
        chosen = torch.where(quotient > 0, quotient, first // (F.pad(x, (5, 0))[:n].abs() + 1))
        return torch.where(first % 2 == 0, chosen, quotient + first)

    x, d, at = torch.randint(-50, 50, (1003,)), torch.randint(1, 9, (1003,)), torch.randint(0, 1003, (1003,))
    made = torch.compile(program, backend=tilewright.backend, options={"strict": True})
    assert torch.equal(made(x, d, at), program(x, d, at))
