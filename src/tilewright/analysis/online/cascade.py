"""A whole cascade as one reduction over the states of parts: what a row cut in parts, a tree or two machines merge.

The state of a part holds the state of each reduction of the cascade, with statistics as the part saw them. Two parts
merge by bringing the states of both to the statistics of both together, so that any split of the elements, in any
bracketing, gives the same as one pass (the semidirect product of the online law).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.ir.expr import Expr, const, slot, substitute, where
from tilewright.ir.reduction import Reduction

from .law import Law
from .running import empty, gap, shown


@dataclass(frozen=True, slots=True)
class Link:
    """A reduction of a cascade, read as `leaf`. `law` (direct) and the places of its states and of the count of
    elements in the cascade, if it follows others; `total` is how many elements all parts have."""

    leaf: Expr
    reduction: Reduction
    law: Law | None = None
    statistics: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    count: int | None = None
    total: Expr | None = None


def cascade(links: Sequence[Link]) -> Reduction:
    """The reduction whose elements are states of parts, one value per link (statistics first), as `part_body` makes
    them; its results are those of the links."""
    types = tuple(x.reduction.state[0] for x in links)
    a, b, e = (tuple(slot(side, k, t) for k, t in enumerate(types)) for side in "abe")
    merged: list[Expr] = []
    for k, x in enumerate(links):
        if x.law is None:
            merged.append(x.reduction.merged(a[k : k + 1], b[k : k + 1])[0])
            continue
        sides = [[_side(x, x.law, side, merged)] for side in (a, b)]
        merged.append(x.reduction.merged(*sides)[0])
    finish = tuple(_defined(x, s, a) for x, s in zip(links, a, strict=True))
    name = "cascade of " + ", ".join(x.reduction.name for x in links)
    identity = tuple(x.reduction.identity[0] for x in links)
    return Reduction(name, types, types, identity, e, tuple(merged), finish)


def part_body(link: Link, links: Sequence[Link], body: Expr, own: Mapping[Expr, Expr]) -> Expr:
    """What a part folds for `link`: its `body`, reading the part's `own` results (by leaf) as statistics."""
    if link.law is None:
        return body
    table = dict(own)
    for g in link.law.statistics:
        count = None if link.count is None else own[links[link.count].leaf]
        table[g.leaf] = shown(g, own[g.leaf], count, link.total)
    return substitute(body, table)


def rescale_part(
    law: Law, states: Sequence[Expr], before: Sequence[Expr], after: Sequence[Expr],
    counts: tuple[Expr | None, Expr | None] = (None, None), total: Expr | None = None,
) -> Expr:  # fmt: skip
    """The first of the `states` of a part, whose statistics had the states `before`, where these are `after`. For
    means: how many elements were `counts`, before and after, of `total`."""
    gaps: list[Expr] = []
    for k, (g, old, new) in enumerate(zip(law.statistics, before, after, strict=True)):
        seen = old if g.through is g.leaf else shown(g, old, counts[0], total)
        was, now = (substitute(g.through, {g.leaf: x}) for x in (seen, shown(g, new, counts[1], total)))
        gaps.append(gap(g, old, was, now, law.falls(k)))
    return law.rescaled(0, states, gaps)


def _side(x: Link, law: Law, side: Sequence[Expr], joint: Sequence[Expr]) -> Expr:
    """The state of `x` in a part, with the statistics of both parts."""
    before, after = ([states[k] for k in x.statistics] for states in (side, joint))
    counts = (None, None) if x.count is None else (side[x.count], joint[x.count])
    return rescale_part(law, [side[k] for k in x.states], before, after, counts, x.total)


def _defined(x: Link, state: Expr, states: Sequence[Expr]) -> Expr:
    """The result of a complete state: as the program has it where an extreme has seen only its identity."""
    if x.law is None or not x.law.states[0].lost:
        return state
    for g, k in zip(x.law.statistics, x.statistics, strict=True):
        if g.through is g.leaf:
            state = where(empty(g, states[k]), const(math.nan, state.dtype), state)
    return state
