"""Activation checkpointing: what is computed again draws the same numbers; ops that draw none are like any others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
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


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "gumbel_softmax": lambda x: F.gumbel_softmax(torch.ones_like(x)),
    "rrelu": lambda x: F.rrelu(-torch.ones_like(x), training=True),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "cauchy": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal": lambda x: torch.empty_like(x).log_normal_(),
    "geometric": lambda x: torch.empty_like(x).geometric_(0.1),
    "uniform": lambda x: torch.empty_like(x).uniform_(),
    "normal": lambda x: torch.normal(0.0, 1.0, x.shape),
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 9), torch.full_like(x, 0.4)),
    "gamma": lambda x: torch._standard_gamma(x.abs() + 0.5),
    "dirichlet": lambda x: torch._sample_dirichlet(x.abs() + 0.5),
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 6).float(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_two_draws_are_two_in_training(name: str) -> None:
    """Torch took them for one where it split the graph, before it was told that the op draws."""
    draw = DRAWS[name]

    def program(x: Tensor) -> tuple[Tensor, ...]:
        fixed = x.detach()
        return x.sin(), draw(fixed) * 2 + 1, draw(fixed) * 2 + 1

    tilewright.reset()
    x = torch.linspace(-2, 2, 48).reshape(4, 12).requires_grad_()
    results: list[tuple[Tensor, ...]] = []
    for run in (program, torch.compile(program, backend="tilewright")):
        torch.manual_seed(0)
        results.append(run(x))
    assert not torch.equal(results[1][1], results[1][2])
    torch.testing.assert_close(results[1], results[0])


def test_draws_of_a_loop_are_two_in_training() -> None:
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (F.gumbel_softmax(torch.zeros_like(h.detach())) * 2 for _ in range(2))
        return torch.tanh(h + x), (first - second) * x

    def program(h: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        return scan(step, h, xs)

    tilewright.reset()
    h, xs = torch.ones(4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    last, made = torch.compile(program, backend="tilewright")(h, xs)
    (last.sum() + made.sum()).backward()
    assert made.abs().amin(1).gt(0).all()
