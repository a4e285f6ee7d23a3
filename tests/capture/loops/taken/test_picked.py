"""Steps that take parts of one tensor in any order."""

from __future__ import annotations

import pytest
import torch
from tests.capture.loops.part_loops import agrees, fewer
from torch import Tensor

__all__ = ["fewer"]

STEPS = 12
ORDER = [(5 * k + 2) % 7 for k in range(STEPS)]
NEGATIVE = [-1, 2, -3, 0, 5, -7, 6, 6, -2, 1, 1, 4]


@pytest.mark.parametrize("order", [ORDER, NEGATIVE])
def test_rows(order: list[int]) -> None:
    def program(h: Tensor, x: Tensor) -> Tensor:
        for k in order:
            h = torch.tanh(h + x[k])
        return h

    agrees(program, torch.randn(3, 8), torch.randn(7, 3, 8))


def test_columns_numbers_and_new_dims() -> None:
    def program(h: Tensor, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        for k in ORDER:
            h = torch.tanh(h + x[:, k, None] * y[1, :, k].sum() + z.select(1, k))
        return h

    agrees(program, torch.randn(3, 8), torch.randn(3, 7), torch.randn(2, 4, 7), torch.randn(8, 7))


def test_layers_of_one_stack_of_weights() -> None:
    def program(h: Tensor, w: Tensor) -> Tensor:
        for k in ORDER:
            h = torch.tanh(h @ w[k])
        return h

    agrees(program, torch.randn(3, 8), torch.randn(7, 8, 8) / 3)


def test_what_is_written_is_read_as_it_is_then() -> None:
    """Parts in any order of a tensor that steps write into: no copy in front of the loop has them."""

    def program(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone()
        for k, at in enumerate(ORDER):
            h = torch.tanh(h + x[at])
            x[k % 7] = h
        return h, x

    agrees(program, torch.randn(3, 8), torch.randn(7, 3, 8), trains=False)


def test_parts_that_steps_write_into() -> None:
    def program(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone()
        for at in ORDER:
            x[at].mul_(1.5)
            h = torch.tanh(h + x[at])
            x.select(0, at).add_(h)
        return h, x

    agrees(program, torch.randn(3, 8), torch.randn(7, 3, 8), trains=False)


def test_parts_of_what_a_step_fills() -> None:
    def program(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.zeros(STEPS, 3, 8)
        for k, at in enumerate(ORDER):
            h = torch.tanh(h + x[at])
            made[k] = h
        return h, made

    agrees(program, torch.randn(3, 8), torch.randn(7, 3, 8))


def test_a_loop_behind_another_in_another_direction() -> None:
    def program(h: Tensor, x: Tensor) -> Tensor:
        for k in range(STEPS):
            h = torch.tanh(h + x[k])
        for k in reversed(range(STEPS)):
            h = torch.tanh(h + x[k])
        return h

    agrees(program, torch.randn(3, 8), torch.randn(STEPS, 3, 8))
