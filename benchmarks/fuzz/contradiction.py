"""Whether torch contradicts itself: in float64, eager's kernels and torch's decompositions are two functions, or
eager's kernels are another function of the same numbers when these lie row-major (inputs, and operands that repeat
elements), or on the CPU.

Then eager is no truth to judge by: one of the two is at fault, and both are torch's. (A gradient of average pools of
channels-last tensors on GPUs was one, pytorch#188344: tensors may become channels-last inside of a program.) A result
counts as right only if it is as good as that of the decompositions, of row-major inputs, or of the CPU, by the same
rule: the fault excuses no error of ours. Of programs that address memory themselves how it lies is a part of the
meaning: these are not asked the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks.fuzz.outcome import Outcome, ran
from benchmarks.fuzz.program import Program, function
from tilewright import accuracy

TAKEN_APART = "aot_eager_decomp_partition"
"""Torch's backend that runs eager's kernels, composites taken apart by torch's own decompositions."""
_ADDRESSES = "as_strided"
Inputs = Callable[[bool, str], list[Tensor]]
"""A program's inputs: whether in float64, and on which device."""
FAR = 1e-6
"""Of the root mean square: what is computed in float64 in two ways and differs by more is not one function."""


def contradicted(
    program: Program, inputs: Inputs, training: bool, ours: Outcome, exact: Outcome, device: str = "cpu"
) -> str:
    """The first tensor in which torch contradicts itself, if there is one and `ours` is right by one of the other ways
    in every such tensor, and by that way or by eager in all others; else nothing. `exact` is eager's outcome in float64
    on the `device`."""
    ways = [_taken_apart]
    if _ADDRESSES not in program.source():
        ways.append(_row_major)
    if device != "cpu":
        ways.append(_on_cpu)
    eager = _moved(ran(function(program.source()), inputs(False, device), training=training))
    for way in ways:
        narrow, wide = (way(program, inputs, training, double, device) for double in (False, True))
        found = _contradicted_by(narrow, wide, _moved(ours), eager, _moved(exact))
        if found:
            return found
    return ""


def _contradicted_by(narrow: Outcome, wide: Outcome, ours: Outcome, eager: Outcome, exact: Outcome) -> str:
    found = ""
    for part in ("results", "gradients", "inputs"):
        outcomes = (getattr(o, part) for o in (ours, narrow, wide, eager, exact))
        for k, (y, n, w, e, r) in enumerate(zip(*outcomes, strict=True)):
            apart = far_apart(r, w)
            if not accuracy.compare(y, n, w).passed and (apart or not accuracy.compare(y, e, r).passed):
                return ""
            found = found or (f"{part}[{k}]" if apart else "")
    return found


def far_apart(a: Tensor, b: Tensor) -> bool:
    """Whether two results in float64 are no two roundings of one."""
    if not a.is_floating_point() or a.shape != b.shape:
        return False
    both = a.isfinite() & b.isfinite()
    size = b[both].square().mean().sqrt()
    return bool(both.any()) and bool((a - b)[both].square().mean().sqrt() > FAR * size)


def _moved(outcome: Outcome) -> Outcome:
    """On the CPU."""
    return Outcome(
        *([x.detach().cpu() for x in part] for part in (outcome.results, outcome.gradients, outcome.inputs))
    )


def _taken_apart(program: Program, inputs: Inputs, training: bool, double: bool, device: str) -> Outcome:
    torch._dynamo.reset()
    forward = torch.compile(function(program.source(), double=double), backend=TAKEN_APART)
    return _moved(ran(forward, inputs(double, device), training=training))


def _row_major(program: Program, inputs: Inputs, training: bool, double: bool, device: str) -> Outcome:
    given = inputs(double, device)
    laid = [x.detach().clone(memory_format=torch.contiguous_format) for x in given]
    for x, was in zip(laid, given, strict=True):
        x.requires_grad_(was.requires_grad)
    with _Repeated():
        return _moved(ran(function(program.source(), double=double), laid, training=training))


class _Repeated(TorchDispatchMode):
    """Gives kernels row-major operands where these repeat elements. (Of such a dim, a median of the CPU is what memory
    held before.)"""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func.is_view or func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        laid: Any = tree_map_only(Tensor, _without_repeats, (args, kwargs or {}))
        return func(*laid[0], **laid[1])


def _without_repeats(x: Tensor) -> Tensor:
    return x.contiguous() if x.layout is torch.strided and 0 in x.stride() else x


def _on_cpu(program: Program, inputs: Inputs, training: bool, double: bool, device: str) -> Outcome:
    with torch.device("cpu"):
        return ran(function(program.source(), double=double), inputs(double, "cpu"), training=training)
