"""Folds that other folds read inside loops: one over two classes reads one over one of them, which has to be whole
before the loop in which it is read; one keeps the class along which another runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilewright

Program = Callable[[Tensor, Tensor], Tensor]


def _segments(a: Tensor) -> Tensor:
    """exp of the sums between two places, at most one behind the other."""
    s = a.cumsum(1)
    n = a.shape[1]
    gaps = s[:, :, None] - s[:, None]
    return gaps.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf")).exp().softmax(-1)


PROGRAMS: dict[str, Program] = {
    "mean": lambda x, c: ((x - x.mean(-2, keepdim=True)) * c).sum((1, 2)),
    "rows": lambda x, c: (x.softmax(-1) * c).sum((1, 2)),
    "columns": lambda x, c: (x.softmax(-2) * c).sum((1, 2)),
    "maximum": lambda x, c: ((x - x.amax(-2, keepdim=True)) * c).sum((1, 2)),
    "log of a sum": lambda x, c: (torch.exp(x - torch.logsumexp(x, -2, keepdim=True)) * c).sum((1, 2)),
    "running": lambda x, c: (x.cumsum(1) * c).sum(2),
    "running from the end": lambda x, c: (x.flip(0).cumsum(0) * c).sum((1, 2)),
    "running over one": lambda x, c: (x[:, :1].cumsum(1) * c).cummax(0).values.sum(2),
    "parts of running sums": lambda x, c: _segments(x.sum(2)) @ c,
    "all": lambda x, c: (x.softmax(-2) * c).sum(),
}


@pytest.mark.parametrize("shape", [(3, 5, 6), (2, 33, 40)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_read_inside_is_whole(name: str, shape: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    program = PROGRAMS[name]
    x, c = torch.randn(shape), torch.rand(shape)
    torch.testing.assert_close(tilewright.compile(program, (x, c))(x, c), program(x, c), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("costs_of_wide_vectors")
def test_sums_of_columns_are_not_computed_for_each_row() -> None:
    """Rows and columns have no common order of loops: one kernel would compute one of them again and again."""
    torch._dynamo.reset()
    x = torch.randn(2, 256, 256)
    compiled = tilewright.compile(lambda x: x.softmax(-1) * x.softmax(-2), (x,))
    torch.testing.assert_close(compiled(x), x.softmax(-1) * x.softmax(-2))
    assert len(compiled.kernels) == 2
