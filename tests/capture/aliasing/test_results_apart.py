"""Results that show one memory: each is a tensor of its own, so that what has no gradient takes none from another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilewright

Program = Callable[[Tensor], tuple[Tensor, ...]]


def _view_and_detached(x: Tensor) -> tuple[Tensor, ...]:
    y = x.exp()
    return y.reshape(y.shape[0], -1, y.shape[-1]), y.detach()


def _detached_first(x: Tensor) -> tuple[Tensor, ...]:
    y = x.exp()
    return y.detach(), y.view(-1), y.t()


def _of_an_input(x: Tensor) -> tuple[Tensor, ...]:
    return x.detach(), x.view(-1), x.sin()


def _two_names(x: Tensor) -> tuple[Tensor, ...]:
    y = x.exp()
    return y, y.detach(), y


def _of_a_part(x: Tensor) -> tuple[Tensor, ...]:
    y = x.exp().chunk(2)[1]
    return y.unsqueeze(0), y.detach(), y.detach()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("f", [_view_and_detached, _detached_first, _of_an_input, _two_names, _of_a_part])
def test_gradients_flow_through_the_results_that_have_them(f: Program, dynamic: bool) -> None:
    call = torch.compile(f, backend=tilewright.backend, dynamic=dynamic)
    for rows in (4, 6):
        found: list[list[object]] = []
        for g in (f, call):
            torch.manual_seed(0)
            x = torch.randn(rows, 5, requires_grad=True)
            results = g(x)
            sum(r.square().sum() for r in results if r.requires_grad).backward()  # type: ignore[union-attr]
            assert x.grad is not None
            same = [[a is b for b in results] for a in results]
            found.append([x.grad, [r.requires_grad for r in results], same, *(r.detach() for r in results)])
        torch.testing.assert_close(found[1], found[0])


def test_without_gradients_too() -> None:
    x = torch.randn(4, 5)
    y, z = torch.compile(_view_and_detached, backend=tilewright.backend)(x)
    y.requires_grad_()
    assert not z.requires_grad
    y.detach()[0, 0, 0] = 7.0
    assert float(z[0, 0]) == 7.0
