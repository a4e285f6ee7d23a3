"""Calls get their operands as the program showed them, also where sizes are sums that torch writes in another way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright
from tilewright.ir.expr import symbol
from tilewright.ir.ops.strided import nested, with_elements
from tilewright.ir.sizes import dims


def folded(x: Tensor, w: Tensor) -> Tensor:
    """The gradient of the reshape views a copy whose rows are max(1, n) elements apart."""
    y = F.conv2d(x, w, None, stride=2, padding=1)
    return y.reshape(y.shape[-1], -1).sum(-2)


def test_rows_of_a_sum_of_sizes_are_views_of_their_copy() -> None:
    x, w = torch.randn(2, 4, 7, 6, requires_grad=True), torch.randn(10, 4, 2, 2, requires_grad=True)
    compiled = tilewright.compile(folded, (x, w), dims={"x": {0: "b", 2: "n"}})
    for shape in ((2, 4, 7, 6), (6, 4, 11, 6)):
        x = torch.randn(shape, requires_grad=True)
        wanted = torch.autograd.grad(folded(x, w).square().sum(), (x, w))
        have = torch.autograd.grad(compiled(x, w).square().sum(), (x, w))
        torch.testing.assert_close(have, wanted)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_view_of_what_was_written_transposed_names_sizes_that_nobody_can_prove(dynamic: bool) -> None:
    """Functionalised, the value is viewed back as the 4-D tensor and again as rows: its sizes are quotients."""

    def doubled(x: Tensor) -> Tensor:
        rows = x.reshape(x.shape[-1], -1)
        rows.transpose(0, -1).add_(rows.transpose(0, -1))
        return rows[None]

    compiled = torch.compile(doubled, backend="tilewright", dynamic=dynamic)
    with torch.no_grad():
        for shape in ((2, 8, 33, 6), (6, 8, 35, 6)):
            x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
            assert torch.equal(compiled(x.clone()), doubled(x.clone()))


def test_quotients_of_sizes_are_sizes() -> None:
    a, b, d = (symbol(name, 1) for name in "abd")
    rows = dims.floordiv(dims.mul(a, b), d)
    assert dims.at_least(rows, 0) and not dims.at_least(rows, 1)
    shape = [d, dims.mul(d, rows)]
    assert nested(*with_elements(shape, [shape[1], dims.ONE])) == [0, 1]
    assert nested(*with_elements(shape, [dims.maximum(dims.ONE, shape[1]), dims.ONE])) == [0, 1]
    assert nested(*with_elements(shape, [rows, dims.ONE])) is None  # rows that lie in one another
