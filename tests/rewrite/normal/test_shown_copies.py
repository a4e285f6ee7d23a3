"""Copies that are results, beside results that show them: as in eager mode, these share memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilewright

COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "a part of an input": lambda x: x[3].clone(),
    "in another order": lambda x: x[3].t().contiguous(),
    "of a call": lambda x: torch.linalg.inv(x).select(0, 3).clone(memory_format=torch.contiguous_format),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_and_what_shows_it(name: str) -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y = COPIES[name](x)
        return y, y.t().unsqueeze(0)

    x = torch.randn(6, 3, 3)
    with torch.no_grad():
        made, shown = torch.compile(run, backend=tilewright.backend, fullgraph=True)(x)
    torch.testing.assert_close((made, shown), run(x))
    assert made.data_ptr() == shown.data_ptr()
    assert made.data_ptr() not in (x.data_ptr(), x[3].data_ptr())
