"""Short frozen vectors of whole numbers with even steps are computed; others are read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tilewright.interp import FLOATS
from tilewright.interp.evaluate import Evaluator
from tilewright.ir.dtype import DType, f32, i32, u8
from tilewright.ir.expr import Expr, axes_of
from tilewright.rewrite.normal.frozen_progressions import progression


def values(found: Expr, count: int) -> list[int]:
    axes = {a.value: np.arange(count) for a in axes_of(found)}
    return Evaluator(FLOATS, axes=axes).value(found).tolist()  # pyright: ignore


@pytest.mark.parametrize("held", [[0, 4], [28, 24, 20, 16], [7, 7, 7]])
def test_what_they_hold(held: list[int]) -> None:
    found = progression(torch.tensor(held, dtype=torch.uint8).reshape(1, -1, 1), u8)
    assert found is not None and found.dtype is u8
    got = values(found, len(held))
    assert got == held if isinstance(got, list) else {got} == set(held)


@pytest.mark.parametrize(
    ("held", "dtype"),
    [
        (torch.tensor([0, 4, 9], dtype=torch.int32), i32),
        (torch.tensor([0.0, 4.0]), f32),
        (torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), i32),
        (torch.tensor([3], dtype=torch.int32), i32),
        (torch.arange(1000, dtype=torch.int32), i32),
    ],
    ids=["uneven", "floats", "matrix", "one number", "long"],
)
def test_others_are_read(held: torch.Tensor, dtype: DType) -> None:
    assert progression(held, dtype) is None
