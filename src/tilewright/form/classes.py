"""Classes: join axes that meet, refine those that meet in part, clone what does not fit, merge what is one loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from tilewright.analysis.contraction import product_sides
from tilewright.analysis.loop_classes import Classes, age_of, terms_of
from tilewright.analysis.needed_checks import check_repeated
from tilewright.analysis.runtime_checks import inside_of
from tilewright.errors import IllegalSchedule
from tilewright.ir.dtype import i64
from tilewright.ir.expr import (
    Axis,
    Expr,
    axes_of,
    axis,
    both,
    const,
    make,
    substitute,
    transform,
    walk,
    where,
)
from tilewright.ir.form import Form, Item, folds_read
from tilewright.ir.graph import Layout, Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.sizes import dims

from .compose import compose
from .turn_around import turn_around

_PLAIN = "a reduction in a kernel is read at its own classes"


def make_form(
    kernel: Kernel,
    layouts: Mapping[Value, Layout],
    clones: int = 8,
    round_halves: bool = False,
    coarse: Sequence[str] = (),
) -> Form:
    """Compose, then join and refine to a fixpoint, clone what does not fit, merge. Raises IllegalSchedule if a fold is
    read through a map that no refinement makes plain, or more than `clones` folds would be recomputed. See
    `compose` for `round_halves` and `coarse`."""
    form = turn_around(compose(kernel, layouts, round_halves, coarse))
    check_repeated([r for i in form.items for r in i.roots], form.sizes)
    for _ in range(4):
        form = _join_and_refine(form)
        fitted = _clone_misfits(form, clones)
        if fitted is form:
            break
        clones -= len(fitted.items) - len(form.items)
        form = fitted
    else:
        raise IllegalSchedule("reductions keep being recomputed at new indices", law=_PLAIN, lasts=True)
    return _merge(drop_dead(_shared_folds(form)))


def _join_and_refine(form: Form) -> Form:
    for _ in range(24):
        joined = _join(form)
        refined = _refine(joined)
        if refined is joined:
            return joined
        form = refined
    return _join(form)


def _join(form: Form) -> Form:
    """Make classes of axes that meet through edges, then through inputs, then through the shape of outputs."""
    classes = Classes(form)
    for item in form.items:
        for node in _values(item):
            fold = form.items[node.value[0]]  # type: ignore[index]
            for arg, kept in zip(node.args, fold.kept, strict=True):
                if arg.op == "axis" and isinstance(arg.value, Axis):
                    classes.union(kept, arg.value)
    for a, b in _input_meetings(form):
        classes.union(a, b)
    outputs = form.outputs
    for other in outputs[1:]:
        if [a.extent for a in outputs[0].kept] == [a.extent for a in other.kept]:
            for a, b in zip(outputs[0].kept, other.kept, strict=True):
                classes.union(a, b)
    for a, b in _row_meetings(form):
        classes.union(a, b)
    return classes.apply()


def _row_meetings(form: Form) -> Iterator[tuple[Axis, Axis]]:
    """Axes of equal extents along memory, one that a fold goes over and one that only outputs have: rows that share no
    value, as where the squares of a row were stored by another kernel. Products have loops of their own."""
    folds = list(form.folds.values())
    if not folds or any(product_sides(i) is not None for i in folds):
        return
    folded = {a for i in folds for a in i.axes}
    alone = [b for o in form.outputs for b in _along_memory(o) if b not in folded]
    if not alone:
        return
    for fold in folds:
        for a in filter(fold.reduce.__contains__, _along_memory(fold)):
            yield from ((a, b) for b in alone if b.extent is a.extent)


def _along_memory(item: Item) -> list[Axis]:
    """The axes along which an access of an item is contiguous."""
    unit = {a for offset in {o for _, o in item.accesses()} for a in _unit_axes(offset)}
    return [a for a in item.axes if a in unit]


@lru_cache(1 << 14)
def _unit_axes(offset: Expr) -> frozenset[Axis]:
    """The axes whose next element is the next one in memory."""
    return frozenset(a for a, factor in terms_of(offset).items() if factor is dims.ONE)


def _values(item: Item) -> list[Expr]:
    return list(dict.fromkeys(x for b in item.roots for x in _values_in(b)))


@lru_cache(1 << 14)
def _values_in(root: Expr) -> tuple[Expr, ...]:
    return tuple(x for x in walk(root) if x.op == "value")


def _by_param(form: Form) -> dict[int, list[tuple[Item, dict[Axis, Expr]]]]:
    """Parameter -> the items that access it, with the terms of an offset, each once: steps that are written out read
    one parameter at many places that differ in nothing else."""
    out: dict[int, dict[object, tuple[Item, dict[Axis, Expr]]]] = {}
    for item in form.items:
        for param, offset in dict.fromkeys(item.accesses()):
            terms = terms_of(offset)
            out.setdefault(param, {}).setdefault((item, *terms.items()), (item, terms))
    return {param: list(found.values()) for param, found in out.items()}


def _input_meetings(form: Form) -> Iterator[tuple[Axis, Axis]]:
    """Axes with equal coefficient and extent in two accesses of one parameter; whole matches come first."""
    partial: list[tuple[Axis, Axis]] = []
    for accesses in _by_param(form).values():
        backs = [{(c, a.extent): a for a, c in terms.items()} for _, terms in accesses]
        for n, (one, terms) in enumerate(accesses):
            for (other, terms2), back in zip(accesses[n + 1 :], backs[n + 1 :], strict=True):
                if one is other or not terms or not terms2:
                    continue
                pairs = [(a, back[c, a.extent]) for a, c in terms.items() if (c, a.extent) in back]
                if len(pairs) == len(terms) == len(terms2):
                    yield from pairs
                else:
                    partial += pairs
    yield from partial


def _refine(form: Form) -> Form:
    for a, size in _splits(form):
        if size is dims.ONE or size is a.extent or dims.at_least(dims.mul(size, dims.integer(-1)), 0):
            continue  # a dim that is walked backwards has a negative factor
        outer = dims.exact_div(a.extent, size)
        if outer is not None and outer is not dims.ONE and not any(i.scan == a for i in form.items):
            return split_class(form, a, outer, size)
    return form


def _splits(form: Form) -> Iterator[tuple[Axis, Expr]]:
    """(axis, inner size) wherever some access map or fold index sees only part of an axis."""
    for item in form.items:
        for root in item.roots:
            parts = _parts_seen(root)
            looked_up = _looked_up(form, root) if any(x.op == "floordiv" for x in parts) else ()
            for x in parts:
                if x in looked_up:
                    continue
                if x.op in ("floordiv", "mod") and x.dtype is i64 and isinstance(x.args[0].value, Axis):
                    yield x.args[0].value, x.args[1]
                if x.op == "value" and isinstance(x.value, tuple):
                    for arg, kept in zip(x.args, form.items[x.value[0]].kept, strict=True):
                        for factor in terms_of(arg).values():
                            yield kept, factor
    yield from _boundary_splits(form)


@lru_cache(1 << 14)
def _parts_seen(root: Expr) -> tuple[Expr, ...]:
    """The nodes that may see a part of an axis."""
    return tuple(x for x in walk(root) if x.op in ("floordiv", "mod", "value"))


def _looked_up(form: Form, root: Expr) -> set[Expr]:
    """Quotients of axes at which whole numbers or truth values are only looked up, as in a table of blocks: neighbours
    read the same element, which no loop of its own makes cheaper. (Where a remainder is an index beside it, a dim is
    seen as two.)"""
    tables: set[Expr] = set()
    others: set[Expr] = set()
    todo, seen = [root], set[Expr]()
    while todo:
        x = todo.pop()
        if x in seen:
            continue
        seen.add(x)
        if x.op != "read" or not isinstance(x.value, int):
            others |= {x} if x.op in ("floordiv", "mod") else set()
            todo += x.args
            continue
        inside = [y for y in walk(x.args[0]) if y.op in ("floordiv", "mod", "read")]
        split = {y.args[0] for y in inside if y.op == "mod"}
        table = not form.params[x.value].dtype.is_float and all(y.op != "read" for y in inside)
        for y in inside:
            (tables if table and y.op == "floordiv" and y.args[0] not in split else others).add(y)
        todo += [y for y in inside if y.op == "read"]
    return tables - others


def _boundary_splits(form: Form) -> Iterator[tuple[Axis, Expr]]:
    """(axis, inner size) wherever other items access a parameter in steps, or rows, that end inside of the axis."""
    for accesses in _by_param(form).values():
        marked: dict[tuple[Expr, ...], list[tuple[int, Item]]] = {}
        for n, (item, terms) in enumerate(accesses):
            ends = (dims.mul(c, a.extent) for a, c in terms.items())
            marked.setdefault(tuple(dict.fromkeys((*terms.values(), *ends))), []).append((n, item))
        for one, terms in accesses:
            firsts = ((next((n for n, i in found if i is not one), -1), m) for m, found in marked.items())
            for _, marks in sorted((f for f in firsts if f[0] >= 0), key=lambda f: f[0]):
                for (a, c), mark in itertools.product(terms.items(), marks):
                    inner = dims.exact_div(mark, c)
                    if inner is not None and inner is not dims.ZERO:
                        yield a, inner


def split_class(form: Form, a: Axis, outer: Expr, inner: Expr) -> Form:
    """a = p * inner + q, everywhere."""
    next_age = 1 + max(age_of(x) for i in form.items for x in i.axes)
    p, q = Axis(f"c{next_age}", outer), Axis(f"c{next_age + 1}", inner)
    joined = {axis(a): dims.add(dims.mul(axis(p), inner), axis(q))}
    position = {i.id: i.kept.index(a) for i in form.items if i.is_fold and a in i.kept}
    expanded: dict[Expr, Expr] = {}
    placed: dict[Expr, Expr] = {}

    def expand(x: Expr) -> Expr | None:
        if x.op != "value" or not isinstance(x.value, tuple) or x.value[0] not in position:
            return None
        at = position[x.value[0]]
        args = [apply(y) for y in x.args]
        both = (dims.floordiv(args[at], inner), dims.mod(args[at], inner))
        return make("value", (*args[:at], *both, *args[at + 1 :]), x.dtype, x.value)

    def apply(e: Expr) -> Expr:
        return substitute(transform(e, expand, expanded), joined, placed)

    return _with_classes(form, lambda x: (p, q) if x == a else (x,), apply)


def _with_classes(
    form: Form, classes_of: Callable[[Axis], Sequence[Axis]], apply: Callable[[Expr], Expr]
) -> Form:
    """The form in which each class is what `classes_of` makes of it, and each expression what `apply` does."""

    def changed(group: Sequence[Axis]) -> tuple[Axis, ...]:
        return tuple(y for x in group for y in classes_of(x))

    items = [
        replace(
            i, kept=changed(i.kept), reduce=changed(i.reduce), body=tuple(map(apply, i.body)), offset=apply(i.offset)
        )
        for i in form.items
    ]  # fmt: skip
    return replace(form, items=tuple(items))


def _clone_misfits(form: Form, budget: int) -> Form:
    """A fold read at other indices than its own classes is computed again for that reader (a second instance)."""
    items = list(form.items)
    made: dict[Expr, Expr] = {}
    age = 1 + max((age_of(a) for i in items for a in i.axes), default=0)

    def fit(x: Expr) -> Expr | None:
        nonlocal age
        if x.op != "value" or not isinstance(x.value, tuple):
            return None
        fold = items[x.value[0]]
        if x.args == tuple(axis(a) for a in fold.kept):
            return None
        if x in made:
            return made[x]
        if any(y.op in ("read", "value") for a in x.args for y in walk(a)):
            raise IllegalSchedule(
                "a reduction is read at an index that comes from data", law=_PLAIN, source=fold.source
            )
        if fold.scan is not None or len(items) - len(form.items) >= budget:
            raise IllegalSchedule(
                "a reduction is read through a map", law=_PLAIN, source=fold.source, lasts=True
            )
        fresh = {a: Axis(f"c{age + k}", a.extent) for k, a in enumerate(fold.reduce)}
        age += len(fresh)
        table = {axis(a): axis(b) for a, b in fresh.items()} | {
            axis(a): e for a, e in zip(fold.kept, x.args, strict=True)
        }
        kept = tuple(
            sorted({y.value for a in x.args for y in axes_of(a) if isinstance(y.value, Axis)}, key=age_of)
        )
        body = tuple(_guarded(substitute(b, table), x.args, fold.kept) for b in fold.body)
        items.append(replace(fold, id=len(items), kept=kept, reduce=tuple(fresh.values()), body=body))
        made[x] = make("value", tuple(axis(a) for a in kept), x.dtype, (len(items) - 1, x.value[1]))
        return made[x]

    memo: dict[Expr, Expr] = {}
    for n in range(len(form.items)):
        i = items[n]
        body = tuple(transform(b, fit, memo) for b in i.body)
        if body != i.body:
            items[n] = replace(items[n], body=body)
    return form if len(items) == len(form.items) else replace(form, items=tuple(items))


def _guarded(body: Expr, index: Sequence[Expr], kept: Sequence[Axis]) -> Expr:
    """The body of a fold that is computed at other indices, where it reads nothing behind the end of its own classes:
    a reader may ask for elements of which it then takes none (behind a piece of a concatenation)."""
    inside: Expr | None = None
    for i, a in zip(index, kept, strict=True):
        inside = both(inside, inside_of(i, a.extent))
    if inside is None:
        return body

    def visit(x: Expr) -> Expr | None:
        if x.op != "read":
            return None
        made = make("read", tuple(transform(a, visit) for a in x.args), x.dtype, x.value)
        return where(inside, made, const(0, x.dtype)) if axes_of(x) & axes_of(inside) else made

    return transform(body, visit)


def _shared_folds(form: Form) -> Form:
    """Equal folds (clones that met again) become one."""
    first: dict[object, int] = {}
    same: dict[int, int] = {}

    def change(x: Expr) -> Expr | None:
        if x.op == "value" and isinstance(x.value, tuple) and x.value[0] in same:
            return make("value", x.args, x.dtype, (same[x.value[0]], x.value[1]))
        return None

    def changed(i: Item) -> Item:
        return replace(i, body=tuple(transform(b, change, memo) for b in i.body)) if same else i

    memo: dict[Expr, Expr] = {}
    items: list[Item] = []
    for i in map(changed, form.items):
        items.append(i)
        if i.is_fold:
            n = first.setdefault((i.kept, i.reduce, i.body, i.reduction, i.scan), i.id)
            if n != i.id:
                same[i.id] = n
                memo = {}
    return replace(form, items=tuple(map(changed, items))) if same else form


def drop_dead(form: Form) -> Form:
    """Folds that nothing reads any more (all their readers took clones) go; numbers stay positions."""
    live: set[int] = set()
    todo = [i for i in form.items if not i.is_fold]
    while todo:
        for f in folds_read(todo.pop().roots):
            if f not in live:
                live.add(f)
                todo.append(form.items[f])
    live_items = [i for i in form.items if not i.is_fold or i.id in live]
    if len(live_items) == len(form.items):
        return form
    memo: dict[Expr, Expr] = {}
    number = {i.id: n for n, i in enumerate(live_items)}

    def renumber(x: Expr) -> Expr | None:
        if x.op == "value" and isinstance(x.value, tuple):
            return make(
                "value",
                tuple(transform(a, renumber, memo) for a in x.args),
                x.dtype,
                (number[x.value[0]], x.value[1]),
            )
        return None

    items = [
        replace(i, id=number[i.id], body=tuple(transform(b, renumber, memo) for b in i.body))
        for i in live_items
    ]
    return replace(form, items=tuple(items))


def _merge(form: Form) -> Form:
    """Fuse two classes into one wherever all addresses see them as one and nothing else looks at them."""
    while True:
        found = next(_mergeable(form), None)
        if found is None:
            return form
        form = _merged(form, *found)


def _mergeable(form: Form) -> Iterator[tuple[Axis, Axis]]:
    apart = _watched(form) | {i.scan for i in form.items if i.scan}
    free = [a for a in form.classes() if a not in apart]
    if len(free) < 2:
        return
    accessed = {i: list(dict.fromkeys(offset for _, offset in i.accesses())) for i in form.items}
    for b in free:
        for a in free:
            if a != b and all(_merges_in(i, a, b, offsets) for i, offsets in accessed.items()):
                yield a, b


def _watched(form: Form) -> set[Axis]:
    """Classes that an expression looks at other than through an affine address."""
    found: set[Axis] = set()

    seen: set[Expr] = set()
    todo = [b for i in form.items for b in i.body]
    while todo:
        e = todo.pop()
        if e in seen:
            continue
        seen.add(e)
        if e.op == "axis" and isinstance(e.value, Axis):
            found.add(e.value)
        elif e.op == "read":
            affine = set(terms_of(e.args[0]))
            found.update(
                x.value for x in axes_of(e.args[0]) if isinstance(x.value, Axis) and x.value not in affine
            )
            todo += [x for x in walk(e.args[0]) if x.op == "read"]
        elif e.op != "value":
            todo += e.args
    for i in form.items:
        affine = set(terms_of(i.offset))
        found.update(
            x.value for x in axes_of(i.offset) if isinstance(x.value, Axis) and x.value not in affine
        )
    return found


def _merges_in(i: Item, a: Axis, b: Axis, offsets: Sequence[Expr]) -> bool:
    """Whether an item that accesses memory at these `offsets` sees two classes as one."""
    sides = [(a in g, b in g) for g in (i.kept, i.reduce)]
    if any(x != y for x, y in sides):
        return False
    for offset in offsets:
        terms = terms_of(offset)
        ca, cb = terms.get(a, dims.ZERO), terms.get(b, dims.ZERO)
        if ca is not dims.mul(cb, b.extent):
            return False
    return True


def _merged(form: Form, a: Axis, b: Axis) -> Form:
    age = 1 + max(age_of(x) for i in form.items for x in i.axes)
    m = Axis(f"c{age}", dims.mul(a.extent, b.extent))
    table = {axis(a): dims.ZERO, axis(b): axis(m)}
    dropped: dict[Expr, Expr] = {}
    placed: dict[Expr, Expr] = {}
    position = {i.id: i.kept.index(a) for i in form.items if i.is_fold and a in i.kept}

    def drop(x: Expr) -> Expr | None:
        if x.op != "value" or not isinstance(x.value, tuple) or x.value[0] not in position:
            return None
        at = position[x.value[0]]
        args = tuple(substitute(y, table, placed) for n, y in enumerate(x.args) if n != at)
        return make("value", args, x.dtype, x.value)

    def apply(e: Expr) -> Expr:
        return substitute(transform(e, drop, dropped), table, placed)

    return _with_classes(form, lambda x: () if x == a else (m,) if x == b else (x,), apply)
