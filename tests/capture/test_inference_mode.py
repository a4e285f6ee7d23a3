"""Regions of `inference_mode` inside a program: the values and gradients of eager mode, and no mode left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x * w
    with torch.inference_mode():
        row, made = y[0], y + 1
        with torch.inference_mode(False):
            again = x[1] * w
    return y + 1, row * 2, made, again


def writes(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    with torch.inference_mode():
        y[0].mul_(3)
    return y * 2


@torch.inference_mode()
def whole(x: Tensor, w: Tensor) -> Tensor:
    h = x[0]
    for t in range(70):
        h = torch.tanh(x[t] * w + h)
    return h


def seen(f: Callable[..., Tensor | tuple[Tensor, ...]]) -> list[Tensor | bool | None]:
    torch.manual_seed(0)
    x, w = torch.randn(70, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    made = f(x, w)
    results = made if isinstance(made, tuple) else (made,)
    asks = [r for r in results if r.requires_grad]
    if asks:
        torch.autograd.backward([r.sum() for r in asks])
    return [*(r.detach().clone() for r in results), *(r.requires_grad for r in results), x.grad, w.grad]


@pytest.mark.parametrize("f", [views, writes, whole])
def test_it_is_without_gradients(f: Callable[..., Tensor]) -> None:
    torch.testing.assert_close(seen(torch.compile(f, backend="tilewright")), seen(f))
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


def test_within_the_mode_nothing_changes() -> None:
    x, w = torch.randn(70, 4), torch.randn(4)
    with torch.inference_mode():
        torch.testing.assert_close(torch.compile(views, backend="tilewright")(x, w), views(x, w))


def inside(h: Tensor, w: Tensor) -> Tensor:
    with torch.inference_mode():
        k, rest = h.view(-1)[0] * 1, h[1:]
    return torch.tanh(h * w) + k + rest.sum()


def called(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = cast(Tensor, checkpoint(inside, x[0], w, use_reentrant=False)) + x[1]
    with torch.no_grad():
        silent = cast(Tensor, checkpoint(inside, h, w, use_reentrant=False)) * w
    return h, silent * w


def test_in_called_functions() -> None:
    torch.testing.assert_close(seen(torch.compile(called, backend="tilewright")), seen(called))
