"""Tensors that steps write in parts and read whole, as caches of attention are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.capture.loops.part_loops import agrees, fewer
from torch import Tensor

__all__ = ["fewer"]

STEPS = 12
Write = Callable[[Tensor, Tensor, int], object]

WRITES: dict[str, Write] = {
    "a row": lambda cache, x, k: cache[:, k].copy_(x),
    "selected": lambda cache, x, k: cache.select(1, k).copy_(x),
    "in place, twice": lambda cache, x, k: cache[:, k].mul_(0.5).add_(x),
    "a part of a row": lambda cache, x, k: cache[:, k, 1:3].add_(x[:, :2]),
    "broadcast": lambda cache, x, k: cache[:, k].copy_(x[:1]),
    "in any order": lambda cache, x, k: cache[:, k * 5 % STEPS].copy_(x),
    "a cell": lambda cache, x, k: cache[k % 2, k].copy_(x[0]),
}


def attended(x: Tensor, cache: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = (x[:, None] @ cache.transpose(1, 2)) / 3
    scores = scores if mask is None else scores.masked_fill(mask, float("-inf"))
    return (scores.softmax(-1) @ cache)[:, 0]


def given() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 4) / 2, torch.randn(2, STEPS, 4) / 2


@pytest.mark.parametrize("name", WRITES)
def test_written_in_parts_and_read_whole(name: str) -> None:
    """Also the input, which has what was written."""

    def run(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache = cache.mul_(1)
        for k in range(STEPS):
            WRITES[name](cache, torch.tanh(x), k)
            x = torch.sin(x + attended(x, cache))
        return x, cache * 1

    agrees(run, *given(), trains=False)


def test_of_which_the_steps_so_far_are_read() -> None:
    def run(x: Tensor, cache: Tensor) -> Tensor:
        places = torch.arange(STEPS)
        for k in range(STEPS):
            cache[:, k] = torch.tanh(x)
            x = torch.sin(x + attended(x, cache, places > k))
        return x

    agrees(run, *given(), trains=False)


def test_gradients_pass_through_what_was_written() -> None:
    def run(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        cache = torch.zeros(2, STEPS, 4)
        for k in range(STEPS):
            cache[:, k] = x * w[:, 1]
            x = torch.sin(x * w[:, 0] + cache.clone().mean(1))
        return x, cache * 2

    agrees(run, *given())


SCATTERS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "a row": lambda cache, x, k: torch.select_scatter(cache, x, 1, k),
    "from the end": lambda cache, x, k: cache.select_scatter(x, 1, -1 - k),
    "a slice": lambda cache, x, k: torch.slice_scatter(cache, x[:, None], 1, k, k + 1),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_made_anew_with_a_part(name: str) -> None:
    def run(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        for k in range(STEPS):
            cache = SCATTERS[name](cache, torch.tanh(x), k)
            x = torch.sin(x + attended(x, cache))
        return x, cache

    agrees(run, *given())


def test_two_tables_in_one() -> None:
    def run(x: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        for k in range(STEPS):
            tables[0, k], tables[1, k] = torch.tanh(x), torch.sin(x)
            x = torch.sin(x + tables[0].mean(0) - tables[1, STEPS - 1 - k])
        return x, tables * 1

    agrees(run, torch.randn(4), torch.randn(2, STEPS, 4), trains=False)


STALE: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "read after it is written": lambda cache, x, k: _after(cache, x, k),
    "the row that is written next": lambda cache, x, k: _after(cache, x, k, k + 1),
}


def _after(cache: Tensor, x: Tensor, k: int, at: int | None = None) -> Tensor:
    shown = cache[:, k if at is None else at]
    cache[:, k] = torch.tanh(x)
    return torch.sin(x + shown + attended(x, cache))


@pytest.mark.parametrize("name", STALE)
def test_a_part_that_shows_what_is_written_later_stays_one(name: str) -> None:
    """A copy would not show it: such steps stay apart."""

    def run(x: Tensor, cache: Tensor) -> Tensor:
        for k in range(STEPS - 1):
            x = STALE[name](cache, x, k)
        return x

    agrees(run, *given(), count=0, trains=False)
