"""What an earlier run decided about an equal graph: which ops share a kernel, and why no more of them do.

Prices are what a cover costs to find, so a later process that compiles the same model takes the groups as they are and
solves only the kernels that they make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from tilewright.ir.expr import Expr, Symbol
from tilewright.ir.graph import Graph, LibraryCall
from tilewright.ir.identity import identity


class DecisionCache(Protocol):
    """Decisions, as plain data, by the text of what was decided about; it knows what else they depend on
    (machine, options, code)."""

    def get(self, task: str) -> object | None:
        """What was decided about this text before, if something was."""
        ...

    def put(self, task: str, decision: object) -> None:
        """Store a decision: numbers, texts and lists of such."""
        ...


@dataclass(frozen=True, slots=True)
class Grouping:
    """Places in the graph of ops that share a kernel; what it stores, by places among all results; and
    what stopped it from growing."""

    ops: tuple[int, ...]
    stores: tuple[int, ...] = ()
    why: str = ""


def plain(groupings: Sequence[Grouping]) -> list[list[object]]:
    """As plain data."""
    return [[list(g.ops), list(g.stores), g.why] for g in groupings]


def groupings_of(decision: object) -> list[Grouping] | None:
    """From plain data, None if it is something else."""
    if not isinstance(decision, list):
        return None
    found: list[Grouping] = []
    for entry in cast("list[object]", decision):
        match entry:
            case [list(ops), list(stores), str(why)] if all(isinstance(n, int) for n in (*ops, *stores)):
                found.append(Grouping(tuple(ops), tuple(stores), why))
            case _:
                return None
    return found


def task_of(graph: Graph, *others: object) -> str:
    """Equal for graphs that are covered alike, with `others` that are equal: they differ at most in which values they
    are made of, in the contents of frozen tensors, and in what their library calls compute."""
    ops = tuple(op if op.call is None else replace(op, call=as_seen(op.call)) for op in graph.ops)
    constants = dict.fromkeys(graph.constants)
    return identity(replace(graph, ops=ops, constants=constants), *others)


def as_seen(call: LibraryCall) -> LibraryCall:
    """A call without what it computes, and how else it could do so."""
    plain = replace(call, name="", function=as_seen, args=(), kwargs=(), spare=None)
    return replace(plain, task=None)


def ranged(symbol: Expr) -> str:
    """A size symbol with its range."""
    known = symbol.value
    return f"{known.name} in {known.low}..{known.high}" if isinstance(known, Symbol) else repr(symbol)
