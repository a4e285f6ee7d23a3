"""Python loops that write tables in parts of rows, and new tensors in place: spelled so that the steps are a loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.capture.loops.part_loops import agrees, fewer
from torch import Tensor

__all__ = ["fewer"]
STEPS = 12
Table = Callable[[Tensor, Tensor, Tensor], object]


def operands() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(STEPS, 3, 8), torch.randn(8, 8) / 3, torch.randn(3, 8)


def state(x: Tensor, h: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x + h @ w)


def two_rows(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    out = torch.zeros(2 * STEPS, 3, 8)
    for t in range(STEPS):
        h = state(x[t], h, w)
        out[2 * t] = h
        out[2 * t + 1] = h * 2
    return out


def both_directions(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    out, back = torch.zeros(STEPS, 3, 16), h
    for t in range(STEPS):
        h = state(x[t], h, w)
        out[t, :, :8] = h
        back = state(x[-1 - t], back, w)
        out[-1 - t, :, 8:] = back
    return out


def distances(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    table = torch.zeros(STEPS + 1, 9)
    for t in range(STEPS):
        table[t + 1, 1:] = table[t, 1:] * 0.5 - table[t, :-1] + x[t, 0] * w[0] + h[0]
        table[t + 1, 0] = table[t, 0] + 1
    return table


def columns(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    table = torch.sin(torch.zeros(9, STEPS + 1))
    for t in range(STEPS):
        table[1:, t + 1] = table[1:, t] * 0.5 - table[:-1, t] + x[t, 0] * w[0] + h[0]
        table[0, t + 1] = table[0, t] * 0.5 + 1
    return table


def two_back(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    table = torch.ones(STEPS + 2, 8)
    for t in range(STEPS):
        table[t + 2, 4:] = torch.tanh(table[t, :4] + table[t + 1, 2:6])
        table[t + 2, :4] = table[t + 2, 4:] * 2 + w[0, :4] + x[t, 0, :4]  # what the step has just written
    return table, h


@pytest.mark.parametrize("steps", [two_rows, both_directions, distances, columns, two_back])
def test_tables(steps: Table) -> None:
    agrees(steps, *operands())


def kept_view(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    table = torch.zeros(STEPS + 1, 8)
    for t in range(STEPS):
        row = table[t + 1, 1:]
        table[t + 1, 1:] = table[t, :-1] + x[t, 0, 1:] * w[0, 1:]
        table[t + 1, 0] = table[t, 0] + row.sum() + h[0, 0]  # reads what has been written since it was taken
    return table


def whole_read(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    table = torch.zeros(STEPS + 1, 8)
    for t in range(STEPS):
        table[t + 1, 1:] = table[t, :-1] + x[t, 0, 1:] * w[0, 1:]
        table[t + 1, 0] = table.sum() * 0.1 + h[0, 0]
    return table


@pytest.mark.parametrize(("steps", "count"), [(kept_view, 0), (whole_read, 1)])
def test_rows_that_are_read_otherwise(steps: Table, count: int) -> None:
    agrees(steps, *operands(), count=count)


def swapped(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    now, then = h.clone(), torch.zeros_like(h)
    for row in x:
        then.copy_(state(row, now, w))
        now, then = then, now.clone()
    return now


def accumulated(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    whole = torch.zeros(3, 8)
    for row in x:
        h = state(row, h, w)
        whole += h
    return h, whole


@pytest.mark.parametrize("steps", [swapped, accumulated])
def test_new_tensors_that_are_written_over(steps: Table) -> None:
    agrees(steps, *operands())


def test_buffers_that_take_turns() -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        a, b = h.clone(), torch.zeros_like(h)
        for row in x:
            torch.tanh(a @ w + row, out=b)
            a, b = b, a
        return a

    agrees(run, *operands(), trains=False)


def viewed(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    a = h.clone()
    shown = a[:1]
    for row in x:
        a.copy_(state(row, a.clone(), w))
    return a, shown * 1


def of_another_type(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    whole = torch.zeros(3, 8, dtype=torch.float64)
    for row in x:
        h = state(row, h, w)
        whole += h
        whole.copy_(whole.float())
    return whole


@pytest.mark.parametrize("steps", [viewed, of_another_type])
def test_new_tensors_that_are_seen_otherwise(steps: Table) -> None:
    given = operands()
    with torch.no_grad():
        have = torch.compile(steps, backend="tilewright", fullgraph=True)(*given)
        torch.testing.assert_close(have, steps(*given), rtol=2e-5, atol=2e-6)
