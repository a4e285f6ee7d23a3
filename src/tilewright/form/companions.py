"""Folds that others need beside them to run in one pass: what the online law says about the folds of a form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from tilewright.analysis.online.cascade import Link
from tilewright.analysis.online.law import Law, Refusal, RescaledState, derive
from tilewright.analysis.online.running import Upstream
from tilewright.ir.expr import Axis, Expr, axes_of, axis, call, cast, const, make, slot, substitute, walk
from tilewright.ir.form import Form, Item, folds_read
from tilewright.ir.reduction import Reduction
from tilewright.ir.schedule import Role, Schedule
from tilewright.ir.sizes import dims


@dataclass(frozen=True, slots=True)
class Merge:
    """A fold that runs beside the folds it reads: its law, the fold behind each statistic, the fold that holds each
    state, and the fold that counts elements, where a running mean is a statistic."""

    law: Law
    statistics: tuple[int, ...]
    states: tuple[int, ...]
    count: int | None = None

    total: Expr | None = None
    """How many elements there are in all, where they are counted."""

    @property
    def beside(self) -> tuple[int, ...]:
        """The other folds that have to run in the same pass."""
        counts = () if self.count is None else (self.count,)
        return tuple(dict.fromkeys((*self.states[1:], *counts)))


def follow(fold: Item, upstream: Sequence[Item], folds: Mapping[int, Item]) -> Merge | None:
    """How `fold` runs beside the folds `upstream` over the same class, if it can with what is among `folds`."""
    law = law_of(fold, upstream)
    if isinstance(law, Refusal) or law.hazard or not law.direct or not law.statistics:
        return None
    number = {leaf_of(u): u.id for u in upstream}
    states = [fold.id]
    for s in law.states[1:]:
        found = _holder(s, law, fold, upstream, folds)
        if found is None:
            return None
        states.append(found)
    count = _counter(fold, folds) if any(g.centred for g in law.statistics) else None
    if count is None and any(g.centred for g in law.statistics):
        return None
    total = None if count is None else _number(fold)
    return Merge(law, tuple(number[g.leaf] for g in law.statistics), tuple(states), count, total)


def _number(fold: Item) -> Expr:
    """How many elements `fold` has for one result, as a number of their type."""
    extent, dtype = dims.prod(a.extent for a in fold.reduce), fold.body[0].dtype
    size = dims.static(extent)
    return const(size, dtype) if size is not None else cast(extent, dtype)


def links_of(items: Sequence[Item]) -> tuple[Link, ...] | None:
    """The folds `items` over the same class (those that follow nobody first) as a cascade, if each of the others
    follows those that it reads, and nothing else than states is needed to merge."""
    inside = {i.id: i for i in items}
    place = {i.id: k for k, i in enumerate(items)}
    made: list[Link] = []
    for i in items:
        assert i.reduction is not None
        link = Link(leaf_of(i), i.reduction)
        upstream = [inside[d] for d in folds_read(i.body) if d in inside]
        merge = follow(i, upstream, inside) if upstream else None
        if merge is not None and all(g.closed for g in merge.law.statistics):
            statistics, states = (
                tuple(place[f] for f in group) for group in (merge.statistics, merge.states)
            )
            count = None if merge.count is None else place[merge.count]
            link = replace(
                link, law=merge.law, statistics=statistics, states=states, count=count, total=merge.total
            )
        elif upstream:
            return None
        made.append(link)
    return tuple(made)


def law_of(fold: Item, upstream: Sequence[Item]) -> Law | Refusal:
    """The online law of `fold` and the folds `upstream` that it reads."""
    if fold.reduction is None or fold.scan is not None or any(u.scan is not None for u in upstream):
        return Refusal("one order", "a running reduction is read at its own step")
    if any(u.reduce != fold.reduce or u.reduction is None for u in upstream):
        return Refusal("one axis", "it reads a reduction over other axes")
    own = {(leaf_of(u)) for u in upstream}
    numbers = {u.id for u in upstream}
    for x in (x for b in fold.body for x in walk(b) if x.op == "value"):
        if isinstance(x.value, tuple) and x.value[0] in numbers and x not in own:
            return Refusal("one element", "it reads a reduction elsewhere than at its own place")
    return _law(fold.reduction, fold.body, tuple(_upstream(u) for u in upstream), fold.reduce)


@lru_cache(1 << 11)
def _law(
    reduction: Reduction, body: tuple[Expr, ...], upstream: tuple[Upstream, ...], over: tuple[Axis, ...]
) -> Law | Refusal:
    return derive(reduction, body, upstream, over)


def _upstream(u: Item) -> Upstream:
    assert u.reduction is not None
    return Upstream(leaf_of(u), u.reduction, u.body)


def leaf_of(u: Item) -> Expr:
    """The first result of a fold where it stands."""
    assert u.reduction is not None
    return make("value", tuple(map(axis, u.kept)), u.reduction.results[0].compute, (u.id, 0))


def _holder(
    state: RescaledState, law: Law, fold: Item, upstream: Sequence[Item], folds: Mapping[int, Item]
) -> int | None:
    """A fold whose result is `state`."""
    wanted = _named(state, law)
    for f in folds.values():
        if f.reduce != fold.reduce or f.reduction != state.reduction or not set(f.kept) <= set(fold.kept):
            continue
        own = [u for u in upstream if u.id in folds_read(f.body)]
        its = law_of(f, own)
        if isinstance(its, Law) and its.direct and not its.hazard and _named(its.states[0], its) == wanted:
            return f.id
    return None


def _named(state: RescaledState, law: Law) -> dict[object, Fraction]:
    """A state as terms over what the statistics read, instead of their numbers."""
    named: dict[object, Fraction] = {}
    for m, q in state.terms:
        powers = frozenset((law.statistics[g].through, k) for g, k in m.powers)
        rates = frozenset((law.statistics[g].through, base, k) for (g, base), k in m.rates)
        named[m.data, powers, rates] = q
    return named


def _counter(fold: Item, folds: Mapping[int, Item]) -> int | None:
    """A fold that counts the elements of `fold`."""
    for f in folds.values():
        if (
            f.reduce == fold.reduce
            and not f.kept
            and f.reduction is not None
            and f.reduction.combiner == "add"
        ):
            if f.body[0].op == "const" and f.body[0].value == 1 and f.body[0].dtype is fold.body[0].dtype:
                return f.id
    return None


def with_companions(form: Form) -> Form:
    """`form` with its cascaded folds written as the states that the online law asks for: factors of complete results
    applied at the end, and folds added that others need beside them. What the law refuses stays as it is."""
    items = list(form.items)
    done: set[int] = set()

    def visit(number: int) -> None:
        if number not in done:
            done.add(number)
            for d in folds_read(items[number].body):
                visit(d)
            _rewrite(items, number)

    for i in form.folds:
        visit(i)
    return replace(form, items=tuple(items))


@dataclass(frozen=True, slots=True)
class LaterPass:
    """Why a fold runs after `others` that it reads; folds by the places of their ops in the kernel."""

    fold: int
    others: tuple[int, ...]
    why: str


def refusals(form: Form, schedule: Schedule) -> tuple[LaterPass, ...]:
    """Why folds along streamed classes run after the folds that they read."""
    found: dict[LaterPass, None] = {}
    for fold in form.folds.values():
        upstream = [
            form.items[d] for d in folds_read(fold.body) if set(form.items[d].reduce) & set(fold.reduce)
        ]
        if not upstream or all(schedule.plan(c).role is not Role.STREAMED for c in fold.reduce):
            continue
        law = law_of(fold, upstream)
        why = (law.law, law.reason) if isinstance(law, Refusal) else ("safe statistic", law.hazard)
        others = tuple(dict.fromkeys(u.source for u in upstream if u.source >= 0))
        if why[1] and fold.source >= 0:
            found[LaterPass(fold.source, others, f"no {why[0]}: {why[1]}")] = None
    return tuple(found)


def _rewrite(items: list[Item], number: int) -> None:
    fold = items[number]
    if len(fold.reduce) != 1:
        return
    upstream = [items[d] for d in folds_read(fold.body) if items[d].reduce == fold.reduce]
    law = law_of(fold, upstream)
    if not upstream or isinstance(law, Refusal) or law.hazard:
        return
    if any(g.centred for g in law.statistics) and _counter(fold, _folds(items)) is None:
        _append(items, fold, RescaledState(law.states[0].reduction, const(1.0, fold.body[0].dtype), ()))
    if not law.direct:
        body = _as_beside(law.states[0].body, fold, items)
        items[number] = fold = replace(fold, body=(body,), reduction=law.states[0].reduction)
    leaves = [leaf_of(fold)]
    for s in law.states[1:]:
        found = _holder(s, law, fold, upstream, _folds(items))
        leaves.append(leaf_of(items[_append(items, fold, s) if found is None else found]))
    if not law.direct:
        table = {slot("a", k, e.dtype): e for k, e in enumerate(leaves)}
        _replace(items, fold, substitute(law.finish, table))


def _as_beside(body: Expr, fold: Item, items: Sequence[Item]) -> Expr:
    """`body` with the exponentials that other folds over the same class read written as they stand there: the law
    draws a common factor out of the exponent, and two forms of one exponential would be computed twice."""
    table: dict[Expr, Expr] = {}
    for f in items:
        if f.is_fold and f.id != fold.id and f.reduce == fold.reduce:
            table |= {_drawn(x): x for b in f.body for x in walk(b) if x.op == "exp"}
    return substitute(body, table)


def _drawn(exponential: Expr) -> Expr:
    """exp(a * c - b * c) as exp((a - b) * c)."""
    (e,) = exponential.args
    if e.op != "sub" or any(x.op != "mul" or x.args[1].op != "const" for x in e.args):
        return exponential
    (a, c), (b, d) = e.args[0].args, e.args[1].args
    return call("exp", call("mul", call("sub", a, b), c)) if c is d else exponential


def _folds(items: Sequence[Item]) -> dict[int, Item]:
    return {i.id: i for i in items if i.is_fold}


def _append(items: list[Item], fold: Item, state: RescaledState) -> int:
    """A fold of `state` over the class of `fold`."""
    used = axes_of(state.body)
    kept = tuple(a for a in fold.kept if axis(a) in used)
    items.append(Item(len(items), kept, (state.body,), fold.reduce, state.reduction))
    return items[-1].id


def _replace(items: list[Item], fold: Item, result: Expr) -> None:
    """Read `result` instead of the fold's own, whatever place is read."""

    def read(x: Expr) -> Expr:
        return substitute(result, dict(zip(map(axis, fold.kept), x.args, strict=True)))

    for k, i in enumerate(items):
        reads = {x for r in i.roots for x in walk(r) if x.op == "value" and x.value == (fold.id, 0)}
        if reads:
            table = {x: read(x) for x in reads}
            items[k] = replace(i, body=tuple(substitute(b, table) for b in i.body))
