"""Whether a program's gradients hang on its inputs smoothly: where they jump, rounding decides what they are."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.fuzz.outcome import ran
from benchmarks.fuzz.program import Program, function, has_halves

NUDGE = 1e-6
"""Relative change of the inputs; of half types, what their rounding does is as large as NUDGE * HALF."""
HALF = 2e3
AMPLIFIED = 300.0
"""How many times as large the relative change of a result may be."""


TIE = 4.0
"""Times a nudge: what integers that are no near tie do not hang on."""
NUDGES = 8
"""That tell whether they do."""


def is_smooth(program: Program, seed: int, device: str = "cpu") -> bool:
    """Whether eager can differentiate a program and its gradients hang on the inputs smoothly."""
    if not any(g.grad for g in program.givens):
        return True
    nudge = nudge_of(program)
    found: list[list[Tensor]] = []
    for size in (0.0, nudge):
        inputs = [nudged(x, size, 1) for x in program.inputs(seed, double=True, device=device)]
        try:
            found.append(ran(function(program.source(), double=True), inputs).gradients)
        except RuntimeError:
            return False
    for a, b in zip(*found, strict=True):
        size = float(a.square().mean().sqrt())
        if not bool(a.isfinite().all()) or float((a - b).abs().max()) > AMPLIFIED * nudge * max(size, 1e-30):
            return False
        if 0 < size < 1e-6 or size > 1e6:
            return False
    return True


def nudge_of(program: Program) -> float:
    """The relative change of the inputs that a program should not mind."""
    return NUDGE * (HALF if has_halves(program) else 1.0)


def firm(program: Program, seed: int, later: bool, device: str, result: int) -> Tensor:
    """Where an integer result is the same in float64 whatever small change the inputs have: elsewhere a near tie
    decides."""
    plain = function(program.source(), double=True)
    made: list[Tensor] = []
    for k in range(1 + NUDGES):
        size = TIE * nudge_of(program) if k else 0.0
        inputs = [nudged(x, size, k) for x in program.inputs(seed, later=later, double=True, device=device)]
        made.append(ran(plain, inputs, training=False).results[result])
    return torch.stack([m == made[0] for m in made]).all(0)


def nudged(x: Tensor, nudge: float, draw: int) -> Tensor:
    """An input moved a little, in the same layout."""
    if not x.is_floating_point() or not nudge:
        return x
    with torch.no_grad():
        numbers = torch.Generator().manual_seed(draw)
        noise = torch.randn(x.shape, generator=numbers, dtype=x.dtype, device="cpu").to(x.device)
        moved = x * (1 + nudge * noise)
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        made = made.copy_(moved) if 0 not in x.stride() else moved
    return made.requires_grad_(x.requires_grad)
