"""Inputs that a forward pass writes into: gradients follow what it read, not what stands there afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tilewright


def _copied(x: Tensor, b: Tensor, w: Tensor) -> Tensor:
    c = b.clone()
    b.mul_(2)
    return x * w * c


def _computed(x: Tensor, b: Tensor, w: Tensor) -> Tensor:
    c = b.cos()
    b.copy_(x[0])
    return (x * w * c).exp() * b


def _cast(x: Tensor, b: Tensor, w: Tensor) -> Tensor:
    n = b.long()
    b.add_(1)
    return x * w * n


def _of_a_view(x: Tensor, b: Tensor, w: Tensor) -> Tensor:
    c = b.view(2, 2).t().exp()
    b[1:3].zero_()
    return x * w * c.reshape(-1)


def _of_several_results(x: Tensor, b: Tensor, w: Tensor) -> Tensor:
    values, places = b.sort(dim=0)
    b.zero_()
    return (x * w)[:, places] * values


def _of_parts(x: Tensor, b: Tensor, w: Tensor) -> Tensor:
    first, second = b.split(2)
    c = torch.cat([first.cos(), second.clone()])
    b.zero_()
    return x * w * c


@pytest.mark.parametrize("f", [_copied, _computed, _cast, _of_a_view, _of_several_results, _of_parts])
def test_gradients_are_of_the_values_that_were_read(f: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x, start = torch.randn(3, 4), torch.randn(4)
    found: list[list[Tensor]] = []
    for call in (f, torch.compile(f, backend=tilewright.backend)):
        w, b = start.clone().requires_grad_(), torch.tensor([1.0, 3.0, 2.0, 4.0])
        y = call(x, b, w)
        y.sum().backward()
        assert w.grad is not None
        found.append([y.detach(), b, w.grad])
    for mine, eager in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, eager)


class Averaged(nn.Module):
    """A layer whose result is scaled by a running mean of its weight and by the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4, 4))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 4] to the same."""
        self.calls += 1
        with torch.no_grad():
            self.mean.lerp_(self.layer.weight, 0.1)
        return self.layer(x) @ self.mean * self.calls


def test_a_running_mean_of_weights_is_read_once() -> None:
    found: list[list[Tensor]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = Averaged()
        call = torch.compile(net, backend=tilewright.backend) if compiled else net
        for rows in (3, 3, 5):
            call(torch.randn(rows, 4)).square().sum().backward()
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        found.append([*grads, *net.buffers()])
    for mine, eager in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, eager)
