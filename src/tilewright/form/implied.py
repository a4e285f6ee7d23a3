"""Conditions that are implied: they tell loops where to run, and kernels test none of them (see `ir.expr.implied`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from tilewright.ir.dtype import bool_
from tilewright.ir.expr import Axis, Expr, axes_of, axis, const, transform, walk
from tilewright.ir.form import Form, Item
from tilewright.ir.sizes import dims


def drop_implied(form: Form) -> Form:
    """The form without conditions that are implied."""
    items = [_unhinted(i) for i in form.items]
    return (
        form
        if all(a is b for a, b in zip(items, form.items, strict=True))
        else replace(form, items=tuple(items))
    )


def _unhinted(item: Item) -> Item:
    if not any(x.op == "implied" for r in item.body for x in walk(r)):
        return item
    return replace(item, body=tuple(transform(r, _taken) for r in item.body))


def _taken(e: Expr) -> Expr | None:
    return const(True, bool_) if e.op == "implied" else None


def list_of(hint: Expr) -> Expr | None:
    """The read of the list of tiles that comes with an implied condition, if one does."""
    return hint.args[1] if hint.op == "implied" and len(hint.args) > 1 else None


def by_lists(form: Form) -> tuple[tuple[tuple[int, ...], Expr], ...]:
    """Lists that come with a form: the places of the folds that they serve, and how many numbers each has."""
    found: dict[Expr, dict[int, None]] = {}
    for i in form.folds.values():
        for x in (x for r in i.body for x in walk(r)):
            tiles = list_of(x)
            if tiles is not None and i.source >= 0 and any(axis(a) in axes_of(tiles) for a in i.reduce):
                found.setdefault(tiles, {})[i.source] = None
    sizes = {t: form.sizes[t.value] for t in found if isinstance(t.value, int)}
    return tuple((tuple(found[t]), size) for t, size in sizes.items())


def listed_tiles(form: Form) -> Mapping[Axis, int]:
    """Classes of which lists name tiles, or have blocks of rows, with their lengths: shorter tiles that divide them can
    use the lists too, others cannot."""
    found: dict[Axis, int] = {}
    lists = {y for i in form.items for r in i.body for x in walk(r) if (y := list_of(x)) is not None}
    for x in (x for y in lists for x in walk(y) if x.op == "floordiv"):
        a, length = x.args[0].value, dims.static(x.args[1])
        if isinstance(a, Axis) and length is not None:
            found[a] = math.gcd(found.get(a, 0), length)
    return found
