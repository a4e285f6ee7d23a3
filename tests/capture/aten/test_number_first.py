"""Ops of a number and a tensor, in this order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.ops.captured_op import agree, capture, library_calls
from torch import Tensor

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "remainder": lambda x: torch.remainder(-7, x),
    "remainder of a fraction": lambda x: torch.remainder(3.5, x.float()),
    "power": lambda x: torch.pow(2, x.abs()),
    "and": lambda x: torch.bitwise_and(12, x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_number_comes_first(name: str) -> None:
    x = torch.tensor([3, -4, 5, -7, 1])
    graph = capture(PROGRAMS[name], [x])
    assert not library_calls(graph)
    agree(graph, PROGRAMS[name], [x])
