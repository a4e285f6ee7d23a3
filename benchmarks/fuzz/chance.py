"""Whether what the rule refuses over many draws is chance.

Errors of ill-conditioned programs have long tails: one number of thousands errs as far as all the others together, and
whether it is ours or eager's is chance. That is so where both hold: with the roles exchanged the rule refuses about as
many draws, and wherever we err further than eager does anywhere, eager errs nearly as far or the error is no outlier
(`SPREAD`) among the changes of the exact result if the inputs, and what each op computes, are rounded at random (Monte
Carlo arithmetic: Stott Parker, 1997). Where all elements of all draws are the same few numbers (what follows a sign),
these are all that is seen, however often, and the second condition decides alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks.fuzz.outcome import Draw, ran
from benchmarks.fuzz.program import Program, function
from benchmarks.fuzz.smooth import nudged
from tilewright import accuracy

SIGMAS = 2.0
"""Standard deviations by which the draws that are refused may outnumber those that are with the roles exchanged."""
FEW = 8
"""Elements that are the same few numbers again and again are that many samples of an error, however many there are."""
ROUNDED = 32
"""Ways to round the inputs of a draw, and what is computed of them, at random: the largest of eight changes was once
less than their standard deviation."""
SPREAD = 5.6
"""Standard deviations of these changes within which an error is no outlier. One change among 32 roundings admits less
than an error of its own size."""
ROUNDINGS = 4.0
"""Times eager's error."""
_EXACT = frozenset(
    {
        "abs", "cat", "clamp", "clone", "constant_pad_nd", "copy", "flip", "full", "gather", "index", "maximum",
        "minimum", "neg", "repeat", "roll", "scatter", "sign", "stack", "threshold_backward", "where", "zeros_like",
    }
)  # fmt: skip
"""Ops of torch that round nothing."""


def is_chance(
    program: Program, draws: Sequence[Draw], part: str, k: int, *, training: bool, later: bool, device: str
) -> bool:
    """Whether the `k`-th tensor of a part of the outcome is as exact as eager's but for chance."""
    triples = [[getattr(o, part)[k] for o in d.outcomes] for d in draws]
    if not triples[0][0].is_floating_point() or not all(
        bool(t.isfinite().all()) for ts in triples for t in ts
    ):
        return False
    ours = sum(not accuracy.compare(y, e, r).passed for y, e, r in triples)
    theirs = sum(not accuracy.compare(e, y, r).passed for y, e, r in triples)
    different = torch.cat([r.reshape(-1) for _, _, r in triples]).unique().numel()
    if different > FEW and ours - theirs > SIGMAS * math.sqrt(ours + theirs):
        return False
    most = max(float((e - r).abs().max()) for _, e, r in triples if r.numel())
    for number, (draw, (y, e, r)) in enumerate(zip(draws, triples, strict=True)):
        error = (y - r).abs()
        far = error > most
        if not bool(far.any()):
            continue
        spread = _spread(program, draw, number, part, k, training=training, later=later, device=device)
        allowed = torch.maximum(SPREAD * spread, ROUNDINGS * (e - r).abs())
        if not bool((error <= allowed)[far].all()):
            return False
    return True


def _spread(
    program: Program, draw: Draw, number: int, part: str, k: int, *, training: bool, later: bool, device: str
) -> Tensor:
    """How far the exact result moves (root mean square) if the inputs of a draw and what each op computes are
    rounded."""
    plain = function(program.source(), double=True)
    given = program.inputs(draw.seed, later=later, device=device)
    unit = max((torch.finfo(x.dtype).eps / 2 for x in given if x.is_floating_point()), default=0.0)

    def told(size: float, way: int) -> Tensor:
        wide = program.inputs(
            draw.seed, later=later, double=True, device=device
        )  # a program may write into them
        with _Rounding(size, way) if size else nullcontext():
            outcome = ran(plain, nudged(wide, size, way), training=training, draw=number)
        return getattr(outcome, part)[k].detach()

    here = told(0.0, 0)
    squares = torch.zeros_like(here)
    for n in range(ROUNDED):  # a rounding that leaves no number says nothing of how far it moves
        squares += (told(unit, 1 + n) - here).square().nan_to_num(0.0, 0.0, 0.0)
    return (squares / ROUNDED).sqrt()


class _Rounding(TorchDispatchMode):
    """Under it, what each op computes is off by about `unit` of itself, at random by `way`."""

    def __init__(self, unit: float, way: int) -> None:
        super().__init__()
        self.unit, self.numbers = unit, torch.Generator().manual_seed(way)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:  # fmt: skip
        made = func(*args, **(kwargs or {}))
        views = any(r.alias_info is not None for r in func._schema.returns)
        if views or func.overloadpacket.__name__ in _EXACT:
            return made
        return tree_map_only(Tensor, self._rounded, made)

    def _rounded(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float64:
            return x
        noise = torch.randn(x.shape, generator=self.numbers, dtype=x.dtype, device="cpu").to(x.device)
        return x * (1 + self.unit * noise)  # its elements may share memory
