"""Products of a matrix and a vector as products of two matrices, one of which has a single row.

Matrix units take no vectors. A class of one element beside those that a fold keeps is the missing row: padded to the
smallest block, all but its first lane masked. What that wastes are flops; the matrix is read once either way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from tilewright.analysis.contraction import factors, stored
from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.expr import Axis, Expr, axes_of, axis, make, transform, walk
from tilewright.ir.form import Form, Item
from tilewright.ir.graph import Value
from tilewright.ir.sizes import dims
from tilewright.target import Target
from tilewright.tuning.thresholds import CONTRACTION


def with_unit_row(form: Form, target: Target, hints: SizeHints) -> Form:
    """`form` with a class of one element in every item, the row of what stood for vectors. It is `form` itself if no
    product of what matrix units take with a vector follows another fold: one alone only waits for memory."""
    units = {u.operand for u in target.matrix_units}
    found = [f for i in form.folds.values() if (f := _vector(i, form.params, units, hints)) is not None]
    vectors = {x for f in found for x in walk(f) if x.op == "read"}
    follows = any(x.op == "value" for f in found for x in walk(f))
    if not vectors or not follows or any(i.scan is not None for i in form.items):
        return form
    row = Axis(f"c{1 + max(int(a.name[1:]) for a in form.classes())}", dims.ONE)

    def visit(x: Expr) -> Expr | None:
        if x.op == "value":
            return make("value", (*(transform(a, visit) for a in x.args), axis(row)), x.dtype, x.value)
        if x in vectors and isinstance(x.value, int):
            place = dims.add(x.args[0], dims.mul(axis(row), form.sizes[x.value]))
            return make("read", (place,), x.dtype, x.value)
        return None

    def changed(i: Item) -> Item:
        offset = i.offset if i.is_fold else dims.add(i.offset, dims.mul(axis(row), form.sizes[i.param]))
        body = tuple(transform(b, visit) for b in i.body)
        return replace(i, kept=(*i.kept, row), body=body, offset=offset)

    return replace(form, items=tuple(map(changed, form.items)))


def _vector(item: Item, params: Sequence[Value], units: Collection[str], hints: SizeHints) -> Expr | None:
    """The factor of a sum of two that uses only a part of what the other one keeps, which is read from memory;
    none of a short sum, which needs no matrix unit."""
    if item.reduction is None or item.reduction.combiner != "add" or item.scan is not None:
        return None
    if hints.estimate(dims.prod(a.extent for a in item.reduce)) <= CONTRACTION.min_block_side:
        return None
    sides = factors(item.body[0])
    used = [axes_of(f) & {axis(a) for a in item.kept} for f in sides]
    if len(sides) != 2 or any(not axes_of(f) & {axis(a) for a in item.reduce} for f in sides):
        return None
    for k, f in enumerate(sides):
        matrix = stored(sides[1 - k], params)
        if used[k] < used[1 - k] and matrix is not None and matrix.name in units:
            return f
    return None
