"""What counts as the same result of two ways to compute it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilewright.pipeline.replay_trial import agree
from tilewright.runtime.plan.tensors import drawn


def product(dtype: torch.dtype = torch.float16) -> Tensor:
    return (drawn(torch.empty(64, 512), 0) @ drawn(torch.empty(512, 48), 1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    made = product(dtype)
    assert agree([made, None, 3], [(made.float() * (1 + 2**-8)).to(dtype), None, 3])


def test_what_is_mixed_up_differs() -> None:
    made = product()
    for wrong in (
        made.flip(0),
        made.roll(1, 1),
        -made,
        made.index_fill(0, torch.tensor([63]), 0.0),
        made[:32],
    ):
        assert not agree([made], [wrong])
    holed = made.clone()
    holed[5, 7] = torch.nan
    assert not agree([made], [holed])


def test_what_is_not_finite_is_not_judged() -> None:
    made = product()
    overflown = made.clone()
    overflown[3] = torch.inf
    assert agree([overflown], [made]) and agree([torch.full((4,), torch.nan)], [torch.zeros(4)])


def test_operands_of_several_seeds_differ() -> None:
    assert not torch.equal(drawn(torch.empty(8), 0), drawn(torch.empty(8), 1))
    assert torch.equal(drawn(torch.empty(8), 1), drawn(torch.empty(8), 1))
