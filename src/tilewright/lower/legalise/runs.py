"""Accesses with what is to be told of how their elements lie side by side, which follows from where blocks begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.runs import hidden_runs
from tilewright.ir.expr import Axis
from tilewright.ir.program import Branch, Load, Loop, Nest, Stmt, Store
from tilewright.ir.sizes import dims


def tell_runs(
    body: Sequence[Stmt], tiles: Mapping[Axis, int], even: frozenset[Axis] = frozenset()
) -> tuple[Stmt, ...]:
    """`body` with the runs of its loads and stores along the block axes `tiles`. Blocks of the axes in `even`, which
    are bound around it, begin at multiples of their tiles."""
    made: list[Stmt] = []
    for s in body:
        match s:
            case Load():
                s = replace(s, runs=hidden_runs(s.offset, _blocks(s.var.axes, tiles), tiles, even))
            case Store():
                s = replace(s, runs=hidden_runs(s.offset, _blocks(s.axes, tiles), tiles, even))
            case Loop():
                inside = even | {s.axis} if dims.divisible(s.start, s.tile) else even - {s.axis}
                s = replace(s, body=tell_runs(s.body, tiles, inside))
            case Nest():
                s = replace(s, body=tell_runs(s.body, tiles, even))
            case Branch():
                s = replace(s, body=tell_runs(s.body, tiles, even), orelse=tell_runs(s.orelse, tiles, even))
            case _:
                pass
        made.append(s)
    return tuple(made)


def _blocks(axes: Sequence[Axis], tiles: Mapping[Axis, int]) -> tuple[Axis, ...]:
    """Block axes in the order of dimensions."""
    return tuple(a for a in tiles if a in axes)
