"""Short sums written out: a window whose taps a block of threads reads one after the other, without a loop.

    r[c, w] = sum over k < 3 of x(c, w + k) y(c, k)  =  x(c, w) y(c, 0) + x(c, w + 1) y(c, 1) + x(c, w + 2) y(c, 2)

Neighbouring windows share what they read. Where several of them are results of one thread, each element is read once:
of a class w, `unroll_sums` makes q, with w = q T + t, and an output for each t.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.contraction import product_sides
from tilewright.ir.expr import Axis, Expr, axis, call, integer, make, slot, substitute, transform, walk
from tilewright.ir.form import Form, Item, are_at_own_place, folds_read
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import FORMS

from .classes import drop_dead

UNROLL = "unroll_sums"
"""The step of a form that writes its windows out."""


def is_window(item: Item, form: Form) -> bool:
    """Whether a fold is a short sum of products of halves that no matrix unit takes, such as that of a depthwise
    convolution. (Sums of singles may be taken in doubles, see `wide_sums`.)"""
    reduction = item.reduction
    if reduction is None or reduction.combiner != "add" or item.scan is not None or len(item.body) != 1:
        return False
    products = any(x.op == "mul" and x.dtype.is_float for x in walk(item.body[0]))
    plain = reduction.lift == (slot("e", 0, item.body[0].dtype),) and reduction.finish == (
        slot("a", 0, reduction.state[0]),
    )
    halves = all(form.params[param].dtype.is_half for param, _ in item.accesses())
    short = plain and halves and 0 < taps_of(item) <= FORMS.max_unrolled_taps
    return short and products and not folds_read(item.body) and product_sides(item) is None


def unroll_sums(form: Form, numbers: Mapping[Axis, int]) -> Form:
    """`form` with its short sums written out, of larger windows line by line, or all lines, where `numbers` has how
    many these are; and as many results of other classes side by side as it gives. A window in one class is one line.
    The form as it is where other folds are left, or such numbers do not divide extents."""
    if (
        not form.folds
        or not all(is_window(i, form) for i in form.folds.values())
        or not are_at_own_place(form)
    ):
        return form
    if any(dims.exact_div(a.extent, dims.integer(n)) is None for a, n in numbers.items()):
        return form
    whole = {
        i.id: _written(i, i.reduce)
        for i in form.folds.values()
        if taps_of(i) <= FORMS.max_taps_at_once
        or all(numbers.get(a) == dims.static(a.extent) for a in i.reduce[:-1])
    }
    side_by_side = {a: n for a, n in numbers.items() if all(a not in i.reduce for i in form.folds.values())}

    def visit(x: Expr) -> Expr | None:
        return whole.get(x.value[0]) if x.op == "value" and isinstance(x.value, tuple) else None

    memo: dict[Expr, Expr] = {}
    items = tuple(
        replace(i, reduce=i.reduce[:-1], body=(_written(i, i.reduce[-1:]),))
        if i.is_fold
        else replace(i, body=tuple(transform(b, visit, memo) for b in i.body))
        for i in form.items
    )
    made = drop_dead(replace(form, items=items))
    fresh = 1 + max(int(a.name[1:]) for a in form.classes())
    for k, (a, n) in enumerate(side_by_side.items()):
        outer = Axis(f"c{fresh + k}", dims.floordiv(a.extent, dims.integer(n)))
        made = _side_by_side(made, a, outer, n) if n > 1 else made
    return made


def taps_of(item: Item) -> int:
    """Elements of a sum."""
    return dims.static(dims.prod(a.extent for a in item.reduce)) or 0


def _written(item: Item, over: Sequence[Axis]) -> Expr:
    """The sum of the elements of a fold over some classes as one expression, in order."""
    total: Expr | None = None
    for places in itertools.product(*(range(dims.static(a.extent) or 0) for a in over)):
        term = substitute(item.body[0], {axis(a): integer(n) for a, n in zip(over, places, strict=True)})
        total = term if total is None else call("add", total, term)
    assert total is not None
    return total


def _side_by_side(form: Form, a: Axis, outer: Axis, count: int) -> Form:
    """a = outer * count + n, with an item for each n."""
    copies = [i for i in form.items for _ in range(count if a in i.kept else 1)]
    first = {i.id: k for k, i in reversed(list(enumerate(copies)))}

    def copied(i: Item, k: int) -> Item:
        n = k - first[i.id]
        table = {axis(a): dims.add(dims.mul(axis(outer), dims.integer(count)), dims.integer(n))}

        def visit(x: Expr) -> Expr | None:
            if x.op != "value" or not isinstance(x.value, tuple):
                return None
            fold = form.items[x.value[0]]
            own = first[fold.id] + (n if a in fold.kept else 0)
            args = tuple(axis(outer) if y is axis(a) else y for y in x.args)
            return make("value", args, x.dtype, (own, x.value[1]))

        body = tuple(substitute(transform(b, visit), table) for b in i.body)
        kept = tuple(outer if x == a else x for x in i.kept)
        return replace(i, id=k, kept=kept, body=body, offset=substitute(i.offset, table))

    return replace(form, items=tuple(copied(i, k) for k, i in enumerate(copies)))
