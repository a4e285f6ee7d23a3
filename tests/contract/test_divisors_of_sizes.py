"""Integers divided by what is made of sizes: where a size makes the divisor 0, the call raises as eager does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import while_loop

import tilewright

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": lambda x: x // (x.shape[0] - 3),
    "remainder": lambda x: x % (3 - x.shape[0]),
    "fmod": lambda x: torch.fmod(x, x.shape[0] - 3),
    "truncated": lambda x: torch.div(x, x.shape[0] - 3, rounding_mode="trunc"),
    "a tensor filled with it": lambda x: x // torch.full((1,), x.shape[0] - 3),
    "a narrow one": lambda x: x.to(torch.int16) // torch.full_like(x, x.shape[0] - 3, dtype=torch.int16),
    "places": lambda x: x[torch.arange(x.shape[0]) // (x.shape[0] - 3) % 2],
    "not chosen": lambda x: torch.where(x > -100, x, x // (x.shape[0] - 3)),
    "sizes": lambda x: x + 12 // (x.shape[0] - 3),
    "sizes as floats": lambda x: x * (12 / (x.shape[0] - 3)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_divisor_that_turns_out_0(name: str) -> None:
    program = PROGRAMS[name]
    compiled = tilewright.compile(program, (torch.tensor([7, -7, 9, 5, 3]),), dims={"x": {0: "n"}})
    for n in (4, 3, 2, 6):
        x = torch.arange(n) * 5 - 7
        if n != 3:
            torch.testing.assert_close(compiled(x), program(x), rtol=0, atol=0)
            continue
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            program(x)
        with pytest.raises(ZeroDivisionError, match=f"divided by zero.*{__file__}"):
            compiled(x)


def test_no_elements_are_divided_by_0() -> None:
    def program(x: Tensor) -> Tensor:
        return x[3:] // (x.shape[0] - 3)

    compiled = tilewright.compile(program, (torch.arange(5),), dims={"x": {0: "n"}})
    for n in (3, 6):
        torch.testing.assert_close(compiled(torch.arange(n)), program(torch.arange(n)), rtol=0, atol=0)


def test_a_loop_that_takes_no_turn_divides_nothing() -> None:
    def program(x: Tensor, turns: Tensor) -> Tensor:
        by = x.shape[0] - 3
        begin = torch.zeros_like(turns)
        return while_loop(lambda k, a: k < turns, lambda k, a: (k + 1, a * 2 // by), (begin, x))[1]  # type: ignore[no-any-return]

    compiled = tilewright.compile(program, (torch.arange(5), torch.tensor(2)), dims={"x": {0: "n"}})
    for n, turns in ((3, 0), (4, 0), (4, 2), (6, 3)):
        x, some = torch.arange(n) * 5 - 7, torch.tensor(turns)
        torch.testing.assert_close(compiled(x, some), program(x, some), rtol=0, atol=0)
    with pytest.raises(ZeroDivisionError):
        compiled(torch.arange(3), torch.tensor(2))


def test_divisors_that_cannot_be_0_ask_nothing() -> None:
    def program(x: Tensor) -> Tensor:
        return x // x.shape[0] + x % -(x.shape[0] + 1) + x // torch.full((1,), x.shape[0])

    compiled = tilewright.compile(program, (torch.arange(5),), dims={"x": {0: "n"}})
    torch.testing.assert_close(compiled(torch.arange(7)), program(torch.arange(7)), rtol=0, atol=0)
    plan = compiled.trace["plan"]  # type: ignore[index]
    assert not plan.segments[0].preconditions


def test_floats_of_sizes_divide_as_floats() -> None:
    def program(x: Tensor) -> Tensor:
        return x * (12.0 / (x.shape[0] * 0.5)) + torch.ones(5)[: int(x.shape[0] / 2.5 // 1.5)].sum()

    compiled = tilewright.compile(program, (torch.randn(5),), dims={"x": {0: "n"}})
    for n in (5, 8):
        x = torch.randn(n)
        torch.testing.assert_close(compiled(x), program(x))
