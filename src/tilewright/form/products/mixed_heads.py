"""Heads that are mixed between products: scores of all heads of a block side by side, and each mixture written out.

    s'[g, i, j] = sum over h of w(g, h) s[h, i, j]         s[h, i, j] = sum over d of q(h, i, d) k(h, j, d)

As a loop over h the mixture would need all scores of a block in memory. There are few heads, so each gets a product of
its own, whose block stays in registers, and s' is a sum of terms of these:

    s'_0 = w(0, 0) s_0 + w(0, 1) s_1 + ..          s'_1 = w(1, 0) s_0 + ..

So a mixture is computed once for all that reads it, and what follows (a softmax, a second mixture, products with
values) is written out for each head, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce

from tilewright.analysis.contraction import factors, product_sides
from tilewright.form.classes import drop_dead
from tilewright.ir.expr import (
    Axis,
    Expr,
    axes_of,
    axis,
    call,
    integer,
    make,
    slot,
    substitute,
    transform,
    walk,
)
from tilewright.ir.form import Form, Item, folds_read
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import FORMS


def write_out_mixtures(form: Form) -> Form:
    """`form` with its mixtures, and the classes that these mix, written out; itself where there is none, or where
    such a class is walked in order, or summed over beside others."""
    mixtures = {i.id: i for i in form.folds.values() if _is_mixture(i, form)}
    written = {a for i in mixtures.values() for a in (*i.reduce, *_mixed_to(i))}
    sizes = {a: dims.static(a.extent) or 0 for a in form.classes() if a in written}
    if not written:
        return form
    rest = [i for i in form.items if i.id not in mixtures]
    if any(i.scan in written or set(i.reduce) & written for i in rest):
        return form
    made = _inlined(form, mixtures)
    for a, n in sizes.items():
        copied = _written(made, a, n)
        if copied is None:
            return form
        made = copied
    return drop_dead(made)


def _is_mixture(i: Item, form: Form) -> bool:
    """Whether a fold is a plain sum, over a class of few values, of what is made of products of matrices."""
    r = i.reduction
    if r is None or len(i.reduce) != 1 or i.scan is not None or len(i.body) != 1 or r.combiner != "add":
        return False
    if r.lift != (slot("e", 0, i.body[0].dtype),) or r.finish != (slot("a", 0, r.state[0]),):
        return False
    values = [x for x in walk(i.body[0]) if x.op == "value" and axis(i.reduce[0]) in x.args]
    mixed = [x.value[0] for x in values if isinstance(x.value, tuple)]
    classes = (*i.reduce, *_mixed_to(i))
    few = all(1 < (dims.static(a.extent) or 0) <= FORMS.max_mixed_heads for a in classes)
    return few and len(classes) > 1 and any(_comes_of_product(form, f) for f in mixed)


def _comes_of_product(form: Form, fold: int) -> bool:
    seen: set[int] = set()
    todo = [fold]
    while todo:
        f = todo.pop()
        if f not in seen:
            seen.add(f)
            if product_sides(form.items[f]) is not None and not folds_read(form.items[f].roots):
                return True
            todo += folds_read(form.items[f].roots)
    return False


def _mixed_to(i: Item) -> tuple[Axis, ...]:
    """The classes of the results of a mixture that what it mixes lacks."""
    args = [x.args for x in walk(i.body[0]) if x.op == "value"]
    return tuple(a for a in i.kept if not any(axis(a) in x for x in args))


def _inlined(form: Form, mixtures: Mapping[int, Item]) -> Form:
    """`form` with sums of terms where results of mixtures were read; nothing reads their folds any more."""
    memo: dict[Expr, Expr] = {}

    def visit(x: Expr) -> Expr | None:
        if x.op != "value" or not isinstance(x.value, tuple) or x.value[0] not in mixtures:
            return None
        i = mixtures[x.value[0]]
        body = _numbers_first(transform(i.body[0], visit, memo), i)
        here = {axis(a): y for a, y in zip(i.kept, x.args, strict=True) if y is not axis(a)}
        count = dims.static(i.reduce[0].extent) or 0
        terms = [substitute(body, {**here, axis(i.reduce[0]): integer(n)}) for n in range(count)]
        return reduce(lambda p, q: call("add", p, q), terms)

    return replace(
        form,
        items=tuple(replace(i, body=tuple(transform(b, visit, memo) for b in i.body)) for i in form.items),
    )


def _numbers_first(term: Expr, i: Item) -> Expr:
    """A product with the factors together that are one number for a block."""
    classes = {axis(a) for a in i.kept if a not in _mixed_to(i)}
    numbers = [f for f in factors(term) if not classes & set(axes_of(f))]
    blocks = [f for f in factors(term) if f not in numbers]
    groups = [reduce(lambda p, q: call("mul", p, q), g) for g in (numbers, blocks) if g]
    return reduce(lambda p, q: call("mul", p, q), groups)


def _written(form: Form, a: Axis, count: int) -> Form | None:
    """An item for each of the values of a class; None where a result is read at a place that is no number then."""
    alive = _alive(form)
    copies = [(i, n) for i in alive for n in range(count if a in i.kept else 1)]
    number = {(i.id, n): k for k, (i, n) in enumerate(copies)}
    stray: list[Expr] = []

    def copied(i: Item, n: int) -> Item:
        def visit(x: Expr) -> Expr | None:
            if x.op != "value" or not isinstance(x.value, tuple):
                return None
            args, own = list(x.args), 0
            kept = form.items[x.value[0]].kept
            if a in kept:
                at = args.pop(kept.index(a))
                own = (
                    at.value if at.op == "const" and isinstance(at.value, int) else n if at is axis(a) else -1
                )
                stray.extend([x] if own < 0 or (at is axis(a) and a not in i.kept) else [])
            return make("value", tuple(args), x.dtype, (number.get((x.value[0], own), 0), x.value[1]))

        table = {axis(a): integer(n)}
        body = tuple(substitute(transform(b, visit), table) for b in i.body)
        kept = tuple(x for x in i.kept if x != a)
        return replace(i, id=number[i.id, n], kept=kept, body=body, offset=substitute(i.offset, table))

    items = tuple(copied(i, n) for i, n in copies)
    return None if stray else replace(form, items=items)


def _alive(form: Form) -> list[Item]:
    """The items that outputs need."""
    found: set[int] = set()
    todo = [o.id for o in form.outputs]
    while todo:
        n = todo.pop()
        if n not in found:
            found.add(n)
            todo += folds_read(form.items[n].roots)
    return [i for i in form.items if i.id in found]
