"""All classes on one side of the products of a form as one: a convolution becomes a product of matrices.

Rows are then the places of all images, sums run over all taps and channels. What is read stays where it was, and a
border is a condition on quotients and rests, which cut no loop. Rows lie in the order of the result in memory; sums in
that order in which an operand is read along memory for longest, so that threads read whole lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tilewright.analysis.contraction import product_sides
from tilewright.analysis.loop_classes import terms_of
from tilewright.ir.expr import Axis, Expr, axes_of, axis
from tilewright.ir.form import Form, are_at_own_place
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import FORMS

from .fuse import fuse


class Sides(NamedTuple):
    """The classes of a form's products: of one operand alone, of the other one alone, and of both, summed over."""

    left: tuple[Axis, ...]
    right: tuple[Axis, ...]
    folded: tuple[Axis, ...]


def merge_sides(form: Form) -> Form:
    """`form` with one class for each side of its products; itself if it has others than products, products with
    different sides, or sizes inside of a side that are not known."""
    sides = sides_of(form)
    if sides is None:
        return form
    orders = [_stored(form, sides.left), _stored(form, sides.right), _read_along_memory(form, sides.folded)]
    if any(order is None for order in orders):
        return form
    for order in orders:
        if order is not None and len(order) > 1:
            form = fuse(form, order)
    return form


def sides_of(form: Form) -> Sides | None:
    """The sides that all folds of a form have in common, as sums of products whose results are read at their own
    place; None if they have none."""
    found = [product_sides(i) for i in form.folds.values()]
    if not found or found[0] is None:
        return None
    left, right, folded = map(tuple, found[0])
    for item, sides in zip(form.folds.values(), found, strict=True):
        if sides is None or {frozenset(s) for s in sides[:2]} != {frozenset(left), frozenset(right)}:
            return None
        if not set(item.reduce) == set(sides[2]) == set(folded):
            return None
    kept = {*left, *right}
    plain = all(kept <= set(i.kept) and i.scan is None for i in form.items) and are_at_own_place(form)
    return Sides(left, right, folded) if plain else None


def _stored(form: Form, side: Sequence[Axis]) -> tuple[Axis, ...] | None:
    """Classes of rows, or of columns, in the order in which the first output has them in memory."""
    return _in_order(form.outputs[0].offset, side)


def _read_along_memory(form: Form, folded: Sequence[Axis]) -> tuple[Axis, ...] | None:
    """Classes of sums in the order of an operand in memory, in which most is read along it: of both operands as much as
    a line holds, times what a block has of rows."""
    offsets = list(dict.fromkeys(offset for i in form.folds.values() for _, offset in i.accesses()))
    orders = [order for offset in offsets if (order := _in_order(offset, folded)) is not None]

    def along_memory(order: tuple[Axis, ...]) -> int:
        return sum(
            min(_run(offset, order), FORMS.max_line_elements) * _rows(offset, folded) for offset in offsets
        )

    return max(orders, key=along_memory, default=None)


def _rows(offset: Expr, folded: Sequence[Axis]) -> int:
    """Rows of an operand, no more than a block has."""
    kept = [x.value for x in axes_of(offset) if isinstance(x.value, Axis) and x.value not in folded]
    extents = [dims.static(a.extent) for a in kept]
    known = [n for n in extents if n is not None]
    return min(math.prod(known), FORMS.max_block_rows) if len(known) == len(extents) else FORMS.max_block_rows


def _run(offset: Expr, order: Sequence[Axis]) -> int:
    """Elements that lie side by side where the classes of `order` are walked, the last one first."""
    terms, together = terms_of(offset), 1
    for a in reversed(order):
        if dims.static(terms.get(a, dims.ZERO)) != together:
            break
        together *= dims.static(a.extent) or 1
    return together


def _in_order(offset: Expr, side: Sequence[Axis]) -> tuple[Axis, ...] | None:
    """Classes by their steps in memory, the longest first; None if steps, or sizes inside of others, are not known."""
    steps = dict(_steps(offset, side))
    if len(steps) < len(side):
        return None
    order = sorted(side, key=lambda a: -abs(steps[a]))
    return tuple(order) if all(dims.static(a.extent) is not None for a in order[1:]) else None


def _steps(offset: Expr, side: Sequence[Axis]) -> Iterator[tuple[Axis, int]]:
    for a in side:
        step = dims.coefficient(offset, axis(a))
        known = None if step is None else dims.static(step)
        if known is not None:
            yield a, known
