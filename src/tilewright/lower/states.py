"""The states of folds: how they are declared, advanced by the elements of a step, merged over lanes and finished."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tilewright.analysis.contraction import Contraction, stored_half
from tilewright.analysis.predicate import Truths, decide
from tilewright.ir.dtype import i64
from tilewright.ir.expr import (
    Axis,
    Expr,
    Slot,
    axes_of,
    axis,
    call,
    conjuncts,
    const,
    make,
    slot,
    substitute,
    walk,
    where,
)
from tilewright.ir.form import Item
from tilewright.ir.program import Collapse, Compute, Declare, Dot, Load, Prefix, Update, Var, value_of
from tilewright.ir.reduction import Reduction, highest, maximum, minimum, simple, sum_
from tilewright.ir.sizes import dims

from .evaluate import Evaluator
from .plan import takes_one_each

IDEMPOTENT = frozenset({"maximum", "minimum", "and", "or"})
"""What merges equal values into the same one: of lanes that are alike one is enough."""


def declare_state(ev: Evaluator, t: Item, thin: bool = False) -> None:
    """Declare the state of a fold; `thin`: `widen` is asked before each loop that advances it."""
    assert t.reduction is not None
    kept = tuple(a for a in t.kept if a != t.scan)
    lanes = t.reduce if ev.schedule.per_lane(t.id) and t.id not in ev.contractions else ()
    folded = [a for a in lanes if a not in ev.schedule.reductions.merged_each_step]
    blocks = tuple(a for a in (*kept, *folded) if tile_of(ev, a) > 1)
    axes = [blocks] * len(t.reduction.state)
    if thin and takes_one_each(ev.schedule, t):
        axes = [tuple(a for a in blocks if a in used) for used in spread(t, None)]
    names = tuple(ev.var(d.compute, own) for d, own in zip(t.reduction.state, axes, strict=True))
    ev.states[t.id] = names
    ev.out.append(Declare(names, t.reduction.identity))


def widen_state(ev: Evaluator, t: Item, c: Axis, truths: Truths, mask: Expr | None) -> None:
    """Give values of a state that are the same in many lanes, such as how many elements these have seen, all axes
    along which they differ in a loop over `c` where `truths` hold and lanes outside `mask` see nothing."""
    if not takes_one_each(ev.schedule, t):
        return
    old = ev.states[t.id]
    wanted = [used | ({c} if mask is not None else set()) for used in spread(t, truths)]
    most = dict.fromkeys(a for v in old for a in v.axes)
    axes = [tuple(a for a in most if a in v.axes or a in used) for v, used in zip(old, wanted, strict=True)]
    if any(len(own) > len(v.axes) for own, v in zip(axes, old, strict=True)):
        ev.states[t.id] = tuple(ev.var(v.dtype, own) for v, own in zip(old, axes, strict=True))
        ev.out.append(Declare(ev.states[t.id], tuple(value_of(v) for v in old)))


def tile_of(ev: Evaluator, a: Axis) -> int:
    """The tile of a class, bound or not."""
    return ev.scope.bound.get(a) or ev.schedule.plan(a).tile


def lift_elements(ev: Evaluator, t: Item) -> tuple[Expr, ...]:
    """The states of a fold's elements, one each."""
    assert t.reduction is not None
    return t.reduction.lifted([ev.eval(b) for b in t.body])


def step_elements(ev: Evaluator, t: Item) -> tuple[Sequence[Expr], Expr | None]:
    """The states of a step's elements and the mask of those that count: one per lane, or all merged into one."""
    mask = ev.tail(t.reduce)
    lifted = lift_elements(ev, t)
    assert t.reduction is not None
    if all(tile_of(ev, a) == 1 for a in t.reduce):
        return lifted, mask
    if ev.schedule.per_lane(t.id):
        near = [a for a in t.reduce if a in ev.schedule.reductions.merged_each_step]
        if not near:
            return lifted, mask
        parts = mask_parts(ev, t, lifted, mask)
        return [value_of(v) for v in collapse(ev, t.reduction, parts, near)], None
    return [value_of(v) for v in merge_lanes(ev, t, mask_parts(ev, t, lifted, mask))], None


