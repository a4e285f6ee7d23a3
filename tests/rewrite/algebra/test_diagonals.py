"""Values that repeat along diagonals: computed once for each, where they are dear and many."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import capture
from torch import Tensor

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.interp import run_graph
from tilewright.ir.graph import Graph
from tilewright.rewrite.algebra.diagonals import share_diagonals


def bucket(far: Tensor) -> Tensor:
    """T5's, of 32 buckets."""
    large = 8 + (torch.log(far.abs().float() / 8) / math.log(16) * 8).long()
    small = torch.where(far.abs() < 8, far.abs(), torch.min(large, torch.full_like(large, 15)))
    return (far > 0).long() * 16 + small


def biased(x: Tensor, table: Tensor) -> Tensor:
    rows, columns = (torch.arange(n) for n in x.shape[1:])
    far = columns[None, :] - rows[:, None]
    return x + F.embedding(bucket(far), table).permute(2, 0, 1)


def sums(x: Tensor, table: Tensor) -> Tensor:
    """Of places, not of their difference."""
    rows, columns = (torch.arange(n) for n in x.shape[1:])
    return x + F.embedding(bucket(columns[None, :] + rows[:, None] - 40), table).permute(2, 0, 1)


def masked(x: Tensor, table: Tensor) -> Tensor:
    rows, columns = (torch.arange(n) for n in x.shape[1:])
    return torch.where(columns[None, :] <= rows[:, None], x, -1.0) + table.sum()


def given(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return torch.randn(4, rows, columns), torch.randn(32, 4)


def lines(graph: Graph) -> list[list[str]]:
    return [[str(n) for n in op.output.shape] for op in graph.ops if op.name.endswith("_diagonals")]


@pytest.mark.parametrize("sizes", [(48, 48), (40, 64), (96, 24)])
def test_a_table_of_distances_is_read_once_for_each(sizes: tuple[int, int]) -> None:
    inputs = given(*sizes)
    graph = capture(biased, inputs)
    made = share_diagonals(graph, NO_HINTS)
    made.verify()
    assert lines(made) == [["4", str(sum(sizes) - 1)]]
    (got,) = run_graph(made, [t.numpy() for t in inputs])
    torch.testing.assert_close(torch.as_tensor(got), biased(*inputs))


def test_sizes_may_be_unknown() -> None:
    inputs = given(48, 48)
    made = share_diagonals(capture(biased, inputs, [{1: "n", 2: "m"}, {}]), NO_HINTS)
    assert len(lines(made)) == 1
    for shape in ((48, 48), (30, 70)):
        inputs = given(*shape)
        (got,) = run_graph(made, [t.numpy() for t in inputs])
        torch.testing.assert_close(torch.as_tensor(got), biased(*inputs))


@pytest.mark.parametrize(
    ("run", "size"), [(sums, 48), (masked, 48), (biased, 8)], ids=["sums", "masks", "few"]
)
def test_others_stay(run: object, size: int) -> None:
    graph = capture(run, given(size, size))  # type: ignore[arg-type]
    assert share_diagonals(graph, NO_HINTS) is graph
