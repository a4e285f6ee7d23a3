"""Whether torch contradicts itself: in float64, eager's kernels and torch's decompositions are two functions, or
eager's kernels are another function of the same numbers when these lie row-major.

Then eager is no truth to judge by: one of the two is at fault, and both are torch's. (A gradient of average pools of
channels-last tensors on GPUs was one, pytorch#188344.) A result counts as right only if it is as good as that of the
decompositions, or of row-major inputs, by the same rule: the fault excuses no error of ours. Of programs that address
memory themselves how it lies is a part of the meaning: these are not asked the latter.
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
_ADDRESSES = "as_strided"
FAR = 1e-6
"""Of the root mean square: what is computed in float64 in two ways and differs by more is not one function."""


def contradicted(
    program: Program, inputs: Callable[[bool], list[Tensor]], training: bool, ours: Outcome, exact: Outcome
) -> str:
    """The first tensor in which torch contradicts itself, if there is one and `ours` is right by the decompositions, or
    by row-major inputs, in every such tensor; else nothing. `exact` is eager's outcome in float64; `inputs` are as wide
    as they are asked."""
    ways = [_taken_apart, _row_major] if _ADDRESSES not in program.source() else [_taken_apart]
    for way in ways:
        other = (way(program, inputs(double), training, double) for double in (False, True))
        found = _contradicted_by(*other, ours, exact)
        if found:
            return found
    return ""


def _contradicted_by(narrow: Outcome, wide: Outcome, ours: Outcome, exact: Outcome) -> str:
    found = ""
    for part in ("results", "gradients", "inputs"):
        outcomes = (getattr(o, part) for o in (ours, narrow, wide, exact))
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


def _row_major(program: Program, inputs: list[Tensor], training: bool, double: bool) -> Outcome:
    laid = [x.detach().clone(memory_format=torch.contiguous_format) for x in inputs]
    for x, given in zip(laid, inputs, strict=True):
        x.requires_grad_(given.requires_grad)
    return ran(function(program.source(), double=double), laid, training=training)
