"""Accesses with what is to be told of how their elements lie side by side, or are one, which follows from where blocks
begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from tilewright.analysis.runs import hidden_runs, interleaved_store, shared_elements
from tilewright.ir.expr import Axis, axes_of, axis
from tilewright.ir.program import (
    Branch,
    Check,
    Load,
    Loop,
    Nest,
    Stmt,
    Store,
    Update,
    defines,
    uses,
    walk_statements,
)
from tilewright.ir.selection import ElementRun, SharedElement
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import GPU_MATMUL


def tell_runs(
    body: Sequence[Stmt],
    tiles: Mapping[Axis, int],
    interleave: bool = False,
    even: frozenset[Axis] = frozenset(),
) -> tuple[Stmt, ...]:
    """`body` with the runs of its loads and stores along the block axes `tiles`, and of stores, if asked, how axes take
    turns there (`interleave`). Blocks of the axes in `even`, which are bound around it, begin at multiples of their
    tiles."""
    least = GPU_MATMUL.min_stored_run_elements
    made: list[Stmt] = []
    for s in body:
        match s:
            case Load():
                s = replace(s, runs=hidden_runs(s.offset, _blocks(s.var.axes, tiles), tiles, even))
            case Store():
                own = _blocks(s.axes, tiles)
                taken = interleaved_store(s.offset, own, tiles, even, least) if interleave else None
                s = replace(s, runs=hidden_runs(s.offset, own, tiles, even), interleaved=taken)
            case Loop():
                inside = even | {s.axis} if dims.divisible(s.start, s.tile) else even - {s.axis}
                s = replace(s, body=tell_runs(s.body, tiles, interleave, inside))
            case Nest():
                s = replace(s, body=tell_runs(s.body, tiles, interleave, even))
            case Branch():
                yes, no = (tell_runs(b, tiles, interleave, even) for b in (s.body, s.orelse))
                s = replace(s, body=yes, orelse=no)
            case _:
                pass
        made.append(s)
    return tuple(made)


def load_once(
    body: Sequence[Stmt],
    tiles: Mapping[Axis, int],
    operands: Set[int],
    even: frozenset[Axis] = frozenset(),
) -> tuple[Stmt, ...]:
    """`body` in which a load takes an element that is in several places of its block once: a word of packed numbers,
    and what is the same for a whole block. Not the `operands` of matrix units, which are whole blocks."""
    made: list[Stmt] = []
    for s in body:
        match s:
            case Load() if s.descriptor is None and s.var.id not in operands:
                s = replace(s, alike=_alike(s, tiles, even))
            case Loop():
                inside = even | {s.axis} if dims.divisible(s.start, s.tile) else even - {s.axis}
                s = replace(s, body=load_once(s.body, tiles, operands, inside))
            case Nest():
                s = replace(s, body=load_once(s.body, tiles, operands, even))
            case Branch():
                yes, no = (load_once(b, tiles, operands, even) for b in (s.body, s.orelse))
                s = replace(s, body=yes, orelse=no)
            case _:
                pass
        made.append(s)
    return tuple(made)


def copy_for_threads(body: Sequence[Stmt], tiles: Mapping[Axis, int], lane: Axis | None) -> tuple[Stmt, ...]:
    """`body` in which each thread loads what it needs of the blocks that lie along `lane` and that other block axes,
    bound around them, do not walk. What is made of a copy has an element for each of its elements: along an axis that
    a state or a result lacks, nothing that it is made of is copied."""
    return _copied(body, tiles, lane, frozenset(), _spread(body))


def _copied(
    body: Sequence[Stmt],
    tiles: Mapping[Axis, int],
    lane: Axis | None,
    bound: frozenset[Axis],
    spread: Mapping[int, frozenset[Axis]],
) -> tuple[Stmt, ...]:
    made: list[Stmt] = []
    for s in body:
        match s:
            case Load() if s.descriptor is None and lane in s.var.axes and lane in tiles:
                common = bound & spread.get(s.var.id, bound)
                copied = tuple(a for a in tiles if a in common and a not in s.var.axes)
                told = tuple(ElementRun(a, 1, 1) for a in copied) if s.runs else ()
                s = replace(s, copied=copied, runs=(*s.runs, *told))
            case Loop():
                s = replace(s, body=_copied(s.body, tiles, lane, bound | {s.axis}, spread))
            case Nest():
                s = replace(s, body=_copied(s.body, tiles, lane, bound, spread))
            case Branch():
                yes, no = (_copied(b, tiles, lane, bound, spread) for b in (s.body, s.orelse))
                s = replace(s, body=yes, orelse=no)
            case _:
                pass
        made.append(s)
    return tuple(made)


def _spread(body: Sequence[Stmt]) -> dict[int, frozenset[Axis]]:
    """The axes that all that is made of a value has, by the value's number; none for what nothing reads."""
    found: dict[int, frozenset[Axis]] = {}
    steps = [(axes, uses(s)) for s in walk_statements(body) for axes in _axes_made(s)]
    changed = True
    while changed:  # a state is made of what later statements of its loop give it
        changed = False
        for (number, own), read in reversed(steps):
            common = own & found.get(number, own)
            for v in read:
                limited = found.get(v, common) & common
                changed |= limited != found.get(v)
                found[v] = limited
    return found


def _axes_made(s: Stmt) -> list[tuple[int, frozenset[Axis]]]:
    """Numbers of the values that a statement makes, with their axes; -1 for what it stores or checks."""
    match s:
        case Store() | Check():
            return [(-1, frozenset(s.axes))]
        case Update():
            return [(v.id, frozenset(v.axes)) for v in s.vars]
        case _:
            return [(v.id, frozenset(v.axes)) for v in defines(s)]


def _alike(s: Load, tiles: Mapping[Axis, int], even: frozenset[Axis]) -> tuple[SharedElement, ...]:
    """Along axes that its mask does not have. A word has no more parts than bits, and a float has none."""
    found = shared_elements(s.offset, _blocks(s.var.axes, tiles), tiles, even)
    asked = [axes_of(e) for e in (s.mask, s.other) if e is not None]
    parts = 1 if s.buffer.dtype.is_float else 8 * s.buffer.dtype.bytes
    return tuple(
        x for x in found
        if (x.count <= parts or x.count == tiles[x.axis]) and not any(axis(x.axis) in own for own in asked)
    )  # fmt: skip


def _blocks(axes: Sequence[Axis], tiles: Mapping[Axis, int]) -> tuple[Axis, ...]:
    """Block axes in the order of dimensions."""
    return tuple(a for a in tiles if a in axes)
