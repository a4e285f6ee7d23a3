"""Instructions that are selected for statements of a tile program: what `lower/legalise` decides and printers follow.

None of it changes what a statement means, so that the interpreter ignores it; in which order a sum is added, and so
how it rounds, does depend on it. A statement with the defaults is carried out as it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .expr import Axis

Precision = Literal["ieee", "tf32", "bf16x6"]
"""What a matrix unit reads of fp32: all of it; 10 bits of fraction; three pieces of bf16, which hold all of it, and six
of their nine products."""


@dataclass(frozen=True, slots=True)
class MatrixMultiply:
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
        return f"on the matrix unit{sides}{precision}{', apart' if self.apart else ''}"


@dataclass(frozen=True, slots=True)
class MicroKernel:
    """A product of blocks in vector registers: `rows` numbers of the side without the vector axis, each multiplied with
    `registers` of the other side.

    The sums `start` from the block as it is, from nothing, or from the block scaled by the value number `factor`. What
    declared or scaled it is then marked as `absorbed`."""

    rows: int
    registers: int
    start: Literal["block", "nothing", "scaled"] = "block"
    factor: int | None = None

    def __str__(self) -> str:
        by = "" if self.factor is None else f" by v{self.factor}"
        return f"in {self.rows} x {self.registers} registers, start {self.start}{by}"


@dataclass(frozen=True, slots=True)
class Access:
    """How a block goes between memory and registers, where it is not by vectors along the vector axis.

    `turned`: by vectors along another axis, and transposed in registers. `dense`: by vectors along an axis, into an
    array of numbers. `in place`: not at all, products read it where it lies.

    With `at_once`, each square that is turned is loaded and transposed by one function: it has no mask, and its type in
    registers is that of memory. With `unrolled`, the loop over squares that lie side by side along the lanes (of a
    load), or along the other axis (of a store), is written out."""

    kind: Literal["turned", "dense", "in place"]
    along: Axis | None = None
    at_once: bool = False
    unrolled: bool = False

    def __str__(self) -> str:
        along = "" if self.along is None else f" along {self.along.name}"
        return f"{self.kind}{along}{' at once' if self.at_once else ''}{' unrolled' if self.unrolled else ''}"


IN_PLACE = Access("in place")


@dataclass(frozen=True, slots=True)
class ElementRun:
    """Along the block axis `axis`, elements of an access that lie side by side, `length` of them; where the first of
    each such run lies is a multiple of `multiple`. It says what is so, for compilers behind us that do not see it."""

    axis: Axis
    length: int
    multiple: int

    def __str__(self) -> str:
        return f"{self.axis.name} {self.length} at multiples of {self.multiple}"


@dataclass(frozen=True, slots=True)
class InterleavedStore:
    """A store in which the axes of a block take turns in memory: `count` neighbours along `columns` lie side by side,
    and behind them as many of the next along `rows`. It goes row by row within `count` columns, so that `length`
    elements lie side by side where it is stored; where the first of each such run lies is a multiple of `multiple`."""

    rows: Axis
    columns: Axis
    count: int
    length: int
    multiple: int

    def __str__(self) -> str:
        side = f"{self.count} of {self.columns.name} for each of {self.rows.name}"
        return f"{side}, {self.length} at multiples of {self.multiple}"


@dataclass(frozen=True, slots=True)
class SharedElement:
    """Along the block axis `axis`, each `count` neighbours of a load are one element of memory, as the parts of a
    packed word are, or what has a scale in common: it is loaded once."""

    axis: Axis
    count: int

    def __str__(self) -> str:
        return f"{self.count} of {self.axis.name}"


@dataclass(frozen=True, slots=True)
class RegisterLoop:
    """A loop over the registers of a block along one axis; one that is `unrolled` is written out."""

    axis: Axis
    count: int
    unrolled: bool = False

    def __str__(self) -> str:
        return f"{self.axis.name} x {self.count}{' unrolled' if self.unrolled else ''}"
