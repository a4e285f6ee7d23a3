"""Expressions of any depth, and those in which much is shared, take time in proportion to their nodes."""

from __future__ import annotations

import pytest
from tests.support.cpp_harness import host_target

from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Expr, call, const, integer, read, show, substitute, walk
from tilewright.ir.identity import identity
from tilewright.ir.kernel import Kernel
from tilewright.ir.ops import pointwise as p
from tilewright.ir.ops.view import concat, stack
from tilewright.ir.pattern import Rewriter
from tilewright.ir.sizes import dims
from tilewright.options import Options
from tilewright.rewrite.normal.identities import CASTS
from tilewright.schedule.solver import Solver

DEPTH = 2500


def deep() -> Expr:
    e = read(0, [integer(0)], f32)
    for k in range(DEPTH):
        e = call("add", call("sin", e), const(k, f32))
    return e


def test_deep_expressions_are_walked_changed_shown_and_named() -> None:
    e = deep()
    assert len(walk(e)) == 3 * DEPTH + 2
    assert show(e).count("sin") == DEPTH
    other = substitute(e, {read(0, [integer(0)], f32): read(1, [integer(0)], f32)})
    assert other is not e and substitute(other, {read(1, [integer(0)], f32): read(0, [integer(0)], f32)}) is e
    assert identity(e) != identity(other)
    assert Rewriter(CASTS)(e) is e


def test_what_is_shared_is_looked_at_once() -> None:
    """Each op reads the one before it three times: as a tree, 3 to the power of 32 reads."""
    b = Builder()
    x = first = b.value((dims.integer(64),), f32)
    for _ in range(16):
        x = p.add(b, p.mul(b, x, p.tanh(b, x)), x)
    graph = b.finish((first,), (x,))
    assert Solver(host_target(), Options()).solve(Kernel(graph.ops, (x,)), {}).program


@pytest.mark.parametrize("join", [concat, stack])
def test_many_pieces_are_no_deep_expression(join: object) -> None:
    b = Builder()
    pieces = [b.value((dims.integer(3),), f32) for _ in range(700)]
    joined = concat(b, pieces, 0) if join is concat else stack(b, pieces, 0)
    expr = b.finish(tuple(pieces), (joined,)).ops[0].expr
    assert expr is not None

    def depth(e: Expr) -> int:
        return 1 + max(map(depth, e.args), default=0)

    assert depth(expr.body[0]) < 40
