"""Blocks of kernels whose operands lie along memory in different orders, none of them along a wide class.

A shuffle of pixels writes rows of pairs and reads channels of pairs: neither a row nor a square of two classes serves
both. So a block grows along that access whose run in memory is the shortest so far.

    run of an access = elements side by side in memory that a block has of it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.expr import Axis, Expr, axis
from tilewright.ir.form import Form
from tilewright.ir.sizes import dims

from .block_shape import fit_tile


def grow_runs(form: Form, grid: Sequence[Axis], budget: int, hints: SizeHints) -> dict[Axis, int]:
    """Tiles of the classes of a grid that hold at most `budget` elements together."""
    orders = {_in_memory(offset, grid) for item in form.items for _, offset in item.accesses()}
    tiles, held = dict.fromkeys(grid, 1), 1
    open_ = sorted(orders, key=repr)
    while open_:
        shortest = min(open_, key=lambda order: _run(order, tiles))
        a = next((a for a in shortest if fit_tile(a, 2 * tiles[a], hints) > tiles[a]), None)
        if a is None:
            open_.remove(shortest)
        elif 2 * held > budget:
            return tiles
        else:
            tiles[a] *= 2
            held *= 2
    return tiles


def _in_memory(offset: Expr, grid: Sequence[Axis]) -> tuple[Axis, ...]:
    """The classes along which an access runs through memory without gaps, nearest first."""
    steps = {a: fixed_step(offset, a) for a in grid}
    found: list[Axis] = []
    length = 1
    for a in sorted((a for a, n in steps.items() if n), key=lambda a: steps[a]):
        extent = dims.static(a.extent)
        if steps[a] != length:
            break
        found.append(a)
        if extent is None:
            break
        length *= extent
    return tuple(found)


def _run(order: Sequence[Axis], tiles: Mapping[Axis, int]) -> int:
    """Elements side by side of a block."""
    length = 1
    for a in order:
        length *= tiles[a]
        if tiles[a] < (dims.static(a.extent) or tiles[a] + 1):
            break
    return length


def fixed_step(offset: Expr, a: Axis) -> int:
    """From element to element along a class, if that is known; else 0."""
    step = dims.coefficient(offset, axis(a))
    return (dims.static(step) or 0) if step is not None else 0
