"""The range of a loop: cut where conditions change (index-set splitting), then into whole tiles and a masked rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..ir import dims
from ..ir.expr import Axis, Expr, axis, call
from .form import Item
from .predicate import Truths, conditions, is_neutral, ordered, threshold

Segment = tuple[Expr, Expr, Expr | None]


@dataclass(frozen=True, slots=True)
class Piece:
    """start <= class < stop, and the conditions that are known there."""

    start: Expr
    stop: Expr
    truths: Mapping[Expr, bool] = field(default_factory=dict)


def split_range(
    c: Axis, whole: tuple[Expr, Expr], tile: int, roots: Sequence[Expr], scalars: frozenset[Axis],
    trimmed: Sequence[Item], known: Truths,
) -> list[Piece]:  # fmt: skip
    """The range `whole` of `c`, cut where the conditions in `roots` change, given the bound `scalars`. Pieces in which
    every fold of `trimmed` (if any) takes only its identity are left out; where cutting serves nothing, one piece.

    Scalar loops are only cut to leave pieces out: there a condition costs one branch."""
    start, stop = whole
    found = [threshold(x, c, scalars) for x in conditions(roots)]
    marks = ordered([t for t in found if t is not None])
    if not marks:
        return [Piece(start, stop)]
    places = list(dict.fromkeys(t.at for t in marks))
    edges = [start]
    for place in places:
        edges.append(dims.minimum(dims.maximum(place, edges[-1]), stop))
    edges.append(stop)
    pieces: list[Piece] = []
    for k, (first, last) in enumerate(zip(edges, edges[1:], strict=False)):
        truths = {t.condition: (places.index(t.at) < k) == t.rising for t in marks}
        if not trimmed or not all(is_neutral(t, {**known, **truths}) for t in trimmed):
            pieces.append(Piece(first, last, truths))
    return pieces if tile > 1 or len(pieces) <= len(places) else [Piece(start, stop)]


def segments(c: Axis, tile: int, piece: Piece, exact: bool, peel: bool) -> list[Segment]:
    """(start, stop, mask): whole tiles without a mask, then a masked rest if there may be one; all in one without
    `peel`. `exact` says that the length is a multiple of the tile although its expression does not show it."""
    start, stop = piece.start, piece.stop
    length = dims.sub(stop, start)
    if dims.static(length) == 0:
        return []
    if tile == 1 or exact or dims.divisible(length, tile):
        return [(start, stop, None)]
    step = dims.integer(tile)
    whole = dims.add(start, dims.mul(dims.floordiv(length, step), step))
    mask = call("lt", axis(c), stop)
    if not peel or (dims.static(length) is not None and whole is start):
        return [(start, stop, mask)]
    return [(start, whole, None), (whole, stop, mask)]
