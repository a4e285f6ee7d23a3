"""What a clock gives for integers: the middle of the places that they are compared with, or zeros for indices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.normal_graph import capture
from torch import Tensor

from tilewright.analysis.compared_integers import middle_places
from tilewright.analysis.size_hints import NO_HINTS


def hidden(x: Tensor, n: Tensor) -> Tensor:
    """What is behind the last place of each row is no part of the sum."""
    return torch.where(torch.arange(96) <= n[:, None], x, 0.0).sum(1)


def window(x: Tensor, n: Tensor) -> Tensor:
    last = n[:, None] + 1
    return torch.where((torch.arange(96) < last) & (torch.arange(96) > last - 8), x, 0.0).sum(1)


def indexed(x: Tensor, n: Tensor) -> Tensor:
    """The number is a place in memory too."""
    return torch.where(torch.arange(96) <= n[:, None], x, 0.0).sum(1) + x[0][n]


def told_apart(x: Tensor, n: Tensor) -> Tensor:
    """The number is compared with one number."""
    return torch.where(n[:, None] > 3, x, 0.0).sum(1)


@pytest.mark.parametrize(("run", "wanted"), [(hidden, [48]), (window, [48]), (indexed, []), (told_apart, [])])
def test_places(run: Callable[..., Tensor], wanted: list[int]) -> None:
    graph = capture(run, [torch.randn(4, 96), torch.tensor([3, 5, 95, 0])])
    found = middle_places(graph, NO_HINTS)
    assert list(found.values()) == wanted and set(found) <= set(graph.inputs[1:])
