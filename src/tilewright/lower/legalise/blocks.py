"""How blocks lie in vector registers: along which axes, and in how many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

from tilewright.ir.expr import Axis, Expr, axes_of
from tilewright.ir.program import Loop, TileProgram
from tilewright.ir.sizes import dims as index

Dims = tuple[tuple[Axis, int], ...]
"""Block axes with their tiles, the vector axis last."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a program where the axes `bound` have these tiles; others have `widest`. A register holds `width`
    elements along the axis `lane`."""

    lane: Axis | None
    width: int
    widest: Mapping[Axis, int]
    bound: Mapping[Axis, int]

    def inside(self, s: Loop) -> Blocks:
        """The same in the body of a loop."""
        return replace(self, bound={**self.bound, s.axis: s.tile})

    def dims(self, axes: Sequence[Axis]) -> Dims:
        """The block axes among `axes` with their tiles here, the vector axis last."""
        own = sorted(axes, key=lambda a: a == self.lane)
        tiles = [(a, self.bound.get(a, self.widest.get(a, 1))) for a in own]
        return tuple((a, tile) for a, tile in tiles if tile > 1)

    def lanes(self, dims: Dims) -> int:
        """Elements of one register of a block (1: the block is made of scalars)."""
        return gcd(dims[-1][1], self.width) if dims and dims[-1][0] == self.lane else 1

    def counts(self, dims: Dims) -> Dims:
        """Registers along each axis of a block, axes with only one left out."""
        lanes = self.lanes(dims)
        out = [(a, t // lanes if lanes > 1 and a == self.lane else t) for a, t in dims]
        return tuple((a, n) for a, n in out if n > 1)

    def number(self, dims: Dims) -> int:
        """Registers of a block."""
        return prod(n for _, n in self.counts(dims))

    def registers(self, dims: Dims, along: Axis) -> int:
        """Registers of a block along one axis."""
        return dict(self.counts(dims)).get(along, 1)


def blocks_of(program: TileProgram) -> Blocks:
    """The blocks of `program` where only the axes of its grid are bound."""
    widest: dict[Axis, int] = {}
    for loop in program.loops():
        widest[loop.axis] = max(loop.tile, widest.get(loop.axis, 1))
    return Blocks(program.lane, program.width, widest, {g.axis: 1 for g in program.grid})


def step_along(offset: Expr, axis: Axis) -> Expr | None:
    """The distance in memory between neighbours along an axis; None if it is not one number for all of them."""
    leaf = next((x for x in axes_of(offset) if x.value == axis), None)
    return index.ZERO if leaf is None else index.coefficient(offset, leaf)
