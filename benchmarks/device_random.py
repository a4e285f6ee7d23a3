"""Random numbers on a GPU: those that eager draws, at every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tests.capture.loops.random_loops import attended, disturbed, dropped
from torch import Tensor

import tilewright

STEPS = 100
CALLS = 6
SAME = 1e-4
"""Relative to the largest element: what roundings of a hundred steps differ by at most. Other numbers differ by as much
as the results are."""
Function = Callable[[Tensor, Tensor], Tensor]
FUNCTIONS: tuple[Function, ...] = (
    lambda h, w: dropped(h, w, STEPS),
    lambda h, w: disturbed(h, w, STEPS),
    lambda h, w: attended(h, w, STEPS),
    lambda h, w: attended(h, w, 1),
)


def random_numbers() -> str:
    """Results, gradients, and what is drawn after them, in several calls, with and without graphs of the whole."""
    loops = 0
    for function in FUNCTIONS:
        for trains in (False, True):
            wanted = drawn(function, "cuda", trains=trains)
            for graphs in (False, True):
                torch._dynamo.reset()
                tilewright.reset()
                run = torch.compile(function, backend=tilewright.backend, options={"cuda_graphs": graphs})
                judge(drawn(run, "cuda", trains=trains), wanted)
                loops += sum(c.name == "loop" for made in tilewright.compilations() for c in made.calls)
    return f"{loops} loops"


def judge(made: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Raise AssertionError unless both come from the same random numbers."""
    for ours, theirs in zip(made, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=SAME * float(theirs.abs().max()))


def drawn(function: Function, device: str, *, trains: bool) -> list[Tensor]:
    """Results of several calls, with gradients if it `trains`, then numbers that are drawn behind them; the generator
    is set before the first call and before one in the middle."""
    found: list[Tensor] = []
    for k in range(CALLS):
        if k in (0, CALLS // 2):
            torch.manual_seed(k)
        numbers = torch.Generator(device).manual_seed(k)
        h = torch.randn(3, 8, device=device, generator=numbers).requires_grad_(trains)
        w = (torch.randn(8, 8, device=device, generator=numbers) / 3).requires_grad_(trains)
        with torch.set_grad_enabled(trains):
            y = function(h, w)
        found.append(y.detach().clone())
        if trains:
            found += torch.autograd.grad(y.square().sum(), (h, w))
    return [*found, torch.rand(4, device=device)]
