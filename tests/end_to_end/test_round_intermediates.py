"""With `round_intermediates` every half that the program makes has the bits that it has in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilewright


def chain(x: Tensor, y: Tensor) -> Tensor:
    return ((x * 1.7 + y) * x - y).abs().sqrt()


def promoted(x: Tensor, y: Tensor) -> Tensor:
    """Halves that become singles were rounded before."""
    return (x * y + x).float() * 1.7 - y.float()


def over_norms(x: Tensor, y: Tensor) -> Tensor:
    """A sum that is read in the kernel that makes it, of rounded products."""
    return (x * y) / (x * y).abs().amax(-1, keepdim=True) + (x * y).amax(0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("run", [chain, promoted, over_norms])
def test_halves_are_those_of_eager(run: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    numbers = torch.Generator().manual_seed(0)
    x, y = (torch.randn(33, 70, generator=numbers).to(dtype) for _ in range(2))
    made = {
        rounded: tilewright.compile(
            run, (x, y), options={"round_intermediates": rounded, "measure": False, "strict": True}
        )(x, y)
        for rounded in (True, False)
    }
    assert torch.equal(made[True], run(x, y)) and not torch.equal(made[False], run(x, y))
