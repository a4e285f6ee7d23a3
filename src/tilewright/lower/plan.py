"""Which loops a kernel has, as data, before any statement is written: pure functions to frozen values that print.

A scope takes the outermost class that is not bound, gives every fold over it and every output that uses it a pass, and
has one loop per pass. A pass belongs to folds and outputs only; pointwise expressions are evaluated wherever they are
needed. So a step of a loop has loops of its own for the folds that it reads and finds without a result.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright.analysis.contraction import Contraction, contraction
from tilewright.analysis.data_masks import jumping_masks, listing_hints
from tilewright.analysis.loop_segments import Hidden, hidden_by
from tilewright.form.implied import drop_implied
from tilewright.ir.expr import Axis, Expr, axes_of, walk
from tilewright.ir.form import Form, Item, folds_read
from tilewright.ir.schedule import Role, Schedule
from tilewright.ir.sizes import dims

from .legality import block_lengths
from .passes import Merges, Numbers, moving_folds, pass_numbers
from .scratch import choose_scratch, params_by_pass


@dataclass(frozen=True, slots=True)
class LoopContext:
    """What is known where loops are planned: the form, also with the conditions that are implied; the bound classes
    with their tiles, the folds that have results, the expressions that have a place in scratch, those of them whose
    loop is complete, and the parameters whose loads fetch what the next grid point reads."""

    form: Form
    hinted: Form
    schedule: Schedule
    contractions: Mapping[int, Contraction]
    bound: Mapping[Axis, int] = field(default_factory=dict)
    folds: frozenset[int] = frozenset()
    kept: frozenset[Expr] = frozenset()
    ready: frozenset[Expr] = frozenset()
    fetching: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """One loop over `axis` in steps of `tile`, which advances `folds` and stores `outputs`. Without an axis all classes
    are bound: that is done once, in the tile."""

    axis: Axis | None
    folds: tuple[Item, ...] = ()
    outputs: tuple[Item, ...] = ()
    tile: int = 1
    scratch: tuple[Expr, ...] = ()
    """Expressions that get a place in scratch in front of it."""
    hoisted: tuple[Expr, ...] = ()
    """Reads that are loaded first, so that memory is waited for once."""
    fetching: frozenset[int] = frozenset()
    """The parameters whose loads fetch what the next grid point reads: no later pass reads them."""
    merges: Merges = field(default_factory=dict)
    """How folds run beside the folds that they read."""
    levels: tuple[int, ...] = ()
    """The lengths of blocks of which each has states of its own, outermost first."""
    continues: bool = False
    """Whether the states are those of a loop around it."""
    reached: tuple[Item, ...] = ()
    """What its steps evaluate: its items, and the folds that they read and that have no result yet."""
    tiled: bool = False
    """Whether its range is cut at whole tiles, in one loop for each; else wherever conditions change."""
    split: bool = False
    """Whether tiles in which no lane is masked run apart from the others."""
    hidden: Hidden = Hidden()
    """Where it is tiled: the conditions of which a tile must fulfil each somewhere. Its range ends by those of which
    that is known ahead."""
    listed: tuple[Expr, ...] = ()
    """Implied conditions that come with a list of tiles: the first whose list serves the rows here is followed."""
    skipped: tuple[tuple[Expr, bool], ...] = ()
    """Conditions on data, each with the truth without which a step changes nothing: it is jumped over."""
    advanced: tuple[Item, ...] = ()
    """The folds that a step advances itself."""
    asked: tuple[AskedFold, ...] = ()
    """What a step computes where it first reads it, in that order."""
    inside: tuple[LoopPlan, ...] = ()
    """The loops behind that, of a step: over further classes of its folds, then those of its outputs."""

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@dataclass(frozen=True, slots=True)
class AskedFold:
    """The loops that compute `fold` where the folds `known` have results."""

    fold: int
    known: frozenset[int]
    loops: tuple[LoopPlan, ...]


def plan_loops(form: Form, schedule: Schedule) -> tuple[LoopPlan, ...]:
    """The loops of a grid point, in order, with all that stand inside them."""
    known = known_at_start(form, schedule)
    return plan_scope(known, (), known.form.outputs)


def known_at_start(form: Form, schedule: Schedule) -> LoopContext:
    """What a grid point knows: classes that are one value or one block of it are bound."""
    plain = drop_implied(form)
    found = {i: contraction(t, plain.params, lambda a: schedule.plan(a).tile) for i, t in plain.folds.items()}
    products = {i: product for i, product in found.items() if product is not None}
    bound: dict[Axis, int] = {}
    for c in schedule.tiling.classes:
        block = c.tile == c.chunk and (products or not schedule.tiling.peel)
        if c.role is Role.RESIDENT or (c.role is Role.GRID and (block or not c.chunk)):
            bound[c.axis] = c.tile if c.chunk or c.role is Role.RESIDENT else 1
    fetching = frozenset(s.param for s in schedule.memory.next_point)
    return LoopContext(plain, form, schedule, products, bound, fetching=fetching)


def plan_scope(known: LoopContext, wanted: Collection[int], outputs: Sequence[Item]) -> tuple[LoopPlan, ...]:
    """What computes the folds `wanted` and stores `outputs`, given what is known."""
    cone = needed_folds(known, [*wanted, *(f for o in outputs for f in folds_read(o.roots))])
    c = _first_open(known, [*cone, *outputs])
    if c is None:
        hoisted = hoisted_loads(known, cone, outputs) if cone else ()
        done = LoopPlan(None, tuple(cone), tuple(outputs), hoisted=hoisted, fetching=known.fetching)
        return (done,) if cone or outputs else ()
    cone, passes, merges = _passes(known, cone, outputs, c)
    chosen = choose_scratch(cone, outputs, c, passes, known.schedule, known.form.sizes)
    in_scratch = [x for x in chosen if x not in known.kept]
    known, around = replace(known, kept=known.kept.union(in_scratch)), known.fetching
    over = [i for i in cone if c in i.reduce or i.scan == c]
    here = [o for o in outputs if c in o.axes]
    numbers = sorted({passes[i.id] for i in (*over, *here)})
    read = params_by_pass([i for i in (*cone, *outputs) if c in i.axes], passes, known.kept)
    plans: list[LoopPlan] = []
    for n, q in enumerate(numbers):
        before = _free_folds(known, cone, c)
        later = frozenset[int]().union(*(read[r] for r in numbers[n + 1 :]))
        known = replace(_behind(known, before), fetching=around & read[q] - later)
        folds = [i for i in over if passes[i.id] == q]
        loop = plan_loop(known, c, folds, [o for o in here if passes[o.id] == q], merges)
        plans += [*before, loop]
        known = _behind(known, (loop,))
    rest = [f.id for f in cone if c not in f.axes and f.id in wanted]
    known = replace(known, fetching=around)
    plans += plan_scope(known, rest, [o for o in outputs if c not in o.axes])
    return (replace(plans[0], scratch=(*in_scratch, *plans[0].scratch)), *plans[1:]) if plans else ()


def plan_loop(
    known: LoopContext, c: Axis, folds: Sequence[Item], outputs: Sequence[Item], merges: Merges,
    continues: bool = False,
) -> LoopPlan:  # fmt: skip
    """One loop over `c`; it `continues` the states of a loop around it, or has its own."""
    reductions, tiling, tile = known.schedule.reductions, known.schedule.tiling, known.schedule.plan(c).tile
    reached = [j for i in (*folds, *outputs) for j in (*needed_folds(known, folds_read(i.roots)), i)]
    product = any(c in i.axes and i.id in known.contractions for i in reached)
    # Lanes have states that depend on each other, which a mask makes dear.
    joint = reductions.lane_states and any(t.id in merges or takes_one_each(known.schedule, t) for t in folds)
    trimmed = [known.hinted.items[t.id] for t in folds] if reductions.trim and not outputs else []
    roots = [r for i in reached for r in known.hinted.items[i.id].roots]
    tiled = product or not tiling.peel
    inner = replace(known, bound={**known.bound, c: tile})
    advanced = [t for t in folds if _first_open(inner, (t,), reduced=True) is None]
    asked, inner = _plan_reads(inner, advanced, merges)
    jumps = jumping_masks(folds, c) if reductions.skip_hidden and trimmed else ()
    return LoopPlan(
        c,
        tuple(folds),
        tuple(outputs),
        tile,
        fetching=known.fetching,
        merges=merges,
        levels=_levels(known, c, folds, merges, continues=continues),
        continues=continues,
        reached=tuple(reached),
        tiled=tiled,
        split=product or joint,
        hidden=hidden_by(roots, trimmed, c) if tiled else Hidden(),
        listed=listing_hints(roots, trimmed, c) if tiled else (),
        # A mask that reads along a class of a loop further in is known only there.
        skipped=tuple((x, t) for x, t in jumps if all(a.value in inner.bound for a in axes_of(x))),
        advanced=tuple(advanced),
        asked=asked,
        inside=_plan_inside(inner, [t for t in folds if t not in advanced], outputs, merges),
    )


def _plan_inside(
    known: LoopContext, folds: Sequence[Item], outputs: Sequence[Item], merges: Merges
) -> tuple[LoopPlan, ...]:
    """What a step does behind the folds that it advances itself: the loops over further classes of `folds`, and what
    stores `outputs`."""
    groups: dict[Axis, list[Item]] = {}
    for t in folds:
        c = _first_open(known, (t,), reduced=True)
        assert c is not None
        groups.setdefault(c, []).append(t)
    plans: list[LoopPlan] = []
    for c, group in groups.items():
        before = plan_scope(known, _complete_before(known, c, group), ())
        known = _behind(known, before)
        plans += [*before, plan_loop(known, c, group, (), merges, True)]
    return (*plans, *plan_scope(known, (), outputs))


def _plan_reads(
    known: LoopContext, folds: Sequence[Item], merges: Merges
) -> tuple[tuple[AskedFold, ...], LoopContext]:
    """What a step that advances `folds` computes where it reads it, and what is known behind them."""
    own = {t.id: merges[t.id] for t in folds if t.id in merges}
    moving = moving_folds(own)
    shown = frozenset(f for m in own.values() for f in m.statistics)
    asked: list[AskedFold] = []
    first = [t for t in folds if t.scan is not None]
    second = [t for t in folds if t.scan is None and t.id in moving]
    for group in (first, second, [t for t in folds if t not in first and t not in second]):
        for t in group:
            for f in _values(known, t.body):
                if f not in known.folds:
                    loops = plan_scope(known, (f,), ())
                    asked.append(AskedFold(f, known.folds, loops))
                    known = _behind(known, loops)
            known = replace(known, folds=known.folds | {t.id}) if t.scan is not None else known
        known = known if group is first else replace(known, folds=known.folds | shown)
    return tuple(asked), known


def _values(known: LoopContext, roots: Sequence[Expr]) -> list[int]:
    """The folds that are read where `roots` are evaluated, in that order."""
    found: dict[int, None] = {}
    seen: set[Expr] = set()
    todo = [*reversed(roots)]
    while todo:
        x = todo.pop()
        if x not in seen and x not in known.ready:
            seen.add(x)
            todo += reversed(x.args)
            if x.op == "value" and isinstance(x.value, tuple):
                found[x.value[0]] = None
    return list(found)


def _first_open(known: LoopContext, items: Sequence[Item], *, reduced: bool = False) -> Axis | None:
    """The outermost class of `items` that is not bound; of those that they fold over if `reduced`."""
    used = {a for i in items for a in (i.reduce if reduced else i.axes)}.difference(known.bound)
    return next((c.axis for c in known.schedule.tiling.classes if c.axis in used), None)


def needed_folds(known: LoopContext, roots: Iterable[int]) -> list[Item]:
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


def hoisted_loads(known: LoopContext, folds: Sequence[Item], outputs: Sequence[Item]) -> tuple[Expr, ...]:
    """What `folds` and outputs read, if what only outputs read is no more than what the folds do: memory is waited for
    once, not again behind them. Else what those folds read that wait for no other, and what fits of the rest."""
    first = dict.fromkeys(r for f in folds for b in f.body for r in plain_reads(b))
    inside = {x for f in folds for root in f.roots for x in walk(root)}
    found = dict.fromkeys(r for o in outputs for r in plain_reads(o.body[0]) if r not in inside)
    most = known.schedule.memory.hoisted_bytes
    if found and _block_bytes(known, found) <= min(most, _block_bytes(known, first)):
        return (*first, *found)
    numbers = {f.id for f in folds}
    waiting = [f for f in folds if numbers.intersection(folds_read(f.roots))]
    early = dict.fromkeys(r for f in folds if f not in waiting for b in f.body for r in plain_reads(b))
    hoisted: list[Expr] = []
    for r in first:
        if r not in early and _block_bytes(known, (*hoisted, r)) <= most:
            hoisted.append(r)
    return (*early, *hoisted) if hoisted else ()


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


def _block_bytes(known: LoopContext, reads: Iterable[Expr]) -> int:
    """Bytes of the blocks that are read."""
    size = 0
    for r in reads:
        assert isinstance(r.value, int)
        block = math.prod(known.bound.get(a.value, 1) for a in axes_of(r) if isinstance(a.value, Axis))
        size += block * known.form.params[r.value].dtype.bytes
    return size


def _passes(
    known: LoopContext, cone: list[Item], outputs: Sequence[Item], c: Axis
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


def _free_folds(known: LoopContext, cone: Sequence[Item], c: Axis) -> tuple[LoopPlan, ...]:
    """Before a loop over `c`: what computes folds that do not use it and wait for nothing that does."""
    ready: list[int] = []
    for i in cone:
        waits = any(d not in known.folds and d not in ready for d in folds_read(i.roots))
        if i.id not in known.folds and c not in i.axes and not waits:
            ready.append(i.id)
    return plan_scope(known, ready, ())


def _behind(known: LoopContext, plans: Sequence[LoopPlan]) -> LoopContext:
    """What is known where all of `plans` has been written."""
    for p in plans:
        complete = {f.id for f in p.folds if not p.continues and (p.axis is None or f.scan is None)}
        in_scratch = known.kept.union(p.scratch)
        left = (
            in_scratch.intersection(x for i in p.reached for r in i.roots for x in walk(r))
            if in_scratch
            else ()
        )
        ready = known.ready if p.continues else known.ready.union(left)
        known = replace(known, folds=known.folds | complete, kept=in_scratch, ready=ready)
    return known


def _levels(
    known: LoopContext, c: Axis, folds: Sequence[Item], merges: Merges, *, continues: bool
) -> tuple[int, ...]:
    """The lengths of blocks with states of their own, so that no sum in floating point is one long chain."""
    rescaled = any(t.id in merges and t.id in known.contractions for t in folds)
    plain = not any(t.id in merges or t.id in known.contractions for t in folds)
    if not plain if continues else rescaled:
        return ()
    return tuple(block_lengths(c, folds, known.schedule, nested=plain))


def _complete_before(known: LoopContext, c: Axis, folds: Iterable[Item]) -> list[int]:
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


def takes_one_each(schedule: Schedule, t: Item) -> bool:
    """Whether a step gives each lane of a fold one element, in a way of its own."""
    assert t.reduction is not None
    alone = schedule.per_lane(t.id) and not any(a in t.reduce for a in schedule.reductions.merged_each_step)
    return bool(t.reduction.step) and alone and t.scan is None


def _lines(plan: LoopPlan) -> Iterator[str]:
    """A plan as text, a step a line."""
    yield from (f"keep {x}" for x in plan.scratch)
    if plan.axis is None:
        yield from (f"load {x}" for x in plan.hoisted)
        yield from (f"fold {_fold_text(f)}" for f in plan.folds)
        yield from (f"store p{o.param}" for o in plan.outputs)
        return
    levels = f", in blocks of {', '.join(map(str, plan.levels))}" if plan.levels else ""
    uneven = plan.tile > 1 and not dims.divisible(plan.axis.extent, plan.tile)
    rest = ", the rest apart" if uneven and not plan.tiled else ""
    cut = ", unmasked tiles apart" if plan.tiled and plan.split else rest
    ahead = f", fetching {', '.join(f'p{k}' for k in sorted(plan.fetching))}" if plan.fetching else ""
    yield f"for {plan.axis.name} by {plan.tile}{levels}{cut}{ahead}"
    yield from (f"  hidden unless {x}" for x in plan.hidden.shown if x not in plan.listed)
    yield from (f"  tiles by the list {x.args[1]}" for x in plan.listed)
    yield from (f"  jump unless {x if truth else f'not {x}'}" for x, truth in plan.skipped)
    for loop in (p for a in plan.asked for p in a.loops):
        yield from (f"  {line}" for line in _lines(loop))
    for t in plan.advanced:
        merge = plan.merges.get(t.id)
        beside = f", rescaled by {', '.join(f'${f}' for f in merge.statistics)}" if merge else ""
        yield f"  advance {_fold_text(t)}{beside}"
    for loop in plan.inside:
        yield from (f"  {line}" for line in _lines(loop))


def _fold_text(t: Item) -> str:
    assert t.reduction is not None
    return f"${t.id} by {t.reduction.name}"
