"""Instructions that are selected for statements of a tile program: what `lower/legalise` decides and printers follow.

None of it changes what a statement means, so that the interpreter ignores it; in which order a sum is added, and so
how it rounds, does depend on it. A statement with the defaults is carried out as it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["ieee", "tf32", "bf16x6"]
"""What a matrix unit reads of fp32: all of it; 10 bits of fraction; three pieces of bf16, which hold all of it, and six
of their nine products."""


@dataclass(frozen=True, slots=True)
class MatrixUnit:
    """A product of blocks on a matrix unit, which takes its left side row by row.

    `sides`: as the statement has them, `swapped`, or `turned`: they stay, and the sums are transposed before and after.
    The last one is for pieces of singles, which are added in another order where the sides change places: kernels that
    compute the same product must find the same. `precision` is None for types that need none. With `apart` the products
    of a block are added up before the sums so far come in."""

    sides: Literal["straight", "swapped", "turned"]
    precision: Precision | None = None
    apart: bool = False

    def __str__(self) -> str:
        sides = "" if self.sides == "straight" else f", sides {self.sides}"
        precision = "" if self.precision is None else f", {self.precision}"
        return f"matrix unit{sides}{precision}{', apart' if self.apart else ''}"
