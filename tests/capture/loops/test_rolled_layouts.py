"""What rolled loops make lies as the program made it: it may be viewed, and results have eager's strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tilewright

Program = Callable[[Tensor], tuple[Tensor, ...]]
STEPS = 66


def _cell() -> Program:
    cell = nn.GRUCell(6, 6)

    def program(x: Tensor) -> tuple[Tensor, ...]:
        state, found = x[:, 0] * 0, []
        for t in range(STEPS):
            state = cell(x[:, t], state)
            found.append(state)
        whole = torch.stack(found, 1)
        return whole, whole.view(-1), torch.cat(found, 1), torch.stack([*found[:5], state * 2, *found[6:]], 1)

    return program


def _maps() -> Program:
    layer = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def program(x: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for _ in range(STEPS):
            x = torch.tanh(layer(x))
            found.append(x)
        parts = torch.cat([*found[:7], x * 2, *found[9:]], 1)
        return x, found[5], torch.cat(found, 1), torch.stack(found, 1), parts

    return program


def _turned() -> Program:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for _ in range(STEPS):
            x = torch.tanh(x.t() + 1).t()
            found.append(x.t() * 2)
        return x, found[5], found[7].t(), torch.stack(found, 1)

    return program


def _channels_last(*shape: int) -> Tensor:
    return torch.randn(*shape).to(memory_format=torch.channels_last)


CASES: list[tuple[Callable[[], Program], Tensor]] = [
    (_cell, torch.randn(2, STEPS, 6)),
    (_maps, _channels_last(2, 3, 4, 5)),
    (_turned, torch.randn(4, 3).t()),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0].__name__)
def test_results_have_the_strides_of_eager(case: tuple[Callable[[], Program], Tensor]) -> None:
    torch.manual_seed(0)
    make, x = case
    program = make()
    tilewright.reset()
    with torch.no_grad():
        made = torch.compile(program, backend=tilewright.backend)(x)
        wanted = program(x)
    assert "tilewright_loop" in str(tilewright.compilations()[0])
    for y, e in zip(made, wanted, strict=True):
        assert y.stride() == e.stride()
        torch.testing.assert_close(y, e)
