"""Programs that widen halves compute in singles from there on: nothing that they make is rounded to halves again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.contract.half_programs import HALVES, SHARED, WIDENED
from torch import Tensor

from tilewright import accuracy


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("program", WIDENED)
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


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("program", SHARED)
@pytest.mark.parametrize("scale", [1, 3])
def test_a_maximum_that_two_kernels_read_is_one_number(
    program: Callable[[Tensor], object], scale: int, dtype: torch.dtype
) -> None:
    """The maximum of half scores is stored as a half: the sum of exponentials beside it must take the same."""
    torch.manual_seed(0)
    x = (torch.randn(2, 300, 64) * scale).to(dtype)
    compiled = torch.compile(program, backend="tilewright", options={"contractions": "inside"})
    with accuracy._WideCalls(), accuracy._Wide():  # pyright: ignore[reportPrivateUsage]
        exact = program(x.double())
    made = [t if isinstance(t, tuple) else (t,) for t in (compiled(x), program(x), exact)]
    for ours, eager, r in zip(*made, strict=True):
        verdict = accuracy.compare(ours, eager, r)
        assert verdict.passed, str(verdict)
