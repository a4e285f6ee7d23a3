"""Random numbers on a GPU: those that eager draws, at every call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

import tilewright

STEPS = 100
CALLS = 6
Function = Callable[[Tensor, Tensor], Tensor]


def dropped(h: Tensor, w: Tensor) -> Tensor:
    """A recurrence with dropout."""
    for _ in range(STEPS):
        h = functional.dropout(torch.tanh(h @ w), 0.3)
    return h


def disturbed(h: Tensor, w: Tensor) -> Tensor:
    """Three kinds of numbers in each step, all states."""
    made: list[Tensor] = []
    for _ in range(STEPS):
        h = torch.tanh(h @ w) + 0.1 * torch.randn_like(h)
        h = h * torch.bernoulli(h.sigmoid().detach()) + torch.rand(3, 8, device=h.device)
        made.append(h)
    return torch.stack(made)


def attended(h: Tensor, w: Tensor) -> Tensor:
    """Attention with dropout in each step."""
    for _ in range(STEPS):
        h = torch.tanh(h + attended_once(h, w))
    return h


def attended_once(h: Tensor, w: Tensor) -> Tensor:
    """Attention with dropout, whose gradient draws the same numbers again."""
    q = (h @ w).view(1, 1, 3, 8)
    return functional.scaled_dot_product_attention(q, q, q, dropout_p=0.2).view(3, 8)


FUNCTIONS: tuple[Function, ...] = (dropped, disturbed, attended, attended_once)


def random_numbers() -> str:
    """Results, gradients, and what is drawn after them, in several calls, with and without graphs of the whole."""
    loops = 0
    for function in FUNCTIONS:
        for trains in (False, True):
            wanted = drawn(function, trains)
            for graphs in (False, True):
                torch._dynamo.reset()
                tilewright.reset()
                run = torch.compile(function, backend=tilewright.backend, options={"cuda_graphs": graphs})
                for ours, theirs in zip(drawn(run, trains), wanted, strict=True):
                    # Other numbers would differ by as much as the results are; roundings grow over the steps.
                    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3 * float(theirs.abs().max()))
                loops += sum(c.name == "loop" for made in tilewright.compilations() for c in made.calls)
    return f"{loops} loops"


def drawn(function: Function, trains: bool) -> list[Tensor]:
    """Results of several calls, with gradients if it `trains`; the generator is set before the first and before one in
    the middle."""
    found: list[Tensor] = []
    for k in range(CALLS):
        if k in (0, CALLS // 2):
            torch.manual_seed(k)
        numbers = torch.Generator("cuda").manual_seed(k)
        h = torch.randn(3, 8, device="cuda", generator=numbers).requires_grad_(trains)
        w = (torch.randn(8, 8, device="cuda", generator=numbers) / 3).requires_grad_(trains)
        with torch.set_grad_enabled(trains):
            y = function(h, w)
        found.append(y.detach().clone())
        if trains:
            found += torch.autograd.grad(y.square().sum(), (h, w))
    return [*found, torch.rand(4, device="cuda")]
