"""Loops whose steps switch modes, or read numbers that change with the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tests.capture.loops.rolled_loops import agrees, close, loops
from torch import Tensor

import tilewright
from tilewright.capture.loops import rolled

STEPS = 20


@pytest.fixture(autouse=True)
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps than usual are a loop."""
    monkeypatch.setattr(rolled, "LOOPS", replace(rolled.LOOPS, max_unrolled_steps=16))
    tilewright.reset()
    torch.manual_seed(0)


def test_steps_that_begin_in_a_mode_of_their_own() -> None:
    """A target that follows without gradients; the loop itself has them."""

    def run(x: Tensor, w: Tensor, h: Tensor, t: Tensor) -> Tensor:
        made: list[Tensor] = []
        for row in x:
            h = torch.tanh(row @ w + h)
            with torch.no_grad():
                t = 0.9 * t + 0.1 * h
            made.append(((h - t) ** 2).sum(-1))
        return torch.stack(made)

    found: list[Sequence[Tensor]] = []
    for f in (torch.compile(run, backend="tilewright", fullgraph=True), run):
        torch.manual_seed(1)
        given = [torch.randn(s).mul(0.3).requires_grad_() for s in ((STEPS, 3, 4), (4, 4), (3, 4))]
        made = f(*given, given[2].detach() * 0.3)
        found.append([made.detach(), *torch.autograd.grad(made.sum(), given)])
    close(found[0], found[1])
    assert loops() == 2


MADE_OF_OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a cell": lambda h, w: torch.rnn_tanh_cell(w, h, w, w, b_ih=w[0], b_hh=w[1]),
    "a sum of products": lambda h, w: torch.tanh(torch.einsum("ij,jk->ik", h, w)),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", MADE_OF_OTHERS)
def test_what_is_made_of_other_ops_is_cast_as_outside(name: str, *, train: bool) -> None:
    """In the body of a scan torch took them apart behind the casts of autocast."""

    def run(h: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(STEPS):
                h = MADE_OF_OTHERS[name](h, w)
        return h

    h, w = torch.randn(4, 4), (torch.randn(4, 4) / 3).requires_grad_(train)
    have, want = torch.compile(run, backend="tilewright", fullgraph=True)(h, w), run(h, w)
    torch.testing.assert_close(have, want, rtol=3e-2, atol=3e-2)
    assert have.dtype == torch.bfloat16
    assert loops() >= 1


def test_a_discounted_sum_keeps_its_type() -> None:
    """A number that changes with the step meets a tensor without dims."""

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h, loss = x.new_zeros(x.shape[1:]), x.new_zeros(())
        for k in range(STEPS):
            h = torch.tanh(x[k] + h @ w)
            loss = loss + 0.99**k * h.mean()
        return h, loss

    agrees(run, torch.randn(STEPS, 3, 4), torch.randn(4, 4) / 2)


def test_what_fails_alone_stays_apart() -> None:
    """A number that no tensor may stand for."""

    def run(x: Tensor) -> Tensor:
        h = x[0]
        for k in range(STEPS):
            h = torch.sin(h) + torch.histc(x[k], 4, -1.0, (k + 1) / STEPS)
        return h

    agrees(run, torch.randn(STEPS, 4), count=0)


def test_a_gradient_that_a_step_passes_on() -> None:
    """To the step before, as it is, and to two states."""

    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        c = h * 0.5
        d = h * 0.25
        for row in x:
            h, c, d = torch.tanh(row @ w + c), c + h, d + h
        return torch.cat([h, c + d], 1)

    found: list[Sequence[Tensor]] = []
    for f in (torch.compile(run, backend="tilewright", fullgraph=True), run):
        torch.manual_seed(1)
        given = [torch.randn(s).mul(0.3).requires_grad_() for s in ((STEPS, 3, 4), (4, 4), (3, 4))]
        made = f(*given)
        found.append([made.detach(), *torch.autograd.grad(made.sum(), given)])
    close(found[0], found[1])
    assert loops() == 2
