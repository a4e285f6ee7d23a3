"""What is decided of the loops of a kernel before any statement is written: pure functions to frozen values.

A plan takes the outermost class that is not bound, gives every fold over it and every output that uses it a pass, and
has one loop per pass. A pass belongs to folds and outputs only; pointwise expressions are evaluated wherever they are
needed. What stands inside a loop is planned there, where its class is bound.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright.analysis.contraction import Contraction, contraction
from tilewright.ir.expr import Axis, Expr, axes_of, walk
from tilewright.ir.form import Form, Item, folds_read
from tilewright.ir.schedule import Schedule

from .legality import block_lengths
from .passes import Merges, Numbers, pass_numbers
from .scratch import params_by_pass, worth_keeping


@dataclass(frozen=True, slots=True)
class Known:
    """What is known where loops are planned: the bound classes with their tiles, the folds that have results, and the
    expressions that have a place in scratch."""

    form: Form
    schedule: Schedule
    contractions: Mapping[int, Contraction]
    bound: Mapping[Axis, int] = field(default_factory=dict)
    folds: frozenset[int] = frozenset()
    kept: frozenset[Expr] = frozenset()


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """One loop over `axis`, which advances `folds` and stores `outputs`. `levels`: the lengths of blocks of which each
    has states of its own, outermost first. `before` is computed in front of it. With `continues` the states are those
    of a loop around it. `last_reads` are the parameters that it reads and no later pass does."""

    axis: Axis
    folds: tuple[Item, ...]
    outputs: tuple[Item, ...] = ()
    merges: Merges = field(default_factory=dict)
    levels: tuple[int, ...] = ()
    before: ScopePlan | None = None
    continues: bool = False
    last_reads: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ScopePlan:
    """What is written where some classes are bound: expressions that get a place in scratch, then loops, or, where all
    classes are bound, loads of what is read `early`, folds and outputs; and what is done after the loops."""

    kept: tuple[Expr, ...] = ()
    loops: tuple[LoopPlan, ...] = ()
    early: tuple[Expr, ...] = ()
    folds: tuple[Item, ...] = ()
    outputs: tuple[Item, ...] = ()
    after: ScopePlan | None = None


def contractions_of(form: Form, schedule: Schedule) -> dict[int, Contraction]:
    """The folds that are products of two blocks."""
    found = {i: contraction(t, form.params, lambda a: schedule.plan(a).tile) for i, t in form.folds.items()}
    return {i: product for i, product in found.items() if product is not None}


def plan_scope(known: Known, wanted: Collection[int], outputs: Sequence[Item]) -> ScopePlan:
    """What computes the folds `wanted` and stores `outputs`, given what is known."""
    cone = needed_folds(known, [*wanted, *(f for o in outputs for f in folds_read(o.roots))])
    users = [*cone, *outputs]
    classes = [c.axis for c in known.schedule.tiling.classes if c.axis not in known.bound]
    c = next((a for a in classes if any(a in u.axes for u in users)), None)
    if c is None:
        early = early_loads(known, cone, outputs) if cone else ()
        return ScopePlan(early=early, folds=tuple(cone), outputs=tuple(outputs))
    cone, passes, merges = _passes(known, cone, outputs, c)
    found = worth_keeping(cone, outputs, c, passes, known.schedule)
    kept = tuple(x for x in found if x not in known.kept)
    known = replace(known, kept=known.kept.union(kept))
    over = [i for i in cone if c in i.reduce or i.scan == c]
    here = [o for o in outputs if c in o.axes]
    numbers = sorted({passes[i.id] for i in (*over, *here)})
    read = params_by_pass([i for i in (*cone, *outputs) if c in i.axes], passes, known.kept)
    loops: list[LoopPlan] = []
    for n, q in enumerate(numbers):
        before = _free_folds(known, cone, c)
        known = known if before is None else _behind(known, before)
        later = frozenset[int]().union(*(read[r] for r in numbers[n + 1 :]))
        folds = tuple(i for i in over if passes[i.id] == q)
        stored = tuple(o for o in here if passes[o.id] == q)
        levels = _levels(known, c, folds, merges, continues=False)
        loops.append(LoopPlan(c, folds, stored, merges, levels, before, False, frozenset(read[q]) - later))
        known = replace(known, folds=known.folds.union(i.id for i in folds if i.scan is None))
    rest = [f.id for f in cone if c not in f.axes and f.id in wanted]
    after = plan_scope(known, rest, [o for o in outputs if c not in o.axes])
    return ScopePlan(kept, tuple(loops), after=None if after == ScopePlan() else after)


def plan_inner_loop(known: Known, c: Axis, folds: Sequence[Item], merges: Merges) -> LoopPlan:
    """The loop over `c` inside a loop over another class of the same `folds`."""
    whole = _whole_before(known, c, folds)
    before = plan_scope(known, whole, []) if whole else None
    levels = _levels(known, c, folds, merges, continues=True)
    return LoopPlan(c, tuple(folds), (), merges, levels, before, True)


def split_body(known: Known, loop: LoopPlan) -> tuple[list[Item], dict[Axis, list[Item]]]:
    """The folds of a loop that a step of it advances, and those that a loop inside it does, by its class."""
    here: list[Item] = []
    inner: dict[Axis, list[Item]] = {}
    for t in loop.folds:
        classes = (c.axis for c in known.schedule.tiling.classes)
        rest = next((a for a in classes if a in t.reduce and a not in known.bound), None)
        (here if rest is None else inner.setdefault(rest, [])).append(t)
    return here, inner


def needed_folds(known: Known, roots: Iterable[int]) -> list[Item]:
    """Folds needed for `roots` and not known, producers first."""
    order: list[Item] = []
    seen: set[int] = set()

    def visit(f: int) -> None:
        if f in seen or f in known.folds:
            return
        seen.add(f)
        for d in folds_read(known.form.items[f].roots):
            visit(d)
        order.append(known.form.items[f])

    for r in roots:
        visit(r)
    return order


def early_loads(known: Known, folds: Sequence[Item], outputs: Sequence[Item]) -> tuple[Expr, ...]:
    """What `folds` and outputs read, if what only outputs read is no more than what the folds do: memory is waited for
    once, not again behind them."""
    first = dict.fromkeys(r for f in folds for b in f.body for r in plain_reads(b))
    inside = {x for f in folds for root in f.roots for x in walk(root)}
    found = dict.fromkeys(r for o in outputs for r in plain_reads(o.body[0]) if r not in inside)
    most = min(known.schedule.memory.hoisted_bytes, _block_bytes(known, first))
    return (*first, *found) if found and _block_bytes(known, found) <= most else ()


def plain_reads(e: Expr) -> list[Expr]:
    """What `e` reads whatever the values of conditions and folds are."""
    found: dict[Expr, None] = {}
    seen: set[Expr] = set()
    todo = [e]
    while todo:
        x = todo.pop()
        if x in seen or x.op in ("where", "checked", "value"):
            continue
        seen.add(x)
        if x.op != "read":
            todo += reversed(x.args)
        elif all(y.op not in ("value", "read", "checked") for a in x.args for y in walk(a)):
            found[x] = None
    return list(found)


def _block_bytes(known: Known, reads: Iterable[Expr]) -> int:
    """Bytes of the blocks that are read."""
    size = 0
    for r in reads:
        assert isinstance(r.value, int)
        block = math.prod(known.bound.get(a.value, 1) for a in axes_of(r) if isinstance(a.value, Axis))
        size += block * known.form.params[r.value].dtype.bytes
    return size


def _passes(
    known: Known, cone: list[Item], outputs: Sequence[Item], c: Axis
) -> tuple[list[Item], Numbers, Merges]:
    """Pass numbers along `c`; the cone, with what merged folds need beside them; how folds are merged."""
    reductions = known.schedule.reductions
    free = {f: i for f, i in known.form.folds.items() if f not in known.folds} if reductions.online else None
    while True:
        numbers, merges = pass_numbers(cone, outputs, c, free, reductions.merged_each_step)
        inside = {i.id for i in cone}
        beside = [f for m in merges.values() for f in m.beside if f not in inside]
        if not beside:
            return cone, numbers, merges
        cone = needed_folds(known, [*(i.id for i in cone), *beside])


def _free_folds(known: Known, cone: Sequence[Item], c: Axis) -> ScopePlan | None:
    """Before a loop over `c`: what computes folds that do not use it and wait for nothing that does."""
    ready: list[int] = []
    for i in cone:
        waits = any(d not in known.folds and d not in ready for d in folds_read(i.roots))
        if i.id not in known.folds and c not in i.axes and not waits:
            ready.append(i.id)
    return plan_scope(known, ready, []) if ready else None


def _behind(known: Known, plan: ScopePlan) -> Known:
    """What is known where all of a plan has been written."""
    kept, folds = set(plan.kept), {f.id for f in plan.folds}
    for loop in plan.loops:
        if loop.before is not None:
            known = _behind(known, loop.before)
        folds.update(f.id for f in loop.folds if f.scan is None)
    known = replace(known, folds=known.folds.union(folds), kept=known.kept.union(kept))
    return known if plan.after is None else _behind(known, plan.after)


def _levels(
    known: Known, c: Axis, folds: Sequence[Item], merges: Merges, *, continues: bool
) -> tuple[int, ...]:
    """The lengths of blocks with states of their own, so that no sum in floating point is one long chain."""
    rescaled = any(t.id in merges and t.id in known.contractions for t in folds)
    plain = not any(t.id in merges or t.id in known.contractions for t in folds)
    if not plain if continues else rescaled:
        return ()
    return tuple(block_lengths(c, folds, known.schedule, nested=plain))


def _whole_before(known: Known, c: Axis, folds: Iterable[Item]) -> list[int]:
    """The folds that `folds` read in a loop over `c`, but that need all of `c` themselves, or what they are made of
    does: a step of that loop has a part of it only."""
    found: dict[int, None] = {}
    todo = list(dict.fromkeys(f for t in folds for f in folds_read(t.roots)))
    for f in todo:
        if c in known.form.items[f].kept:
            todo += [d for d in folds_read(known.form.items[f].roots) if d not in todo]
        elif any(c in g.reduce for g in needed_folds(known, [f])):
            found[f] = None
    return list(found)
