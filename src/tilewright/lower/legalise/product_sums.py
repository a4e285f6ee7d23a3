"""A sum of two products of matrices is one: the second goes on where the first ended.

    s = a b;  t = c d;  .. s + t ..     becomes     s = a b;  s += c d;  .. s ..

Matrix units add to what a block holds, so that neither a second block of sums nor an addition is left. The sum has one
chain then, as a product of all columns of both has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tilewright.ir.expr import Expr, const, is_const, substitute, walk
from tilewright.ir.program import (
    Branch,
    Compute,
    Declare,
    Dot,
    Loop,
    Nest,
    Stmt,
    Store,
    TileProgram,
    Update,
    Var,
    defines,
    expressions,
    rewrite_body,
    uses,
    value_of,
)
from tilewright.ir.selection import MatrixMultiply


def add_products(program: TileProgram) -> TileProgram:
    """`program`, whose products have their methods, with sums of two products of a matrix unit as one."""
    found = next(_pairs(program), None)
    while found is not None:
        program = replace(program, body=_joined(program.body, *found))
        found = next(_pairs(program), None)
    return program


def _pairs(program: TileProgram) -> Iterator[tuple[Var, Var]]:
    """First and second product of sums that are all that is read of either."""
    added = [
        (x.args[0], x.args[1])
        for s in program.statements()
        for e in expressions(s)
        for x in walk(e)
        if _is_sum(x)
    ]
    for body in _bodies(program.body):
        made = [s for s in body if isinstance(s, Dot)] if added else []
        for n, first in enumerate(made):
            for second in made[n + 1 :]:
                pair = {value_of(first.acc), value_of(second.acc)}
                if any(set(a) == pair for a in added) and _fits(program, body, first, second):
                    yield first.acc, second.acc


def _is_sum(x: Expr) -> bool:
    return x.op == "add" and x.args[0].op == x.args[1].op == "var" and x.args[0] is not x.args[1]


def _fits(program: TileProgram, body: Sequence[Stmt], first: Dot, second: Dot) -> bool:
    """Whether both begin with zero in `body`, each is one product, and nothing but their sum is read."""
    one, two = first.acc, second.acc
    if first.chain or second.chain or one.dtype is not two.dtype or set(one.axes) != set(two.axes):
        return False
    if not isinstance(first.method, MatrixMultiply) or first.method != second.method:
        return False
    both = {one.id, two.id}
    begun = {
        s.vars[0].id for s in body if isinstance(s, Declare) and len(s.vars) == 1 and is_const(s.values[0], 0)
    }
    others = [s for s in program.statements() if s is not first and s is not second]
    changed = [v.id for s in others if not isinstance(s, Declare) for v in defines(s)]
    return both <= begun and not both & set(changed) and all(_reads_sums_only(s, one, two) for s in others)


def _reads_sums_only(s: Stmt, one: Var, two: Var) -> bool:
    both = {value_of(one), value_of(two)}
    if not {one.id, two.id} & set(uses(s)):
        return True
    sums = {x for e in expressions(s) for x in walk(e) if _is_sum(x) and set(x.args) == both}
    hidden = {x: const(0.0, x.dtype) for x in sums}
    rest = [substitute(e, hidden) for e in expressions(s)]
    return isinstance(s, (Compute, Update, Store)) and not any(both & set(walk(e)) for e in rest)


def _joined(body: Sequence[Stmt], one: Var, two: Var) -> tuple[Stmt, ...]:
    a, b = value_of(one), value_of(two)

    def summed(e: Expr) -> Expr:
        sums = {x: a for x in walk(e) if _is_sum(x) and set(x.args) == {a, b}}
        return substitute(e, sums) if sums else e

    def change(s: Stmt) -> tuple[Stmt, ...]:
        match s:
            case Declare() if s.vars == (two,):
                return ()
            case Dot() if s.acc == two:
                return (replace(s, acc=one),)
            case Compute():
                return (replace(s, expr=summed(s.expr)),)
            case Store():
                return (replace(s, value=summed(s.value)),)
            case Update():
                return (replace(s, values=tuple(map(summed, s.values))),)
            case _:
                return (s,)

    return rewrite_body(body, change)


def _bodies(body: Sequence[Stmt]) -> Iterator[Sequence[Stmt]]:
    yield body
    for s in body:
        for inner in (
            (s.body, s.orelse) if isinstance(s, Branch) else (s.body,) if isinstance(s, (Loop, Nest)) else ()
        ):
            yield from _bodies(inner)
