"""A kernel as folds and outputs over classes: compose, refine, join, clone, merge (the first half of lowering).

Pointwise ops vanish: a *fold* (one reduction) or an *output* (one stored value) holds the whole expression of what it
computes, over reads of the kernel's parameters (`read(k, offset)`) and results of folds (`value` leaves whose arguments
are the fold's kept classes). Equal subexpressions are one interned object, so sharing needs no bookkeeping.

A *class* is an axis that several folds and outputs share: one possible loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..errors import IllegalSchedule
from ..ir import dims
from ..ir.dtype import i64
from ..ir.expr import Axis, Expr, axes_of, axis, call, make, rebuild, substitute, transform, walk
from ..ir.graph import Layout, Op, Value
from ..ir.kernel import Kernel
from ..ir.reduction import Reduction
from ..ir.tensor import TensorExpr


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A fold (with `reduction`) or an output (with `param`, the parameter it is stored to, at element offset `offset`).

    `kept` are the classes that index its result, `reduce` those it folds over; `scan` is a kept class along which the
    fold is an inclusive running one."""

    id: int
    kept: tuple[Axis, ...]
    body: tuple[Expr, ...]
    reduce: tuple[Axis, ...] = ()
    reduction: Reduction | None = None
    scan: Axis | None = None
    param: int = -1
    offset: Expr = dims.ZERO

    @property
    def is_fold(self) -> bool:
        """Whether this is a reduction."""
        return self.reduction is not None

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Every class it uses."""
        return self.kept + self.reduce

    @property
    def roots(self) -> tuple[Expr, ...]:
        """Expressions it evaluates."""
        return self.body if self.is_fold else (*self.body, self.offset)

    def accesses(self) -> list[tuple[int, Expr]]:
        """(parameter, offset) of each memory access."""
        found = [(x.value, x.args[0]) for b in self.roots for x in walk(b) if x.op == "read" and isinstance(x.value, int)]
        return found if self.is_fold else [*found, (self.param, self.offset)]


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """Parameters (inputs, then outputs) with the elements that each spans in memory, folds and outputs of a kernel;
    `checks` are conditions on data-dependent indices, by the read (its offset) that they protect."""

    params: tuple[Value, ...]
    sizes: tuple[Expr, ...]
    items: tuple[Item, ...]
    checks: Mapping[Expr, tuple[Expr, ...]]

    @property
    def folds(self) -> dict[int, Item]:
        """Folds by number."""
        return {i.id: i for i in self.items if i.is_fold}

    @property
    def outputs(self) -> list[Item]:
        """Stores."""
        return [i for i in self.items if not i.is_fold]

    def classes(self) -> list[Axis]:
        """Every class, outputs' first."""
        found: dict[Axis, None] = {}
        for i in (*self.outputs, *self.folds.values()):
            found |= dict.fromkeys(i.axes)
        return list(found)

    def show(self) -> str:
        """The form as text."""
        lines: list[str] = []
        for i in self.items:
            kept = ", ".join(f"{a.name}:{a.extent}" for a in i.kept)
            over = ", ".join(f"{a.name}:{a.extent}" for a in i.reduce)
            body = "; ".join(map(repr, i.body))
            head = f"${i.id} = {i.reduction.name}({over})" if i.reduction else f"@{i.param}[{i.offset}] ="
            lines.append(f"[{kept}] {head} {body}")
        return "\n".join(lines)


_PLAIN = "a fold in a kernel is read at its own classes"


def folds_read(roots: Sequence[Expr]) -> list[int]:
    """Numbers of the folds that expressions read directly."""
    found: dict[int, None] = {}
    for r in roots:
        for x in walk(r):
            if x.op == "value" and isinstance(x.value, tuple):
                found[x.value[0]] = None
    return list(found)


