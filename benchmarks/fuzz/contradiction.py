"""Whether torch contradicts itself: in float64, eager's kernels and torch's decompositions are two functions.

Then eager is no truth to judge by: one of the two is at fault, and both are torch's. A result counts as right only if
it is as good as that of the decompositions, by the same rule: the fault excuses no error of ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.fuzz.outcome import Outcome, ran
from benchmarks.fuzz.program import Program, function
from tilewright import accuracy

TAKEN_APART = "aot_eager_decomp_partition"
"""Torch's backend that runs eager's kernels, composites taken apart by torch's own decompositions."""
FAR = 1e-6
"""Of the root mean square: what is computed in float64 in two ways and differs by more is not one function."""


def contradicted(
    program: Program, inputs: Callable[[bool], list[Tensor]], training: bool, ours: Outcome, exact: Outcome
) -> str:
    """The first tensor in which torch contradicts itself, if there is one and `ours` is right by the decompositions in
    every such tensor; else nothing. `exact` is eager's outcome in float64; `inputs` are as wide as they are asked."""
    apart, wide = (_taken_apart(program, inputs(double), training, double) for double in (False, True))
    found = ""
    for part in ("results", "gradients", "inputs"):
        outcomes = (getattr(o, part) for o in (ours, apart, wide, exact))
        for k, (y, e, r, other) in enumerate(zip(*outcomes, strict=True)):
            if not far_apart(other, r):
                continue
            if not accuracy.compare(y, e, r).passed:
                return ""
            found = found or f"{part}[{k}]"
    return found


def far_apart(a: Tensor, b: Tensor) -> bool:
    """Whether two results in float64 are no two roundings of one."""
    if not a.is_floating_point() or a.shape != b.shape:
        return False
    both = a.isfinite() & b.isfinite()
    size = b[both].square().mean().sqrt()
    return bool(both.any()) and bool((a - b)[both].square().mean().sqrt() > FAR * size)


def _taken_apart(program: Program, inputs: list[Tensor], training: bool, double: bool) -> Outcome:
    torch._dynamo.reset()
    forward = torch.compile(function(program.source(), double=double), backend=TAKEN_APART)
    return ran(forward, inputs, training=training)
