"""Several classes as one: of a class r in place of a and b, a is the quotient and b the rest by the extent of b."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.expr import Axis, Expr, axis, make, substitute, transform
from tilewright.ir.form import Form, Item
from tilewright.ir.sizes import dims


def fuse(form: Form, classes: Sequence[Axis]) -> Form:
    """`form` with one class, in place of the first, for `classes`, outermost first. What has one of them has all, in
    its result or in its sum."""
    number = 1 + max(int(a.name[1:]) for a in form.classes())
    fused = Axis(f"c{number}", dims.prod(a.extent for a in classes))
    inner = {a: dims.prod(b.extent for b in classes[n + 1 :]) for n, a in enumerate(classes)}
    table = {axis(a): dims.floordiv(axis(fused), step) for a, step in inner.items()}
    table |= {axis(a): dims.mod(table[axis(a)], a.extent) for a in classes[1:]}
    places = {i.id: i.kept for i in form.items if i.is_fold and classes[0] in i.kept}

    def group(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(fused if a == classes[0] else a for a in axes if a not in classes[1:])

    def visit(x: Expr) -> Expr | None:
        if x.op != "value" or not isinstance(x.value, tuple) or x.value[0] not in places:
            return None
        found = dict(zip(places[x.value[0]], (transform(a, visit) for a in x.args), strict=True))
        whole = dims.add(*(dims.mul(found[a], inner[a]) for a in classes))
        args = [whole if a == fused else found[a] for a in group(places[x.value[0]])]
        return make("value", tuple(args), x.dtype, x.value)

    def changed(i: Item) -> Item:
        body = tuple(substitute(transform(b, visit), table) for b in i.body)
        offset = substitute(i.offset, table)
        return replace(i, kept=group(i.kept), reduce=group(i.reduce), body=body, offset=offset)

    return replace(form, items=tuple(map(changed, form.items)))
