"""Sums whose length is no power of two in parts that are.

Blocks have lengths of powers of two: 576 products for a score take a block of 1024 of them, 192 one of 256. Where a sum
is held whole beside what follows it, its class becomes several, the largest power of two first:

    s[i, j] = sum over d < 576 of q(i, d) k(j, d)
            = sum over d < 512 of q(i, d) k(j, d)  +  sum over d < 64 of q(i, 512 + d) k(j, 512 + d)

Which sums are taken apart follows from the form alone, so that all kernels that compute a score round it alike.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from tilewright.analysis.contraction import product_sides
from tilewright.ir.expr import Axis, Expr, axis, call, make, slot, substitute, transform
from tilewright.ir.form import Form, Item, folds_read
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.rounding import next_power_of_two
from tilewright.tuning.thresholds import CONTRACTION, FORMS


def in_part_sums(form: Form) -> Form:
    """`form` with such sums in parts; itself where there are none."""
    found = {a: parts for a in form.classes() if (parts := _parts(form, a))}
    if not found:
        return form
    age = 1 + max(int(a.name[1:]) for a in form.classes())
    pieces: dict[Axis, list[tuple[Axis, int]]] = {}
    for a, parts in found.items():
        pieces[a] = []
        for begin, length in parts:
            pieces[a].append((Axis(f"c{age}", dims.integer(length)), begin))
            age += 1
    items = list(form.items)
    numbers: dict[int, list[int]] = {}
    for i in form.items:
        if i.is_fold and i.reduce and i.reduce[0] in pieces:
            made = [_part(i, part, begin) for part, begin in pieces[i.reduce[0]]]
            numbers[i.id] = [i.id, *range(len(items), len(items) + len(made) - 1)]
            items[i.id], items[len(items) :] = made[0], made[1:]

    def visit(x: Expr) -> Expr | None:
        if x.op != "value" or not isinstance(x.value, tuple) or x.value[0] not in numbers:
            return None
        args = tuple(transform(a, visit) for a in x.args)
        terms = [make("value", args, x.dtype, (n, 0)) for n in numbers[x.value[0]]]
        return reduce(lambda p, q: call("add", p, q), terms)

    memo: dict[Expr, Expr] = {}
    return replace(
        form,
        items=tuple(
            replace(i, id=n, body=tuple(transform(b, visit, memo) for b in i.body))
            for n, i in enumerate(items)
        ),
    )


def _part(i: Item, part: Axis, begin: int) -> Item:
    """The sum over a part of its class that begins there."""
    place = dims.add(axis(part), dims.integer(begin))
    table = {axis(i.reduce[0]): place}
    return replace(i, reduce=(part,), body=tuple(substitute(b, table) for b in i.body))


def _parts(form: Form, a: Axis) -> list[tuple[int, int]]:
    """Where the parts of a class begin, and how long they are; none where it stays whole."""
    length = dims.static(a.extent)
    if length is None or not CONTRACTION.min_block_side < length <= FORMS.max_part_sum_elements:
        return []
    using = [i for i in form.items if a in i.axes]
    read = {f for i in form.folds.values() for f in folds_read(i.roots)}
    if not using or not all(_is_score(i, a) and i.id in read for i in using):
        return []
    found: list[tuple[int, int]] = []
    begin = 0
    while begin < length and len(found) < FORMS.max_sum_parts:
        rest = length - begin
        whole = next_power_of_two(rest)
        if whole != rest and len(found) < FORMS.max_sum_parts - 1 and rest > CONTRACTION.min_block_side:
            whole //= 2
        found.append((begin, min(whole, rest)))
        begin += whole
    return found if len(found) > 1 else []


def _is_score(i: Item, a: Axis) -> bool:
    """Whether an item is a plain sum of products over `a` alone, one operand of which keeps what the other does not."""
    r = i.reduction
    if r is None or i.reduce != (a,) or i.scan is not None or len(i.body) != 1 or product_sides(i) is None:
        return False
    return r.combiner == "add" and len(r.state) == 1 and r.finish == (slot("a", 0, r.state[0]),)
