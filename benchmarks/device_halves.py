"""Checks of programs of halves on a GPU: what is widened stays wide, what two kernels read is one number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from tests.contract.half_programs import HALVES, SHARED, WIDENED
from torch import Tensor

import tilewright
from tilewright.accuracy import compare_trees, in_float64

SHAPES = ((2, 3, 8), (2, 64, 32), (2, 300, 64), (4, 1024, 64))
SCALES = (1.0, 3.0)
"""Of the inputs: scores of the latter are nine times as loud."""


def judged(program: Callable[[Tensor], object], contractions: str, dtype: torch.dtype) -> str:
    """Every shape and scale by the fp64 rule. Raises AssertionError where it fails."""
    said: list[str] = []
    for shape in SHAPES:
        for scale in SCALES:
            generator = torch.Generator("cuda").manual_seed(0)
            x = (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)
            options = {"contractions": contractions}
            made = tilewright.compile(program, (x,), options=options)(x)
            verdict = compare_trees(made, program(x), in_float64(program)(x))
            assert verdict.passed, f"{shape} times {scale}: {verdict}"
            said.append(f"{verdict.relative_k:.2f}")
    return "k " + ", ".join(said)


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    """Every program in both half types, its products inside kernels and as the compiler chooses."""
    for program in (*WIDENED, *SHARED):
        for dtype in HALVES:
            for contractions in ("inside", "modelled"):
                name = f"halves-{program.__name__}-{str(dtype)[6:]}-{contractions}"
                yield name, partial(judged, program, contractions, dtype)
