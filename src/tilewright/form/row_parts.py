"""Cascades over long rows, part by part: a row that no near cache holds is read once for two folds.

The second fold of a cascade waits for the first, so each takes a pass over the row. Where the state of both together
can be merged, a row is cut into parts p that a near cache holds; both folds run over one part after the other, and the
pairs of the parts are merged (`rewrite.split.merge_laws`):

    mean and spread   s = sum(x), d = sum((x - s/n)^2)
    maximum and sum   m = max(x), d = sum(f(x, m)), where the online law has a rescaling of d
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.analysis.online.cascade import Link, cascade, part_body
from tilewright.ir.expr import Axis, Expr, axis, call, const, is_const, make, substitute, walk
from tilewright.ir.form import Form, Item
from tilewright.ir.sizes import dims
from tilewright.rewrite.split.merge_laws import means_of_parts
from tilewright.target import Target
from tilewright.tuning.thresholds import FORMS

from .classes import drop_dead, split_class
from .companions import links_of


@dataclass(frozen=True, slots=True)
class _Cascade:
    """Fold `second` needs `first` over the same class, as `through` (the expression that `second` reads); `links`
    are both by the online law, None for moments."""

    first: int
    second: int
    through: Expr
    links: tuple[Link, ...] | None


def in_row_parts(form: Form, target: Target) -> Form:
    """`form` with the cascades over one of its long classes part by part; `form` itself where there are none."""
    found = [x for x in (_cascade(form, i) for i in form.folds.values()) if x is not None]
    for c in dict.fromkeys(form.items[x.second].reduce[0] for x in found):
        size = _part(c, target)
        if size is not None and not any(i.scan == c for i in form.items):
            outer = dims.integer((dims.static(c.extent) or 0) // size)
            cut = split_class(form, c, outer, dims.integer(size))
            return drop_dead(_paired(cut, [x for x in found if form.items[x.second].reduce == (c,)]))
    return form


def _part(c: Axis, target: Target) -> int | None:
    """The largest fitting divisor of a long row's length."""
    extent = dims.static(c.extent)
    if extent is None or 4 * extent <= target.core.capacity:
        return None
    sizes = range(min(FORMS.max_part_elements, extent // 4), FORMS.min_part_elements - 1, -1)
    return next((n for n in sizes if extent % n == 0), None)


def _cascade(form: Form, second: Item) -> _Cascade | None:
    """The cascade that ends in `second`, a sum over one class."""
    if second.reduction is None or second.reduction.combiner != "add" or len(second.reduce) != 1:
        return None
    if not second.body[0].dtype.is_float or second.scan is not None:
        return None
    for leaf in [x for x in walk(second.body[0]) if x.op == "value"]:
        first = next(f for f in form.folds.values() if leaf.value == (f.id, 0) or leaf.value == (f.id, 1))
        if first.kept != second.kept or first.reduce != second.reduce or first.scan is not None:
            continue
        links = links_of((first, second))
        extreme = first.reduction is not None and first.reduction.combiner != "add"
        if extreme and links is not None and links[1].law is not None:
            return _Cascade(first.id, second.id, leaf, links)
        mean = _mean(form, first, second)
        if mean is not None:
            return _Cascade(first.id, second.id, mean, None)
    return None


def _mean(form: Form, first: Item, second: Item) -> Expr | None:
    """The mean of `first`'s elements if `second` sums the squares of their distances from it, and nobody needs the sum
    itself."""
    square, count = second.body[0], dims.static(second.reduce[0].extent)
    if first.reduction is None or first.reduction.combiner != "add" or count is None:
        return None
    if square.op != "mul" or square.args[0] is not square.args[1] or square.args[0].op != "sub":
        return None
    x, mean = square.args[0].args
    if x is not first.body[0] or not _divides(mean, count):
        return None
    if mean.args[0].op != "value" or mean.args[0].value != (first.id, 0):
        return None
    roots = [substitute(r, {mean: const(0, mean.dtype)}) for i in form.items for r in i.roots]
    return None if any(y.value == (first.id, 0) for r in roots for y in walk(r) if y.op == "value") else mean


def _divides(mean: Expr, count: int) -> bool:
    """Whether `mean` is something over `count`, or times its inverse where that is exact."""
    if mean.op == "div":
        return is_const(mean.args[1], count)
    return mean.op == "mul" and count & (count - 1) == 0 and is_const(mean.args[1], 1 / count)


def _paired(form: Form, cascades: Sequence[_Cascade]) -> Form:
    """Folds of parts, and the merges of their pairs in the place of the seconds; each first is left to nobody."""
    items = list(form.items)
    table: dict[Expr, Expr] = {}
    parts: dict[int, Expr] = {}
    for x in cascades:
        first, second = form.items[x.first], form.items[x.second]
        p, q = first.reduce
        if x.first not in parts:
            parts[x.first] = _part_of(items, first, first.body, p, q)
        of_part = parts[x.first]
        dtype = of_part.dtype
        if x.links is None:
            count = const(dims.static(q.extent) or 1, dtype)
            near = call("div", of_part, count)
            merge, results = means_of_parts(dtype), (1, 2)
            body = tuple(substitute(b, {x.through: near}) for b in second.body)
            pair = (count, near)
        else:
            merge, results = cascade(x.links), (0, 1)
            body = (part_body(x.links[1], x.links, second.body[0], {x.links[0].leaf: of_part}),)
            pair = (of_part,)
        pair = (*pair, _part_of(items, second, body, p, q))
        items[x.second] = replace(second, reduce=(p,), reduction=merge, body=pair)
        args = tuple(map(axis, second.kept))
        key = x.through
        table.setdefault(key, make("value", args, dtype, (x.second, results[0])))
        table[make("value", args, dtype, (x.second, 0))] = make("value", args, dtype, (x.second, results[1]))
    remaining = {*range(len(form.items), len(items)), *(x.second for x in cascades)}
    return replace(form, items=tuple(i if i.id in remaining else _reading(i, table) for i in items))


def _reading(item: Item, table: Mapping[Expr, Expr]) -> Item:
    return replace(item, body=tuple(substitute(b, table) for b in item.body))


def _part_of(items: list[Item], fold: Item, body: tuple[Expr, ...], p: Axis, q: Axis) -> Expr:
    """Append the fold of each part; its result."""
    kept = (*fold.kept, p)
    items.append(replace(fold, id=len(items), kept=kept, reduce=(q,), body=body))
    return make("value", tuple(map(axis, kept)), body[0].dtype, (len(items) - 1, 0))
