"""What a clock gives for integers: the middle of the places that they are compared with, or zeros for indices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.normal_graph import capture
from torch import Tensor

from tilewright.analysis.compared_integers import middle_places
from tilewright.analysis.size_hints import NO_HINTS
from tilewright.ir.graph import Value
from tilewright.pipeline.trial import operands


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


def behind(x: Tensor, n: Tensor) -> Tensor:
    """The number is compared with how far a place is from another."""
    return torch.where(torch.arange(96) - torch.arange(4)[:, None] <= n[:, None], x, 0.0).sum(1)


def in_parts(x: Tensor, n: Tensor) -> Tensor:
    """Places are in two dims."""
    return torch.where(torch.arange(96).view(8, 12) <= n[:, None, None], x.view(4, 8, 12), 0.0).sum((1, 2))


def chosen(x: Tensor, n: Tensor) -> Tensor:
    """What is an index is made of what a comparison makes."""
    here = torch.where(torch.arange(96) == n[:, None], torch.arange(96), 0).sum(1)
    return x[0, :8][here]


def rounded(x: Tensor, n: Tensor) -> Tensor:
    """An index is made of the number as a float."""
    return torch.where(torch.arange(96) <= n[:, None], x, 0.0).sum(1) + x[0, :8][(n.float() / 2).long()]


PROGRAMS = {
    hidden: [48], window: [48], behind: [48], in_parts: [48],
    indexed: [], told_apart: [], chosen: [], rounded: [],
}  # fmt: skip


@pytest.mark.parametrize(("run", "wanted"), PROGRAMS.items())
def test_places(run: Callable[..., Tensor], wanted: list[int]) -> None:
    graph = capture(run, [torch.randn(4, 96), torch.tensor([3, 5, 95, 0])])
    found = middle_places(graph, NO_HINTS)
    assert list(found.values()) == wanted and set(found) <= set(graph.inputs[1:])


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.int8, 127), (torch.uint8, 200), (torch.int16, 200)])
def test_a_clock_gives_places_that_their_type_can_tell(dtype: torch.dtype, wanted: int) -> None:
    def run(x: Tensor, n: Tensor) -> Tensor:
        return torch.where(torch.arange(400) <= n[:, None], x, 0.0).sum(1)

    graph = capture(run, [torch.randn(4, 400), torch.zeros(4, dtype=dtype)])
    laid = {v: graph.layouts.get(v) for v in graph.inputs if isinstance(v, Value)}
    _, n = operands(graph, laid, NO_HINTS, "cpu", seeded=True).values()
    assert n.tolist() == [wanted] * 4
