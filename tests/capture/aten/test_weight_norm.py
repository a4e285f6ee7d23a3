"""Weights as a direction and a length, forward and backward, in all types: generated, and as eager has them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import tilewright
from tilewright.accuracy import compare_trees


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [(torch.float16, 0), (torch.bfloat16, 1), (torch.float32, 1), (torch.float32, None), (torch.float64, 0)],
)
def test_training(dtype: torch.dtype, dim: int | None) -> None:
    tilewright.reset()
    torch.manual_seed(0)
    module = weight_norm(nn.Linear(12, 7), dim=dim).to(dtype)
    x = torch.randn(5, 12, dtype=dtype)

    def gradients(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        program = torch.compile(module, backend="tilewright") if compiled else module
        made = program(x)
        return (made.detach(), *torch.autograd.grad(made.square().sum(), list(module.parameters())))

    compiled = False
    eager = gradients(copy.deepcopy(module), x)
    exact = gradients(copy.deepcopy(module).double(), x.double())
    compiled = True
    mine = gradients(module, x)
    assert compare_trees(mine, eager, exact).passed
    assert [graph.coverage.need for graph in tilewright.compilations()] == [(), ()]


def test_the_last_of_three_dimensions() -> None:
    torch.manual_seed(0)
    eager = weight_norm(nn.Conv1d(4, 5, 3), dim=2).half()
    mine = copy.deepcopy(eager)
    x = torch.randn(2, 4, 6, dtype=torch.float16)
    y, z = torch.compile(mine, backend="tilewright")(x), eager(x)
    torch.testing.assert_close(y, z, rtol=4e-3, atol=4e-3)
    y.sum().backward()
    z.sum().backward()
    for a, b in zip(mine.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-2, atol=1e-2)
