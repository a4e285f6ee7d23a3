"""What an earlier run decided about an equal graph: which ops share a kernel, and why no more of them do.

Prices are what a cover costs to find, so a later process that compiles the same model takes the groups as they are and
solves only the kernels that they make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from ..ir.expr import Expr, Symbol
from ..ir.graph import Graph, Op, Value
from ..ir.tensor import show_tensor_expr


class Memory(Protocol):
    """Keeps decisions, as plain data, by the text of what was decided about; it knows what else they depend on
    (machine, options, code)."""

    def recall(self, task: str) -> object | None:
        """What was decided about this text before, if something was."""
        ...

    def keep(self, task: str, decision: object) -> None:
        """Remember a decision: numbers, texts and lists of such."""
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


def task_of(graph: Graph) -> str:
    """Equal for graphs that are covered alike: they differ at most in the numbers of their values, in the contents of
    frozen tensors, and in what their library calls compute."""
    number: dict[Value, int] = {}
    for v in (*(v for v in graph.inputs if isinstance(v, Value)), *graph.constants):
        number.setdefault(v, len(number))
    ops = [_line(op, number) for op in graph.ops]
    values = [f"{n}: {v.dtype} {v.shape}" for v, n in number.items()]
    layouts = [f"{number[v]} at {layout.strides}" for v, layout in graph.layouts.items() if v in number]
    kept = sorted(number[v] for v in graph.kept())
    symbols = sorted(map(ranged, graph.symbols()))
    return "\n".join([*symbols, *values, *ops, *sorted(layouts), f"keeps {kept}"])


def _line(op: Op, number: dict[Value, int]) -> str:
    made = [number.setdefault(v, len(number)) for v in op.outputs]
    read = [number.setdefault(v, len(number)) for v in op.inputs]
    if op.expr is not None:
        return f"{made} {read} {op.kernel} {[b.dtype for b in op.expr.body]} {show_tensor_expr(op.expr)}"
    assert op.call is not None
    return f"{made} {read} call {op.call.pure} {op.call.strides}"


def ranged(symbol: Expr) -> str:
    """A size symbol with its range."""
    known = symbol.value
    return f"{known.name} in {known.low}..{known.high}" if isinstance(known, Symbol) else repr(symbol)
