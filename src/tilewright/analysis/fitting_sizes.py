"""Sizes that several symbols can have at once. What a program asks of them together (32*s*s == 8192 in front of a
matrix of 8192 rows) is told by no range of one: at sizes that it cannot have, an op reads beyond its operand."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.ir.expr import Axis, Expr, axes_of, axis, integer, substitute
from tilewright.ir.graph import Graph, Op
from tilewright.ir.sizes import dims

from .runtime_checks import from_data, inside_of
from .size_hints import SizeHints


def fitting(graph: Graph, sizes: SizeHints, own: SizeHints) -> SizeHints:
    """Some sizes if they `fit`; else those that the program has."""
    return sizes if fit(graph, sizes, own) else own


def fit(graph: Graph, sizes: SizeHints, own: SizeHints) -> bool:
    """Whether every read that lies in its operand at sizes that a program has, its `own`, is proved to lie there at
    these `sizes`. Reads at places from data, or where a condition on places decides about them, count as inside."""
    if sizes.sizes == own.sizes:
        return True
    open_ = dict.fromkeys(pair for op in graph.ops for pair in _unproved(op))
    return all(_is_inside(*pair, sizes) for pair in open_ if _is_inside(*pair, own))


def _unproved(op: Op) -> Iterator[tuple[Expr, Expr]]:
    """Index and size for each dim that an op always reads, and not surely inside of."""
    for read in _always_read(op):
        assert isinstance(read.value, int), "reads name operands"
        for index, size in zip(read.args, op.inputs[read.value].shape, strict=True):
            if not from_data(index) and inside_of(index, size) is not None:
                yield index, size


def _always_read(op: Op) -> Iterator[Expr]:
    """Reads that no choice by place decides about."""
    pending = list(op.expr.body) if op.expr is not None else []
    seen = set(pending)
    while pending:
        e = pending.pop()
        if e.op == "read":
            yield e
        by_place = e.op == "where" and not from_data(e.args[0])
        below = [a for a in (e.args[:1] if by_place else e.args) if a not in seen]
        seen.update(below)
        pending += below


def _is_inside(index: Expr, size: Expr, sizes: SizeHints) -> bool:
    numbers = {s: integer(sizes.estimate(s)) for e in (index, size) for s in dims.symbols_of(e)}
    of = {a: a.value for a in axes_of(index) if isinstance(a.value, Axis)}
    spans = {a: axis(Axis(known.name, integer(sizes.estimate(known.extent)))) for a, known in of.items()}
    return inside_of(substitute(index, numbers | spans), integer(sizes.estimate(size))) is None
