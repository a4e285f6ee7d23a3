"""Whether a program's gradients hang on its inputs smoothly: where they jump, rounding decides what they are."""

from __future__ import annotations

from collections.abc import Sequence

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
JUMP, BENT = 1e-2, 0.25
"""Of the root mean square, and of the change itself: how far a number that jumps moves, and how far off half the way is
from half the change. At a jump it is half of it; of a smooth function next to nothing."""

SURE = 0.5
"""Share of the places of floating point that jumps may leave: where fewer are firm, they excuse none."""


def is_smooth(program: Program, seed: int, device: str = "cpu") -> bool:
    """Whether eager can differentiate a program and its gradients hang on the inputs smoothly."""
    if not any(g.grad for g in program.givens):
        return True
    nudge = nudge_of(program)
    found: list[list[Tensor]] = []
    for size in (0.0, nudge):
        inputs = nudged(program.inputs(seed, double=True, device=device), size, 1)
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


def firm(program: Program, seed: int, later: bool, device: str, part: str, k: int) -> Tensor:
    """Where no near tie decides the `k`-th tensor of a part of the outcome (results, gradients): an integer is the same
    in float64 whatever small change the inputs have, any other number does not jump. Where few of a tensor of floating
    point are firm, all are taken for it: else hardly anything would be judged."""
    plain = function(program.source(), double=True)

    def told(share: float, draw: int) -> Tensor:
        size = share * TIE * nudge_of(program)
        inputs = nudged(program.inputs(seed, later=later, double=True, device=device), size, draw)
        return getattr(ran(plain, inputs, training=part == "gradients"), part)[k].detach()

    here = told(0.0, 0)
    if not (here.is_floating_point() or here.is_complex()):
        return torch.stack([told(1.0, 1 + n) == here for n in range(NUDGES)]).all(0)
    jumps = [_jumps(here, told(0.5, 1 + n), told(1.0, 1 + n)) for n in range(NUDGES)]
    found = ~torch.stack(jumps).any(0)
    return found if int(found.sum()) >= SURE * found.numel() else torch.ones_like(found)


def _jumps(here: Tensor, halfway: Tensor, there: Tensor) -> Tensor:
    """Where three values along a line are no straight one: half the way is not half the change."""
    change = there - here
    bent = (there - 2 * halfway + here).abs()
    return (change.abs() > JUMP * here.abs().square().mean().sqrt()) & (bent > BENT * change.abs())


def nudged(inputs: Sequence[Tensor], nudge: float, draw: int) -> list[Tensor]:
    """Inputs moved a little, each its own way, in the same layouts."""
    numbers = torch.Generator().manual_seed(draw)
    return [_nudged(x, nudge, numbers) for x in inputs]


def _nudged(x: Tensor, nudge: float, numbers: torch.Generator) -> Tensor:
    if not x.is_floating_point() or not nudge:
        return x
    with torch.no_grad():
        noise = torch.randn(x.shape, generator=numbers, dtype=x.dtype, device="cpu").to(x.device)
        moved = x * (1 + nudge * noise)
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        made = made.copy_(moved) if 0 not in x.stride() else moved
    return made.requires_grad_(x.requires_grad)