def mask_parts(ev: Evaluator, t: Item, lifted: Sequence[Expr], mask: Expr | None) -> tuple[Var, ...]:
    """The block of the states of elements, with the identity where `mask` does not hold."""
    assert t.reduction is not None
    blocks = tuple(a for a in t.axes if ev.scope.bound[a] > 1)
    if mask is not None:
        states = enumerate(zip(lifted, t.reduction.identity, strict=True))
        lifted = [
            e if k and needs_no_mask(ev, t) or load_identity(ev, i, e, mask) else call("where", mask, e, i)
            for k, (e, i) in states
        ]
    apart = t.reduction.combiners if t.scan is None else ()
    alike = [op in IDEMPOTENT for op in apart] or [False] * len(lifted)
    own = [ev.blocks(e) if once else blocks for e, once in zip(lifted, alike, strict=True)]
    return tuple(hold(ev, e, tuple(a for a in blocks if a in o)) for e, o in zip(lifted, own, strict=True))


def needs_no_mask(ev: Evaluator, t: Item) -> bool:
    """Whether the places of an extreme value are those of a fold's only class: masked lanes, which hold the worst
    value, need no mask there, as they lie behind all others, which hold it too if it is the extreme one."""
    assert t.reduction is not None
    return (
        t.reduction.extreme is not None
        and not ev.schedule.tiling.peel
        and len(t.reduce) == 1
        and t.body[1] is axis(t.reduce[0])
    )


def load_identity(ev: Evaluator, identity: Expr, e: Expr, mask: Expr) -> bool:
    """Whether `e` is loaded and has the identity outside `mask`; a load that has not been asked for another one is
    told to give it to lanes that touch no memory."""
    source = e.args[0] if e.op == "cast" else e
    number = identity.value if identity.op == "const" and isinstance(identity.value, float) else math.nan
    if ev.schedule.tiling.peel or ev.contractions or source.op != "var" or not source.dtype.is_float:
        return False
    if number and not (math.isinf(number) and not ev.schedule.memory.descriptors):
        return False
    places = [k for k, s in enumerate(ev.out) if isinstance(s, Load) and s.var.id == source.value]
    for k in places:
        load = ev.out[k]
        assert isinstance(load, Load)
        tails = {c for tail in ev.scope.tails.values() for c in conjuncts(tail)}
        if not set(conjuncts(mask)) <= set(conjuncts(load.mask)) <= tails:
            return False
        if ev.idle.setdefault(load.var.id, number) == number:
            ev.out[k] = replace(load, other=const(number, load.var.dtype))
            return True
    return False


def hold(ev: Evaluator, e: Expr, blocks: tuple[Axis, ...]) -> Var:
    """The value that an evaluated expression has, as a block over `blocks`."""
    known = ev.vars.get(e.value) if e.op == "var" and isinstance(e.value, int) else None
    if known is not None and known.dtype is e.dtype and set(known.axes) == set(blocks):
        return known
    var = ev.var(e.dtype, blocks)
    ev.out.append(Compute(var, e))
    return var


def eval_operands(ev: Evaluator, product: Contraction) -> tuple[Var, Var]:
    """Both sides of a contraction as blocks, zero where its folded class is past the end."""
    mask = ev.tail((product.k,))
    made: list[Var] = []
    for side in (product.left, product.right):
        e = ev.eval(stored_operand(ev, side))
        if mask is not None and side.op != "read":
            e = call("where", mask, e, const(0.0, e.dtype))
        made.append(hold(ev, call("cast", e, dtype=product.operand), ev.blocks(e)))
    return made[0], made[1]


def stored_operand(ev: Evaluator, side: Expr) -> Expr:
    """A side of a contraction; a plain read in the type in which it is stored."""
    half = stored_half(side, ev.form.params)
    if half is None:
        return side
    if side.op == "where":
        return where(side.args[0], stored_operand(ev, side.args[1]), const(0.0, half))
    return make("read", side.args, half, side.value)


