"""Torch's side of buffers."""

from __future__ import annotations

import pytest
import torch

from tilewright.runtime.plan.tensors import filled
from tilewright.tuning.search_limits import TIMER


@pytest.mark.parametrize("n", [0, 1, TIMER.drawn_elements, 5 * TIMER.drawn_elements // 2 + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_tensors_are_filled_to_the_end_with_ordinary_numbers(n: int, dtype: torch.dtype) -> None:
    t = filled(torch.full((n,), float("nan"), dtype=dtype))
    assert t.isfinite().all()
    assert n < 2 or 0.5 < float(t.double().std()) < 2 or n < 9


@pytest.mark.parametrize("strides", [(1, 300), (700, 2), (0, 1)])
def test_strides_do_not_matter(strides: tuple[int, int]) -> None:
    t = filled(torch.empty_strided((300, 300), strides).fill_(float("nan")))
    assert t.stride() == strides
    assert t.isfinite().all()