def make_form(kernel: Kernel, layouts: Mapping[Value, Layout], clones: int = 8, round_halves: bool = False) -> Form:
    """Compose, then join and refine to a fixpoint, clone what does not fit, merge. Raises IllegalSchedule if a fold is
    read through a map that no refinement makes plain, or more than `clones` folds would be recomputed."""
    form = _Composer(kernel, layouts, round_halves).form()
    for _ in range(4):
        form = _settle(form)
        fitted = _clone_misfits(form, clones)
        if fitted is form:
            break
        clones -= len(fitted.items) - len(form.items)
        form = fitted
    else:
        raise IllegalSchedule("folds keep being recomputed at new indices", law=_PLAIN, phase="schedule")
    return _merge(_drop_dead(form))


# ---------------------------------------------------------------------------------------------------------------- compose


class _Composer:
    def __init__(self, kernel: Kernel, layouts: Mapping[Value, Layout], round_halves: bool) -> None:
        self.kernel, self.layouts, self.round_halves = kernel, layouts, round_halves
        self.params = (*kernel.inputs, *kernel.outputs)
        self.slot = {v: k for k, v in enumerate(kernel.inputs)}
        self.pointwise: dict[Value, tuple[tuple[Axis, ...], Expr]] = {}
        self.folded: dict[Value, tuple[int, int]] = {}
        self.items: list[Item] = []
        self.checks: dict[Expr, tuple[Expr, ...]] = {}
        self.fresh = 0

    def form(self) -> Form:
        for op in self.kernel.ops:
            self.add(op)
        for k, v in enumerate(self.kernel.outputs):
            shape_axes = tuple(self.axis(e) for e in v.shape)
            index = tuple(_plain(a) for a in shape_axes)
            body = self.element(v, index, self.kernel.ops[0])
            offset = self.offset(v, index)
            kept = tuple(a for a in shape_axes if a.extent is not dims.ONE)
            self.items.append(Item(len(self.items), kept, (body,), param=len(self.slot) + k, offset=offset))
        return Form(self.params, tuple(map(self.span, self.params)), tuple(self.items), self.checks)

    def span(self, v: Value) -> Expr:
        layout = self.layouts.get(v)
        if layout is None:
            return v.numel
        reach = (dims.mul(dims.sub(size, dims.ONE), s) for size, s in zip(v.shape, layout.strides, strict=True))
        return dims.add(dims.ONE, *reach)

    def axis(self, extent: Expr) -> Axis:
        self.fresh += 1
        return Axis(f"c{self.fresh}", extent)

    def add(self, op: Op) -> None:
        assert op.expr is not None, f"{op.name} is a library call"
        expr = op.expr
        fresh = {a: self.axis(a.extent) for a in (*expr.axes, *expr.reduce)}
        table = {axis(a): _plain(b) for a, b in fresh.items()}
        body = tuple(self.inline(substitute(b, table), op) for b in expr.body)
        if expr.reduction is None:
            self.pointwise[op.output] = (tuple(fresh[a] for a in expr.axes), body[0])
            return
        self.fold(op, expr, fresh, body)

    def fold(self, op: Op, expr: TensorExpr, fresh: dict[Axis, Axis], body: tuple[Expr, ...]) -> None:
        number = len(self.items)
        live = lambda group: tuple(fresh[a] for a in group if a.extent is not dims.ONE)  # noqa: E731
        scan = fresh[expr.scan] if expr.scan is not None else None
        self.items.append(Item(number, live(expr.axes), body, live(expr.reduce), expr.reduction, scan))
        for r, v in enumerate(op.outputs):
            self.folded[v] = (number, r)

    def inline(self, body: Expr, op: Op) -> Expr:
        """Reads of values made in the kernel become their expressions; halves are computed in fp32."""

        memo: dict[Expr, Expr] = {}

        def go(x: Expr) -> Expr:
            done = memo.get(x)
            if done is None:
                args = tuple(go(a) for a in x.args)
                if x.op == "read":
                    assert isinstance(x.value, int)
                    done = self.element(op.inputs[x.value], args, op)
                else:
                    done = self.widened(x, args)
                memo[x] = done
            return done

        return go(body)

    def widened(self, x: Expr, args: tuple[Expr, ...]) -> Expr:
        if x.op == "const" and x.dtype.is_half:
            return make("const", (), x.dtype.compute, x.value)
        if x.op == "narrow":
            if x.dtype.is_half and self.round_halves:
                return call("cast", call("cast", args[0], dtype=x.dtype), dtype=x.dtype.compute)
            return call("cast", args[0], dtype=x.dtype.compute)
        if x.op == "cast" and x.dtype.is_half:
            rounded = call("cast", args[0], dtype=x.dtype)
            return call("cast", rounded, dtype=x.dtype.compute)
        if x.op == "cast":
            return call("cast", args[0], dtype=x.dtype)
        return rebuild(x, args) if x.args else x

    def element(self, v: Value, index: tuple[Expr, ...], op: Op) -> Expr:
        if v in self.pointwise:
            axes, body = self.pointwise[v]
            return substitute(body, {axis(a): i for a, i in zip(axes, index, strict=True)})
        if v in self.folded:
            number, result = self.folded[v]
            plain = tuple(i for i, extent in zip(index, v.shape, strict=True) if extent is not dims.ONE)
            return make("value", plain, v.dtype.compute, (number, result))
        checked, conditions = self.checked(v, index)
        offset = self.offset(v, checked)
        if conditions:
            self.checks[offset] = conditions
        return make("read", (offset,), v.dtype.compute, self.slot[v])

    def checked(self, v: Value, index: tuple[Expr, ...]) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
        """Clamp the indices that come from data, and the conditions under which clamping changes nothing."""
        out: list[Expr] = []
        conditions: list[Expr] = []
        for i, size in zip(index, v.shape, strict=True):
            if any(x.op in ("read", "value") for x in walk(i)):
                top = dims.sub(size, dims.ONE)
                conditions += [call("ge", i, dims.ZERO), call("le", i, top)]
                i = dims.minimum(dims.maximum(i, dims.ZERO), top)
            out.append(i)
        return tuple(out), tuple(conditions)

    def offset(self, v: Value, index: tuple[Expr, ...]) -> Expr:
        layout = self.layouts.get(v)
        strides = layout.strides if layout is not None else dims.dense_strides(v.shape)
        return dims.add(*(dims.mul(i, s) for i, s in zip(index, strides, strict=True)))


