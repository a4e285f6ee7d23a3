"""Programs that widen halves compute in singles from there on: nothing that they make is rounded to halves again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright import accuracy


def columns(x: Tensor) -> Tensor:
    v = x.float()
    return (v @ v.mT / 4).softmax(-2).mT @ v


def rows(x: Tensor) -> Tensor:
    v = x.float()
    return (v @ v.mT / 4).softmax(-1) @ v


def fused(x: Tensor) -> Tensor:
    v = x.float()
    return F.scaled_dot_product_attention(v, v, v)


def written_out(x: Tensor) -> Tensor:
    v = x.float()
    return ((v @ v.mT).sigmoid().unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("program", [columns, rows, fused, written_out])
@pytest.mark.parametrize("shape", [(2, 3, 8), (2, 64, 32)])
def test_what_is_made_of_widened_halves_is_no_half(
    program: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    made = torch.compile(program, backend="tilewright")(x)
    with accuracy._WideCalls(), accuracy._Wide():  # pyright: ignore[reportPrivateUsage]
        exact = program(x.double())
    verdict = accuracy.compare(made, program(x), exact)
    assert verdict.passed, str(verdict)


def column_weights(x: Tensor) -> Tensor:
    return (x @ x.mT / 4).softmax(-2) @ x


def columns_and_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    p = (x @ x.mT / 4).softmax(-1)
    return p @ x, p.sum(-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("program", [column_weights, columns_and_sums])
def test_a_maximum_that_two_kernels_read_is_one_number(
    program: Callable[[Tensor], object], dtype: torch.dtype
) -> None:
    """The maximum of half scores is stored as a half: the sum of exponentials beside it must take the same."""
    torch.manual_seed(0)
    x = torch.randn(2, 300, 64).to(dtype)
    compiled = torch.compile(program, backend="tilewright", options={"contractions": "inside"})
    with accuracy._WideCalls(), accuracy._Wide():  # pyright: ignore[reportPrivateUsage]
        exact = program(x.double())
    made = [t if isinstance(t, tuple) else (t,) for t in (compiled(x), program(x), exact)]
    for ours, eager, r in zip(*made, strict=True):
        verdict = accuracy.compare(ours, eager, r)
        assert verdict.passed, str(verdict)
