"""Halves that are compared are those of the program: what a kernel makes on the way is rounded where it jumps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.corpus import Case
from tests.support.lowered import form_of
from torch import Tensor
from torch.nn import functional as F

import tilewright
from tilewright.ir.expr import Expr, walk


def largest(x: Tensor, y: Tensor) -> Tensor:
    """Its gradient compares the products, made again, with their largest, which was stored."""
    return torch.outer(x, y).amax(0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_extrema_of_products(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(9, dtype=dtype), torch.randn(7, dtype=dtype)
    made: list[tuple[Tensor, ...]] = []
    for run in (torch.compile(largest, backend="tilewright"), largest):
        given = x.clone().requires_grad_(), y.clone().requires_grad_()
        made.append(torch.autograd.grad(run(*given).sum(), given))
    torch.testing.assert_close(made[0], made[1])


def test_gradients_of_extrema_of_functions() -> None:
    """What the backward pass compares is what the forward pass found its extremum in, not computed again."""

    def program(x: Tensor, p: Tensor) -> Tensor:
        return torch.aminmax(F.tanhshrink(F.hardswish((x.abs() + 0.2) ** p.clamp(-2, 2))), dim=0)[1]

    torch.manual_seed(0)
    x, p = torch.randn(8, 4, 35, 2), torch.tensor([1.7, -0.4])
    made: list[tuple[Tensor, ...]] = []
    for run in (torch.compile(program, backend="tilewright"), program):
        given = x.clone().requires_grad_()
        made.append(torch.autograd.grad(run(given, p).square().sum(), given))
    torch.testing.assert_close(made[0], made[1])


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "equal": lambda x, y: x * y == (x * y).amax(),
    "less": lambda x, y: x * y < (x * y).half().mT.contiguous().mT,
    "floor": lambda x, y: (x * y).floor(),
    "remainder": lambda x, y: (x * y).remainder(0.25),
    "integer": lambda x, y: (x * y * 8).int(),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_see_halves(name: str) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(64, 40).half(), torch.randn(64, 40).half()
    compiled = tilewright.compile(STEPS[name], (x, y))
    assert torch.equal(compiled(x, y), STEPS[name](x, y))


def test_stored_halves_and_signs_are_not_rounded_again() -> None:
    def roundings(program: Callable[[Tensor], Tensor]) -> list[Expr]:
        form = form_of(Case("halves", lambda x: program(x.half()), ((8, 40),)))
        return [x for i in form.items for r in i.roots for x in walk(r) if x.op == "cast" and x.dtype.is_half]

    before = len(roundings(lambda x: x * x))
    assert len(roundings(lambda x: torch.where(x * x > 0, x * x, 1))) == before
    assert len(roundings(lambda x: torch.where(x * x > 0.5, x * x, 1))) == before + 1
