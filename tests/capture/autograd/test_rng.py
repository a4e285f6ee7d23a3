"""Activation checkpointing: what is computed again draws the same numbers; ops that draw none are like any others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tilewright

W = torch.randn(16, 16)


def attention(x: Tensor) -> Tensor:
    h = torch.tanh(x @ W)
    return F.scaled_dot_product_attention(h[None], h[None], x[None])[0].sin()


def dropped(x: Tensor) -> Tensor:
    return F.dropout(torch.tanh(x @ W), 0.3) * x + F.dropout(torch.cos(x), 0.5)


def attention_dropped(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.4).sin() * F.dropout(x, 0.2)


@pytest.mark.parametrize("body", [attention, dropped, attention_dropped])
def test_checkpointed_blocks(body: Callable[[Tensor], Tensor]) -> None:
    def loss(x: Tensor) -> Tensor:
        h = torch.sin(x)
        for _ in range(2):
            h = checkpoint(body, h, use_reentrant=False)
        return h.square().sum()

    tilewright.reset()
    results: list[tuple[Tensor, Tensor]] = []
    for run in (loss, torch.compile(loss, backend="tilewright")):
        torch.manual_seed(0)
        x = torch.linspace(-2, 2, 2 * 6 * 16).reshape(2, 6, 16).requires_grad_()
        value = run(x)
        torch.manual_seed(1)  # the second pass must not depend on where the generator is by then
        value.backward()
        assert x.grad is not None
        results.append((value.detach(), x.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    found = tilewright.stats()
    assert (found.graphs, found.fallbacks) == (2, 0)


def test_attention_without_dropout_saves_no_state() -> None:
    tilewright.reset()
    x = torch.randn(2, 6, 16, requires_grad=True)
    torch.compile(lambda x: checkpoint(attention, x, use_reentrant=False).sum(), backend="tilewright")(
        x
    ).backward()
    names = [row.name for c in tilewright.compilations() for row in (*c.coverage.need, *c.coverage.choice)]
    assert "aten._scaled_dot_product_flash_attention_for_cpu" in names
    assert not [name for name in names if "rng" in name]
