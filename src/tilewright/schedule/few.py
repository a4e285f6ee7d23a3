"""Blocks of kernels whose products have few rows that no matrix unit takes: products are multiplied out and summed.

A product of blocks pads its rows and sums each of its elements as one chain. Where every element of the matrix serves only
a few rows, memory is waited for in any case; summed products (a block of rows x steps x depth, folded like any other)
waste nothing and add as a tree, as a library's products of a matrix and a vector do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..ir import dims
from ..ir.expr import Axis, Expr, axes_of
from ..target import Target
from ..tile.sizes import estimate
from .contract import factors, stored_half
from .dots import WHOLE, Blocks
from .form import Form, Item

FEW = 8
"""Rows up to which products are summed: more of them are worth the padding to what products of blocks take."""

ELEMENTS = 1 << 13
"""Elements of a block of products: 64 for each thread."""

MATRIX = 1 << 12
"""Elements of a block of a matrix."""

LEAST = 4
"""Steps of a block at least: shorter ones wait too often."""

WARPS, STAGES = 4, 3


def summed_blocks(
    form: Form, grid: Sequence[Axis], inner: Sequence[Axis], most: Mapping[Axis, int], target: Target
) -> Blocks | None:
    """Blocks for a form with products of a few rows, one of which folds what another one keeps; None for others. `most`
    are bounds of extents."""
    made = {i: m for i in form.folds.values() if (m := _matrix(i)) is not None}
    passed = {a for i in made for a in i.reduce} & {a for i in made for a in i.kept if a in inner}
    units = {u.operand for u in target.matrix_units}
    if len(passed) != 1 or any(_taken(i, form, units) for i in made):
        return None
    rows = {a for i, m in made.items() for a in i.kept if a not in m and a.extent is not dims.ONE}
    wide = [a for a in inner if a not in passed]
    sizes = {a: n for a in (*rows, *wide) if (n := most.get(a, dims.static(a.extent))) is not None}
    if not rows <= set(grid) or len(sizes) < len(rows) + len(wide):
        return None
    tiles = dict.fromkeys((*grid, *inner), 1) | {a: 1 << (n - 1).bit_length() for a, n in sizes.items()}
    held, depth = math.prod(tiles[a] for a in rows), max((tiles[a] for a in wide), default=1)
    if held > FEW or depth > WHOLE:
        return None
    step = min(ELEMENTS // (held * depth), MATRIX // depth)
    if step < LEAST:
        return None
    return Blocks(tiles | dict.fromkeys(passed, step), WARPS, STAGES)


def _matrix(item: Item) -> set[Axis] | None:
    """The classes of the largest factor of a sum of products, all of which use what is folded."""
    if item.reduction is None or item.reduction.combiner != "add" or item.scan is not None:
        return None
    found = factors(item.body[0])
    used = [_classes(f) for f in found]
    if len(found) < 2 or not item.reduce or any(not u >= set(item.reduce) for u in used):
        return None
    return max(used, key=lambda u: estimate(dims.prod(a.extent for a in u)))


def _classes(e: Expr) -> set[Axis]:
    return {a.value for a in axes_of(e) if isinstance(a.value, Axis)}


def _taken(item: Item, form: Form, units: set[str]) -> bool:
    """Whether matrix units take a factor as it is stored."""
    stored = (stored_half(f, form.params) or f.dtype for f in factors(item.body[0]))
    return any(t.name in units for t in stored)
