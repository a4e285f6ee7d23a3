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


class Table(torch.nn.Module):
    """Gives a copy of what it holds, and what shows the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.randn(3, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        copy = self.get_buffer("rows").t().contiguous()
        return copy, copy.view(-1), x + 1


def test_a_copy_of_a_constant() -> None:
    module, x = Table(), torch.randn(2)
    compiled = torch.compile(module, backend="tilewright", fullgraph=True, options={"freeze": True})
    with torch.no_grad():
        for _ in range(2):
            made, shown, _ = compiled(x)
            torch.testing.assert_close((made, shown), module(x)[:2])
            made.zero_()
            assert not shown.any()
