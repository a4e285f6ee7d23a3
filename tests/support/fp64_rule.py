"""Whether a compiled attention program is right: the fp64 rule over several draws of inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import tilewright
from tilewright import accuracy, measure

Tensors = tuple[Tensor, ...]
Function = Callable[..., object]
Dims = dict[str, dict[int, str]]

WAYS = ("library", "inside")
"""Contractions as library calls, and inside kernels of our own."""


def built(function: Function, inputs: Tensors, way: str, dims: Dims | None = None) -> Function:
    """The program compiled one way. Dynamo forgets others first: sizes that it sees change become symbols."""
    torch._dynamo.reset()
    with torch.no_grad():
        return tilewright.compile(function, inputs, dims=dims, options={"contractions": way})


def wrong(
    function: Function, compiled: Function, draws: Sequence[Tensors], deciding: Function | None = None
) -> str:
    """What the fp64 rule refuses, empty if nothing; for bools, `deciding` gives the floats whose signs they are.

    Draws are judged together: its part for single elements compares the worst ones, of which few elements say little.
    """
    with torch.no_grad():
        mine, eager, exact = (
            [torch.cat(parts) for parts in zip(*(_flat(f(*x)) for x in draws), strict=True)]
            for f in (compiled, function, accuracy.in_float64(function))
        )
        near = None
        if deciding is not None:
            margins = (
                torch.cat([_flat(f(*x))[0] for x in draws]).cpu()
                for f in (deciding, accuracy.in_float64(deciding))
            )
            first, second = margins
            near = accuracy.Deciding(first, second, second)
    verdicts = [
        accuracy.compare(y, e, r, deciding=near if e.dtype is torch.bool else None)
        for y, e, r in zip(mine, eager, exact, strict=True)
    ]
    return "\n".join(f"{i}: {v}" for i, v in enumerate(verdicts) if not v.passed)


def _flat(result: object) -> list[Tensor]:
    return [t.reshape(-1) for t in measure.flatten(result)]
