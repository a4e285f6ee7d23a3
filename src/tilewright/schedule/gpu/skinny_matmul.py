"""Blocks of kernels whose products have few rows that no matrix unit takes: products are multiplied out and summed.

A product of blocks pads its rows and sums each element as one chain. Where an element of the matrix serves only
a few rows, memory is waited for in any case; summed products (a block of rows x steps x depth, folded like any other)
waste nothing and add as a tree, as a library's products of a matrix and a vector do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from tilewright.analysis.contraction import factors, product_sides, stored
from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.expr import Axis, walk
from tilewright.ir.form import Form, Item, folds_read
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.rounding import next_power_of_two
from tilewright.target import Target
from tilewright.tuning.thresholds import GPU_BLOCKS, GPU_MATMUL, SKINNY_MATMUL

from .block_memory import ProductBlocks, classes_of


def summed_blocks(
    form: Form,
    grid: Sequence[Axis],
    inner: Sequence[Axis],
    most: Mapping[Axis, int],
    target: Target,
    hints: SizeHints,
) -> ProductBlocks | None:
    """Blocks for a form with products of a few rows whose results other folds read; None for others. `most` are bounds
    of extents."""
    made = {i: m for i in form.folds.values() if (m := _matrix(i, hints)) is not None}
    walked = _walked(form, made, inner)
    units = {u.operand for u in target.matrix_units}
    if walked is None or any(_taken(i, form, units) for i in made):
        return None
    rows = {a for i, m in made.items() for a in i.kept if a not in m and a.extent is not dims.ONE}
    wide = {a for a in inner if a not in rows and a is not walked}
    sizes = {a: n for a in (*rows, *wide) if (n := most.get(a, dims.static(a.extent))) is not None}
    if walked in rows or len(sizes) < len(rows) + len(wide):
        return None
    tiles = dict.fromkeys((*grid, *inner), 1) | {a: next_power_of_two(n) for a, n in sizes.items()}
    blocks = [SKINNY_MATMUL.block_product_elements // _volume(tiles, i.axes) for i in form.items]
    step = min(*blocks, *(SKINNY_MATMUL.block_matrix_elements // _volume(tiles, m) for m in made.values()))
    if (
        _volume(tiles, rows) > SKINNY_MATMUL.max_rows
        or any(tiles[a] > GPU_MATMUL.max_untiled_extent for a in wide)
        or step < SKINNY_MATMUL.min_step_elements
    ):
        return None
    return ProductBlocks(
        tiles | {walked: step}, GPU_BLOCKS.usual_warps, GPU_BLOCKS.usual_stages if walked in inner else 1
    )


def open_rows(form: Form, grid: Sequence[Axis], inner: Sequence[Axis]) -> tuple[Axis, int] | None:
    """The class of unknown extent among the rows of products, and how many rows there are for each element of it; None
    if there is none, or not one. Another fold walks what stands against them, or, where none of products does, them."""
    found = [s for i in form.folds.values() if (s := product_sides(i)) is not None]
    passed = {a for *_, folded in found for a in folded} & {a for s in found for side in s[:2] for a in side}
    where = set(grid) if passed & set(inner) else set(inner) - {a for *_, folded in found for a in folded}
    rows = {a for s in found for side in s[:2] if set(side) & where for a in side}
    open_ = [a for a in rows if a.extent.op == "symbol"]
    beside = [dims.static(a.extent) for a in rows if a not in open_]
    if len(open_) != 1 or None in beside:
        return None
    return open_[0], math.prod(n or 1 for n in beside)


def _walked(form: Form, made: Mapping[Item, set[Axis]], inner: Sequence[Axis]) -> Axis | None:
    """The long class of the matrices: what one product keeps and another one folds; of a single product that another
    fold reads, what its matrix alone has."""
    found = {a for i in made for a in i.reduce} & {a for i in made for a in i.kept if a in inner}
    if not found and len(made) == 1:
        ((item, matrix),) = made.items()
        others = [u for f in factors(item.body[0]) if (u := classes_of(f)) != matrix]
        read = any(item.id in folds_read(i.roots) for i in form.folds.values())
        found = {a for a in item.kept if read and a in matrix and all(a not in u for u in others)}
    return next(iter(found)) if len(found) == 1 else None


def _matrix(item: Item, hints: SizeHints) -> set[Axis] | None:
    """The classes of the largest factor of a sum of products, of which two or more use what is folded, if it is made of
    memory alone."""
    if item.reduction is None or item.reduction.combiner != "add" or item.scan is not None or not item.reduce:
        return None
    found = [f for f in factors(item.body[0]) if classes_of(f) >= set(item.reduce)]
    if len(found) < 2:
        return None
    largest = max(found, key=lambda f: hints.estimate(dims.prod(a.extent for a in classes_of(f))))
    return None if any(x.op == "value" for x in walk(largest)) else classes_of(largest)


def _volume(tiles: Mapping[Axis, int], axes: Iterable[Axis]) -> int:
    return math.prod(tiles[a] for a in axes)


def _taken(item: Item, form: Form, units: set[str]) -> bool:
    """Whether matrix units take a factor as it is stored."""
    types = (stored(f, form.params) or f.dtype for f in factors(item.body[0]))
    return any(t.name in units for t in types)
