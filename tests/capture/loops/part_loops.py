"""Python loops of which parts become loops: compiled, counted and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tilewright
from tilewright.capture.loops import rolled


@pytest.fixture(autouse=True)
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps than usual are a loop."""
    tilewright.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(rolled, "LOOPS", replace(rolled.LOOPS, max_unrolled_steps=8))


def loops() -> int:
    """How many loops the graphs compiled so far hold."""
    return sum("tilewright_loop" in str(call) for c in tilewright.compilations() for call in c.calls)


def gradients(f: Callable[..., object], given: tuple[Tensor, ...]) -> list[Tensor | None]:
    """The results, and the gradients of all operands that have one."""
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in given]
    made = f(*leaves)
    results = list(made) if isinstance(made, tuple) else [made]
    whole = sum(t.float().square().sum() for t in results if t.is_floating_point())
    assert isinstance(whole, Tensor)
    found = torch.autograd.grad(whole, [t for t in leaves if t.requires_grad], allow_unused=True)
    return [*(t.detach() for t in results), *found]


def agrees(f: Callable[..., object], *given: Tensor, count: int = 1, trains: bool = True) -> None:
    """Results and gradients of `f` are eager's, and each graph holds `count` loops."""
    with torch.no_grad():
        have = torch.compile(f, backend="tilewright", fullgraph=True)(*(t.clone() for t in given))
        want = f(*(t.clone() for t in given))
    torch.testing.assert_close(have, want, rtol=2e-5, atol=2e-6)
    assert loops() == count
    if trains:
        tilewright.reset()
        have = gradients(torch.compile(f, backend="tilewright", fullgraph=True), given)
        torch.testing.assert_close(have, gradients(f, given), rtol=5e-5, atol=5e-6)
        assert loops() == 2 * count
