"""Classes that are walked backwards: running folds from the end are running folds of turned places.

    r[i, j] = sum over l >= j of x(i, l)      is written       r[i, j] = t[i, n - 1 - j]
                                                               t[i, m] = sum over l <= m of x(i, n - 1 - l)

What reads t there may count its own class from the end as well, and then reads it at its own place: the order in which
other folds take their elements is free. So do the folds that are then read at turned places only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilewright.ir.expr import Axis, Expr, axis, make, substitute, transform, walk
from tilewright.ir.form import Form, Item
from tilewright.ir.sizes import dims


def turn_around(form: Form) -> Form:
    """`form` with classes turned so that running folds are read at their own places; itself where none is read at a
    turned one, or where no order serves all that reads it."""
    turned = form
    for i in form.items:
        found = {a for x in _values(i) for a in _turned_axes(form, x, i)}
        if not found:
            continue
        if any(a == i.scan for a in found):
            return form
        for a in found:
            turned = _with_turned(turned, i.id, a)
    if turned is form or any(_turned_axes(turned, x, i) for i in turned.items for x in _values(i)):
        return form
    return _follow(turned)


def _follow(form: Form) -> Form:
    """`form` with those folds turned that are only read at turned places."""
    for f in form.folds.values():
        for a in f.kept:
            at = f.kept.index(a)
            reads = [(x, i) for i in form.items for x in _values(i) if _fold_of(x) == f.id]
            if a != f.scan and reads and all(_turned(x.args[at], a, i) is not None for x, i in reads):
                form = _with_turned(form, f.id, a)
    return form


def _with_turned(form: Form, number: int, a: Axis) -> Form:
    """`form` where an item counts a class of its own from the end."""
    own = form.items[number]

    def elsewhere(x: Expr) -> Expr | None:
        if _fold_of(x) != number or a not in own.kept:
            return None
        at = own.kept.index(a)
        args = [transform(y, elsewhere) for y in x.args]
        return make("value", (*args[:at], _end_less(args[at], a), *args[at + 1 :]), x.dtype, x.value)

    table = {axis(a): _end_less(axis(a), a)}
    put: Callable[[Expr], Expr] = lambda e: substitute(e, table)  # noqa: E731
    items = [replace(i, body=tuple(transform(b, elsewhere) for b in i.body)) for i in form.items]
    items[number] = replace(items[number], body=tuple(map(put, items[number].body)), offset=put(own.offset))
    return replace(form, items=tuple(items))


def _turned_axes(form: Form, x: Expr, reader: Item) -> list[Axis]:
    """The axes of `reader` at whose turned places it reads the running class of a fold."""
    assert isinstance(x.value, tuple)
    fold = form.items[x.value[0]]
    pairs = zip(fold.kept, x.args, strict=True)
    return [b for a, arg in pairs if a == fold.scan and (b := _turned(arg, a, reader)) is not None]


def _turned(arg: Expr, a: Axis, reader: Item) -> Axis | None:
    """The axis of `reader` of which a place of class `a` is counted from the end."""
    rest = dims.sub(dims.sub(a.extent, dims.ONE), arg)
    b = rest.value
    return (
        b if rest.op == "axis" and isinstance(b, Axis) and b in reader.axes and b.extent is a.extent else None
    )


def _end_less(place: Expr, a: Axis) -> Expr:
    return dims.sub(dims.sub(a.extent, dims.ONE), place)


def _fold_of(x: Expr) -> int:
    return x.value[0] if x.op == "value" and isinstance(x.value, tuple) else -1


def _values(i: Item) -> list[Expr]:
    return list(dict.fromkeys(x for b in i.body for x in walk(b) if x.op == "value"))