def advance_scan(ev: Evaluator, t: Item) -> None:
    """One step of a running fold: the values at this step, and the state behind it."""
    assert t.reduction is not None and t.scan is not None
    names = ev.states[t.id]
    old: list[Expr] = [value_of(v) for v in names]
    if tile_of(ev, t.scan) == 1:
        ev.out.append(Update(names, t.reduction.merged(old, lift_elements(ev, t)), ev.tail(t.reduce)))
        name_results(ev, t, [value_of(v) for v in names])
        return
    parts = mask_parts(ev, t, lift_elements(ev, t), ev.tail((*t.reduce, t.scan)))
    inner = tuple(ev.var(p.dtype, p.axes) for p in parts)
    ev.out.append(Prefix(inner, parts, t.reduction, t.scan))
    here = [ev.named(e) for e in t.reduction.merged(old, [value_of(v) for v in inner])]
    name_results(ev, t, here)
    totals = tuple(ev.var(p.dtype, tuple(a for a in p.axes if a != t.scan)) for p in parts)
    ev.out.append(Collapse(totals, parts, t.reduction, (t.scan,)))
    ev.out.append(Update(names, t.reduction.merged(old, [value_of(v) for v in totals])))


def merge_lanes(ev: Evaluator, t: Item, parts: tuple[Var, ...]) -> tuple[Var, ...]:
    """One state out of those of all lanes that a fold merges."""
    assert t.reduction is not None
    if t.reduction.pooled:
        return pool_lanes(ev, t, t.reduction, parts)
    if len(parts) > 1 and t.reduction.combiners:
        kinds = zip(t.reduction.combiners, parts, t.reduction.identity, strict=True)
        alone = [(simple(op, p.dtype, i), (p,)) for op, p, i in kinds]
        return tuple(collapse(ev, r, p, merged_axes(ev, t, p))[0] for r, p in alone)
    along = merged_axes(ev, t, parts)
    if t.reduction.extreme is not None and not ev.schedule.tiling.peel:
        for a in along:
            parts = find_first_extreme(ev, t, t.reduction, parts, a)
        return parts
    return collapse(ev, t.reduction, parts, along)


def merged_axes(ev: Evaluator, t: Item, parts: Sequence[Var]) -> list[Axis]:
    """The block axes that a fold merges: neighbours in memory first, in one thread or in threads in step."""
    found = [a for a in t.reduce if any(a in p.axes for p in parts)]
    return sorted(found, key=lambda a: a != ev.schedule.tiling.lane)


def pool_lanes(ev: Evaluator, t: Item, reduction: Reduction, parts: tuple[Var, ...]) -> tuple[Var, ...]:
    """Lanes merged by addition: first what adds as it is, then what depends on those sums."""
    along = merged_axes(ev, t, parts)
    if not along:
        return parts
    known = {slot("a", k, p.dtype): value_of(p) for k, p in enumerate(parts)}
    totals: dict[int, Var] = {}
    for late in (False, True):
        asked = [{x.value.side for x in walk(e) if isinstance(x.value, Slot)} for e in reduction.pooled]
        found = [k for k, sides in enumerate(asked) if ("b" in sides) is late]
        sums = {slot("b", k, v.dtype): value_of(v) for k, v in totals.items()}
        for k in found:
            e = substitute(reduction.pooled[k], known | sums)
            (totals[k],) = collapse(ev, sum_(e.dtype), (hold(ev, e, ev.blocks(e)),), along)
    return tuple(totals[k] for k in range(len(parts)))


def collapse(
    ev: Evaluator, reduction: Reduction, parts: tuple[Var, ...], along: Sequence[Axis]
) -> tuple[Var, ...]:
    """`parts` merged along axes: at once if threads share a grid point and no axis is left, else one by one."""
    leaves_none = len(along) > 1 and set(parts[0].axes) <= set(along)
    at_once = leaves_none and not ev.schedule.tiling.peel and reduction.combiner is not None
    for axes in [tuple(along)] if at_once else [(a,) for a in along]:
        rest = tuple(x for x in parts[0].axes if x not in axes)
        names = tuple(ev.var(p.dtype, rest) for p in parts)
        ev.out.append(Collapse(names, parts, reduction, axes))
        parts = names
    return parts


