"""Strides of results in dims of size 1: they address nothing, and programs look at them all the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import tilewright


def parts(x: Tensor) -> Sequence[Tensor]:
    y = x * 2
    return y, y[3:], y[:, 2:3], y.unsqueeze(0), y[1:2, None, 3:4]


def parts_of_an_input(x: Tensor) -> Sequence[Tensor]:
    return x[3:], x[:, 2:3], x.unsqueeze(0), x.narrow(0, 1, 1), x.split(1)[2]


def written(x: Tensor) -> Sequence[Tensor]:
    y = x.sin()
    y[2:3].mul_(2)
    return y[2:3], y


def last_row(x: Tensor) -> Sequence[Tensor]:
    return x[x.shape[0] - 1 :], x.split(x.shape[0] - 1)[1]


@pytest.mark.parametrize("program", [parts, parts_of_an_input, written, last_row])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_they_are_those_of_eager_mode(
    program: Callable[[Tensor], Sequence[Tensor]], dynamic: bool, trains: bool
) -> None:
    compiled = torch.compile(program, backend=tilewright.backend, dynamic=dynamic)
    x = torch.randn(4, 6, requires_grad=trains)
    for have, want in zip(compiled(x), program(x), strict=True):
        assert have.stride() == want.stride() and have.storage_offset() == want.storage_offset()
        torch.testing.assert_close(have, want)


def test_a_part_can_be_viewed_as_another_type() -> None:
    compiled = torch.compile(parts, backend=tilewright.backend)
    x = torch.randn(4, 6)
    assert torch.equal(compiled(x)[2].view(torch.int16), parts(x)[2].view(torch.int16))
