"""Integers from data that wrapped around are divided as they are: by the sum, not term by term."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewright

HUGE = torch.tensor([2**63 - 1, -(2**63), 2**62, 2**61 + 3, -(2**62) - 7, 5])


def _quotients(i: Tensor) -> tuple[Tensor, ...]:
    return (i * 4 + 3) % 90000, (i * 3) // 3, (i * 6 + 1) // 4, (i * 4) % 2, (i * 10 + 4) % 6


def test_quotients_and_rests_of_wrapped_integers() -> None:
    got = torch.compile(_quotients, backend=tilewright.backend)(HUGE)
    for ours, eagers in zip(got, _quotients(HUGE), strict=True):
        assert torch.equal(ours, eagers)


def test_places_made_of_wrapped_integers() -> None:
    def hashed(x: Tensor, i: Tensor) -> Tensor:
        for k in range(3):
            i = (i ^ (i >> 16)) * 73244475 + k
        return x[i % x.shape[0]]

    x, i = torch.randn(9000), torch.arange(500)
    assert torch.equal(torch.compile(hashed, backend=tilewright.backend)(x, i), hashed(x, i))


def test_the_larger_of_integers_that_may_have_wrapped() -> None:
    def extrema(i: Tensor) -> tuple[Tensor, ...]:
        return torch.maximum(i, i + 1), torch.minimum(i, i - 1), torch.maximum(i + 1, i + 3)

    got = torch.compile(extrema, backend=tilewright.backend)(HUGE)
    for ours, eagers in zip(got, extrema(HUGE), strict=True):
        assert torch.equal(ours, eagers)


def test_comparisons_of_integers_that_may_have_wrapped() -> None:
    def ordered(i: Tensor) -> tuple[Tensor, ...]:
        return i + 1 > i, i < i + 3, i - 1 < i, i + 1 >= i - 1, i + 1 == i + 1, torch.where(i + 1 > i, i, 7)

    got = torch.compile(ordered, backend=tilewright.backend)(HUGE)
    for ours, eagers in zip(got, ordered(HUGE), strict=True):
        assert torch.equal(ours, eagers)


@pytest.mark.parametrize("dynamic", [None, True])
def test_places_that_exceed_an_integer(dynamic: bool | None) -> None:
    def far(x: Tensor) -> tuple[Tensor, ...]:
        i = torch.arange(x.shape[0])
        squares = i * i
        i, high = i * 2**62 + 3, squares * squares * squares * squares * squares * squares
        quotients = i // 2 + x, i % 5 + x, (i % 1000 * 2**61) // 2
        return *quotients, i > 2, torch.maximum(i, i * 2), (high * 2 + 1) // 2, high % 7, high >= 0

    x = torch.zeros(900, dtype=torch.int64)
    got = torch.compile(far, backend=tilewright.backend, dynamic=dynamic)(x)
    for ours, eagers in zip(got, far(x), strict=True):
        assert torch.equal(ours, eagers)


def test_narrow_data_times_a_large_number() -> None:
    def far(x: Tensor) -> tuple[Tensor, ...]:
        i = x.long() * 2**42 + 3
        return i // 2, i % 5, i > 2, torch.maximum(i, i * 2)

    x = torch.tensor([0, 1, 2**30, 2**31 - 1, -(2**31), 12345678, 3, -7], dtype=torch.int32)
    got = torch.compile(far, backend=tilewright.backend)(x)
    for ours, eagers in zip(got, far(x), strict=True):
        assert torch.equal(ours, eagers)