def find_first_extreme(
    ev: Evaluator, t: Item, reduction: Reduction, parts: tuple[Var, ...], a: Axis
) -> tuple[Var, ...]:
    """The extreme value and its first place as two plain folds, of which machines have quick ones."""
    value, place = map(value_of, parts)
    plain = maximum if reduction.extreme == "maximum" else minimum
    (best,) = collapse(ev, plain(parts[0].dtype), parts[:1], (a,))
    here = call("eq", value, value_of(best))
    if best.dtype.is_float:
        here = call("or", here, call("isnan", value))  # if there is one, the extreme is none
    none = _beyond(t.body[1])
    unmasked = a in ev.scope.bound and (needs_no_mask(ev, t) or ev.tail(t.reduce) is None)
    if not unmasked:  # the identity may be among them
        here = call("and", here, call("ge", place, const(0, i64)))
    there = where(here, place, none)
    candidates = ev.var(i64, parts[1].axes)
    ev.out.append(Compute(candidates, there))
    (first,) = collapse(ev, minimum(i64), (candidates,), (a,))
    found = ev.var(i64, first.axes)
    ev.out.append(Compute(found, where(call("ge", value_of(first), none), const(-1, i64), value_of(first))))
    return best, found


def name_results(ev: Evaluator, t: Item, state: Sequence[Expr]) -> None:
    """Finish a state, and let the results of the fold be read."""
    assert t.reduction is not None
    for r, e in enumerate(t.reduction.finished(state)):
        ev.scope.results[t.id, r] = ev.named(e)


def compute_in_tile(ev: Evaluator, t: Item) -> None:
    """A fold whose classes are all bound: computed in the tile."""
    product = ev.contractions.get(t.id)
    assert t.reduction is not None
    if product is not None:
        operands = eval_operands(ev, product)
        declare_state(ev, t)
        ev.out.append(Dot(ev.states[t.id][0], *operands, product.k))
        name_results(ev, t, [value_of(v) for v in ev.states[t.id]])
        return
    mask = ev.tail(t.reduce if t.scan is None else (*t.reduce, t.scan))
    parts = mask_parts(ev, t, lift_elements(ev, t), mask)
    if t.scan is not None and t.scan in parts[0].axes:
        running = tuple(ev.var(p.dtype, p.axes) for p in parts)
        ev.out.append(Prefix(running, parts, t.reduction, t.scan))
        parts = running
    name_results(ev, t, [value_of(v) for v in merge_lanes(ev, t, parts)])


def spread(t: Item, truths: Truths | None) -> list[set[Axis]]:
    """For each value of the state of a fold that takes elements one by one, the axes along which it may differ where
    `truths` hold; None: where all conditions of its elements do."""
    assert t.reduction is not None
    own = {f"e{k}": _differs(b, truths) for k, b in enumerate(t.body)}
    found: list[set[Axis]] = [set() for _ in t.reduction.state]
    while True:
        known = own | {f"a{k}": used for k, used in enumerate(found)}
        slots = [[x.value for x in walk(e) if isinstance(x.value, Slot)] for e in t.reduction.step]
        new = [set[Axis]().union(*(known[f"{s.side}{s.index}"] for s in some)) for some in slots]
        if new == found:
            return found
        found = new


def _differs(e: Expr, truths: Truths | None) -> set[Axis]:
    """The axes along which an element may differ."""
    if e.op != "where":
        return {a.value for a in axes_of(e) if isinstance(a.value, Axis)}
    if truths is None:
        return _differs(e.args[1], None)
    test = decide(e.args[0], truths)
    if test.op == "const":
        return _differs(e.args[1] if test.value else e.args[2], truths)
    return _differs(e.args[1], truths) | _differs(e.args[2], truths) | _differs(test, truths)


def _beyond(place: Expr) -> Expr:
    """A number that an index never reaches, a small one if its range is known."""
    index = all(x.dtype is i64 and x.op not in ("read", "value", "var") for x in walk(place))
    _, high = dims.bounds(place) if index else (None, None)
    return const(highest(i64), i64) if high is None or axes_of(high) else dims.add(high, dims.ONE)