def _plain(a: Axis) -> Expr:
    return dims.ZERO if a.extent is dims.ONE else axis(a)


# ------------------------------------------------------------------------------------------------------- join and refine


def _settle(form: Form) -> Form:
    for _ in range(24):
        joined = _join(form)
        refined = _refine(joined)
        if refined is joined:
            return joined
        form = refined
    return _join(form)


def _join(form: Form) -> Form:
    """Make classes of axes that meet through edges, then through inputs, then through the shape of outputs."""
    classes = _Classes(form)
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
    return classes.apply()


class _Classes:
    """Union-find over axes. A union is refused if extents differ, if one item would hold a class twice, or if two folds
    would then each need the other's loop outside its own (joins are preferences: without it both are legal)."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.parent: dict[Axis, Axis] = {}
        self.members: dict[Axis, set[int]] = {}
        for i in form.items:
            for a in i.axes:
                self.members.setdefault(a, set()).add(i.id)

    def find(self, a: Axis) -> Axis:
        while a in self.parent:
            a = self.parent[a]
        return a

    def union(self, a: Axis, b: Axis) -> bool:
        a, b = self.find(a), self.find(b)
        if a == b:
            return True
        if a.extent is not b.extent or self.members[a] & self.members[b]:
            return False
        if _age(b) < _age(a):
            a, b = b, a
        self.parent[b] = a
        if self.cyclic():
            del self.parent[b]
            return False
        self.members[a] |= self.members.pop(b)
        return True

    def cyclic(self) -> bool:
        """Whether the relation "a fold keeps D and reduces C" has a cycle among classes."""
        inside: dict[Axis, set[Axis]] = {}
        for i in self.form.items:
            if i.reduce:
                inner = {self.find(c) for c in i.reduce}
                for d in i.kept:
                    inside.setdefault(self.find(d), set()).update(inner)
        done: set[Axis] = set()

        def loops(a: Axis, path: frozenset[Axis]) -> bool:
            if a in path:
                return True
            if a in done:
                return False
            found = any(loops(b, path | {a}) for b in inside.get(a, ()))
            done.add(a)
            return found

        return any(loops(a, frozenset()) for a in list(inside))

    def apply(self) -> Form:
        mapping = {a: self.find(a) for i in self.form.items for a in i.axes if self.find(a) != a}
        return _rename(self.form, mapping) if mapping else self.form


def _age(a: Axis) -> int:
    return int(a.name[1:])


def _rename(form: Form, mapping: Mapping[Axis, Axis]) -> Form:
    table = {axis(a): axis(b) for a, b in mapping.items()}
    pick = lambda group: tuple(mapping.get(a, a) for a in group)  # noqa: E731
    items = [
        replace(
            i, kept=pick(i.kept), reduce=pick(i.reduce), scan=mapping.get(i.scan, i.scan) if i.scan else None,
            body=tuple(substitute(b, table) for b in i.body), offset=substitute(i.offset, table),
        )
        for i in form.items
    ]  # fmt: skip
    checks = {substitute(k, table): tuple(substitute(c, table) for c in v) for k, v in form.checks.items()}
    return replace(form, items=tuple(items), checks=checks)


def _values(item: Item) -> list[Expr]:
    return list({x: None for b in item.roots for x in walk(b) if x.op == "value"})


@lru_cache(1 << 14)
def _terms(offset: Expr) -> dict[Axis, Expr]:
    """Axis -> its coefficient, for the axes in which an offset is affine. Do not change the result."""
    out: dict[Axis, Expr] = {}
    for x in axes_of(offset):
        factor = dims.coefficient(offset, x)
        if factor is not None and isinstance(x.value, Axis):
            out[x.value] = factor
    return out


def _by_param(form: Form) -> dict[int, list[tuple[Item, dict[Axis, Expr], Expr]]]:
    out: dict[int, list[tuple[Item, dict[Axis, Expr], Expr]]] = {}
    for item in form.items:
        for param, offset in dict.fromkeys(item.accesses()):
            out.setdefault(param, []).append((item, _terms(offset), offset))
    return out


def _input_meetings(form: Form) -> Iterator[tuple[Axis, Axis]]:
    """Axes with equal coefficient and extent in two accesses of one parameter; whole matches come first."""
    partial: list[tuple[Axis, Axis]] = []
    for accesses in _by_param(form).values():
        for n, (one, terms, _) in enumerate(accesses):
            for other, terms2, _ in accesses[n + 1 :]:
                if one is other or not terms or not terms2:
                    continue
                back = {(c, a.extent): a for a, c in terms2.items()}
                pairs = [(a, back[c, a.extent]) for a, c in terms.items() if (c, a.extent) in back]
                if len(pairs) == len(terms) == len(terms2):
                    yield from pairs
                else:
                    partial += pairs
    yield from partial


def _refine(form: Form) -> Form:
    for a, size in _splits(form):
        if size is dims.ONE or size is a.extent:
            continue
        outer = dims.exact_div(a.extent, size)
        if outer is not None and outer is not dims.ONE and not any(i.scan == a for i in form.items):
            return _split(form, a, outer, size)
    return form


def _splits(form: Form) -> Iterator[tuple[Axis, Expr]]:
    """(axis, inner size) wherever some access map or fold index sees only part of an axis."""
    for item in form.items:
        for root in item.roots:
            for x in walk(root):
                if x.op in ("floordiv", "mod") and x.dtype is i64 and isinstance(x.args[0].value, Axis):
                    yield x.args[0].value, x.args[1]
                if x.op == "value" and isinstance(x.value, tuple):
                    for arg, kept in zip(x.args, form.items[x.value[0]].kept, strict=True):
                        for factor in _terms(arg).values():
                            yield kept, factor
    yield from _boundary_splits(form)


def _boundary_splits(form: Form) -> Iterator[tuple[Axis, Expr]]:
    for accesses in _by_param(form).values():
        for one, terms, _ in accesses:
            for other, terms2, _ in accesses:
                if one is other:
                    continue
                marks = set(terms2.values()) | {dims.mul(c, a.extent) for a, c in terms2.items()}
                for a, c in terms.items():
                    for mark in marks:
                        inner = dims.exact_div(mark, c)
                        if inner is not None and inner is not dims.ZERO:
                            yield a, inner


def _split(form: Form, a: Axis, outer: Expr, inner: Expr) -> Form:
    """a = p * inner + q, everywhere."""
    next_age = 1 + max(_age(x) for i in form.items for x in i.axes)
    p, q = Axis(f"c{next_age}", outer), Axis(f"c{next_age + 1}", inner)
    whole = {axis(a): dims.add(dims.mul(axis(p), inner), axis(q))}
    position = {i.id: i.kept.index(a) for i in form.items if i.is_fold and a in i.kept}

    def expand(x: Expr) -> Expr | None:
        if x.op != "value" or not isinstance(x.value, tuple) or x.value[0] not in position:
            return None
        at = position[x.value[0]]
        args = [substitute(transform(y, expand), whole) for y in x.args]
        both = (dims.floordiv(args[at], inner), dims.mod(args[at], inner))
        return make("value", (*args[:at], *both, *args[at + 1 :]), x.dtype, x.value)

    def apply(e: Expr) -> Expr:
        return substitute(transform(e, expand), whole)

    pick = lambda group: tuple(y for x in group for y in ((p, q) if x == a else (x,)))  # noqa: E731
    items = [
        replace(i, kept=pick(i.kept), reduce=pick(i.reduce), body=tuple(map(apply, i.body)), offset=apply(i.offset))
        for i in form.items
    ]
    checks = {apply(k): tuple(map(apply, v)) for k, v in form.checks.items()}
    return replace(form, items=tuple(items), checks=checks)


# ------------------------------------------------------------------------------------------------------------ clone, merge


def _clone_misfits(form: Form, budget: int) -> Form:
    """A fold read at other indices than its own classes is computed again for that reader (a second instance)."""
    items = list(form.items)
    made: dict[Expr, Expr] = {}
    age = 1 + max((_age(a) for i in items for a in i.axes), default=0)

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
            raise IllegalSchedule(f"fold {fold.id} is read at an index that comes from data", law=_PLAIN, phase="schedule")
        if fold.scan is not None or len(items) - len(form.items) >= budget:
            raise IllegalSchedule(f"fold {fold.id} is read through a map", law=_PLAIN, phase="schedule")
        fresh = {a: Axis(f"c{age + k}", a.extent) for k, a in enumerate(fold.reduce)}
        age += len(fresh)
        table = {axis(a): axis(b) for a, b in fresh.items()} | {axis(a): e for a, e in zip(fold.kept, x.args, strict=True)}
        kept = tuple(sorted({y.value for a in x.args for y in axes_of(a) if isinstance(y.value, Axis)}, key=_age))
        body = tuple(substitute(b, table) for b in fold.body)
        items.append(replace(fold, id=len(items), kept=kept, reduce=tuple(fresh.values()), body=body))
        made[x] = make("value", tuple(axis(a) for a in kept), x.dtype, (len(items) - 1, x.value[1]))
        return made[x]

    for n in range(len(form.items)):
        i = items[n]
        body = tuple(transform(b, fit) for b in i.body)
        if body != i.body:
            items[n] = replace(items[n], body=body)
    return form if len(items) == len(form.items) else replace(form, items=tuple(items))


def _drop_dead(form: Form) -> Form:
    """Folds that nothing reads any more (all their readers took clones) go; numbers stay positions."""
    live: set[int] = set()
    todo = [i for i in form.items if not i.is_fold]
    while todo:
        for f in folds_read(todo.pop().roots):
            if f not in live:
                live.add(f)
                todo.append(form.items[f])
    kept = [i for i in form.items if not i.is_fold or i.id in live]
    number = {i.id: n for n, i in enumerate(kept)}

    def renumber(x: Expr) -> Expr | None:
        if x.op == "value" and isinstance(x.value, tuple):
            return make("value", tuple(transform(a, renumber) for a in x.args), x.dtype, (number[x.value[0]], x.value[1]))
        return None

    items = [replace(i, id=number[i.id], body=tuple(transform(b, renumber) for b in i.body)) for i in kept]
    return replace(form, items=tuple(items))


def _merge(form: Form) -> Form:
    """Fuse two classes into one wherever all addresses see them as one and nothing else looks at them."""
    while True:
        found = next(_mergeable(form), None)
        if found is None:
            return form
        form = _merged(form, *found)


def _mergeable(form: Form) -> Iterator[tuple[Axis, Axis]]:
    watched = _watched(form)
    scans = {i.scan for i in form.items if i.scan}
    for b in form.classes():
        for a in form.classes():
            if a == b or {a, b} & watched or {a, b} & scans:
                continue
            if all(_merges_in(i, a, b) for i in form.items):
                yield a, b


def _watched(form: Form) -> set[Axis]:
    """Classes that an expression looks at other than through an affine address."""
    found: set[Axis] = set()

    def look(e: Expr) -> None:
        if e.op == "axis" and isinstance(e.value, Axis):
            found.add(e.value)
        elif e.op == "read":
            affine = set(_terms(e.args[0]))
            found.update(x.value for x in axes_of(e.args[0]) if isinstance(x.value, Axis) and x.value not in affine)
            for x in walk(e.args[0]):
                if x.op == "read":
                    look(x)
        elif e.op != "value":
            for x in e.args:
                look(x)

    for i in form.items:
        for b in i.body:
            look(b)
        affine = set(_terms(i.offset))
        found.update(x.value for x in axes_of(i.offset) if isinstance(x.value, Axis) and x.value not in affine)
    return found


def _merges_in(i: Item, a: Axis, b: Axis) -> bool:
    sides = [(a in g, b in g) for g in (i.kept, i.reduce)]
    if any(x != y for x, y in sides):
        return False
    for _, offset in i.accesses():
        terms = _terms(offset)
        ca, cb = terms.get(a, dims.ZERO), terms.get(b, dims.ZERO)
        if ca is not dims.mul(cb, b.extent):
            return False
    return True


def _merged(form: Form, a: Axis, b: Axis) -> Form:
    age = 1 + max(_age(x) for i in form.items for x in i.axes)
    m = Axis(f"c{age}", dims.mul(a.extent, b.extent))
    table = {axis(a): dims.ZERO, axis(b): axis(m)}
    position = {i.id: i.kept.index(a) for i in form.items if i.is_fold and a in i.kept}

    def drop(x: Expr) -> Expr | None:
        if x.op != "value" or not isinstance(x.value, tuple) or x.value[0] not in position:
            return None
        at = position[x.value[0]]
        return make("value", tuple(substitute(y, table) for n, y in enumerate(x.args) if n != at), x.dtype, x.value)

    def apply(e: Expr) -> Expr:
        return substitute(transform(e, drop), table)

    pick = lambda group: tuple(m if x == b else x for x in group if x != a)  # noqa: E731
    items = [
        replace(i, kept=pick(i.kept), reduce=pick(i.reduce), body=tuple(map(apply, i.body)), offset=apply(i.offset))
        for i in form.items
    ]
    checks = {apply(k): tuple(map(apply, v)) for k, v in form.checks.items()}
    return replace(form, items=tuple(items), checks=checks)


