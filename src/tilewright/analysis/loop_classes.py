"""Which axes of a form are one class, and in which axes of them an offset is affine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter

from tilewright.ir.expr import Axis, Expr, axis, leaves, substitute
from tilewright.ir.form import Form
from tilewright.ir.sizes import dims


class Classes:
    """Union-find over axes. A union is refused if extents differ, if one item would hold a class twice, or if two folds
    would then each need the other's loop outside its own (joins are preferences: without it both are legal)."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.parent: dict[Axis, Axis] = {}
        self.members: dict[Axis, set[int]] = {}
        self.inside: dict[Axis, set[Axis]] = {}  # D -> every C, where a fold keeps D and reduces C
        for i in form.items:
            for a in i.axes:
                self.members.setdefault(a, set()).add(i.id)
            for d in i.kept if i.reduce else ():
                self.inside.setdefault(d, set()).update(i.reduce)
        self.cyclic = _is_cyclic(self.inside)

    def find(self, a: Axis) -> Axis:
        """The class of an axis."""
        while a in self.parent:
            a = self.parent[a]
        return a

    def union(self, a: Axis, b: Axis) -> bool:
        """Make one class of two; whether they are one now."""
        a, b = self.find(a), self.find(b)
        if a == b:
            return True
        if a.extent is not b.extent or self.members[a] & self.members[b]:
            return False
        if age_of(b) < age_of(a):
            a, b = b, a
        if self.cyclic or self.reaches(a, b) or self.reaches(b, a):
            return False
        self.parent[b] = a
        self.members[a] |= self.members.pop(b)
        if b in self.inside:
            self.inside.setdefault(a, set()).update(self.inside.pop(b))
        return True

    def reaches(self, start: Axis, end: Axis) -> bool:
        """Whether the relation "a fold keeps D and reduces C" leads from one class to another. While there is no cycle,
        joining two makes one just where it does."""
        todo, seen = [start], {start}
        while todo:
            for inner in self.inside.get(todo.pop(), ()):
                c = self.find(inner)
                if c == end:
                    return True
                if c not in seen:
                    seen.add(c)
                    todo.append(c)
        return False

    def apply(self) -> Form:
        """The form over its classes."""
        mapping = {a: self.find(a) for i in self.form.items for a in i.axes if self.find(a) != a}
        return rename_classes(self.form, mapping) if mapping else self.form


def _is_cyclic(inside: Mapping[Axis, set[Axis]]) -> bool:
    try:
        TopologicalSorter(inside).prepare()
    except CycleError:
        return True
    return False


def age_of(a: Axis) -> int:
    """The number in the name of a class: later ones are higher."""
    return int(a.name[1:])


def rename_classes(form: Form, mapping: Mapping[Axis, Axis]) -> Form:
    """The form with other classes in place of some."""
    table = {axis(a): axis(b) for a, b in mapping.items()}
    memo: dict[Expr, Expr] = {}
    pick = lambda group: tuple(mapping.get(a, a) for a in group)  # noqa: E731
    items = [
        replace(
            i, kept=pick(i.kept), reduce=pick(i.reduce), scan=mapping.get(i.scan, i.scan) if i.scan else None,
            body=tuple(substitute(b, table, memo) for b in i.body), offset=substitute(i.offset, table, memo),
        )
        for i in form.items
    ]  # fmt: skip
    return replace(form, items=tuple(items))


@lru_cache(1 << 14)
def terms_of(offset: Expr) -> dict[Axis, Expr]:
    """Axis -> its coefficient, for the axes in which an offset is affine, in the order in which it names them: which
    classes are joined first depends on it, and must not differ between processes. Do not change the result."""
    out: dict[Axis, Expr] = {}
    for x in leaves(offset, "axis"):
        factor = dims.coefficient(offset, x)
        if factor is not None and isinstance(x.value, Axis):
            out[x.value] = factor
    return out
