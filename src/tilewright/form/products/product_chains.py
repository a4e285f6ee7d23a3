"""How products of a block are added up: in chains, where a block holds a class whole.

A chain of n sums rounds n times by the size of what it has so far; sums of chains of c products round n / c + c times.
A program that adds up products of its own has them added in levels by eager, and so has a small product of matrices; a
large one is one chain there, and scores that decide a softmax are as close as eager's if they round alike. All that
computes a product again must round as the first did: equal scores stay equal from pass to pass and from kernel to
kernel. So a class is cut in chains only where such sums run over it, or products that are stored as they are, so that
nobody computes them again, and that no other fold of the kernel reads; and nothing else sums over it. Each has all of
it in one block; such sums may also walk it in blocks of whole chains, which round alike however many a block has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.expr import Axis, Expr
from tilewright.ir.form import Form, Item, folds_read
from tilewright.ir.program import Collapse, Dot, Loop, Stmt, TileProgram, rewrite_body
from tilewright.ir.sizes import dims


def limit_product_chains(program: TileProgram, form: Form, chain: int) -> TileProgram:
    """The program of a form with `chain` products (0: no limit) in a chain."""
    folds = [t for t in form.items if t.is_fold]
    read = {number for t in folds for number in folds_read(t.roots)}
    stored = {number for o in form.outputs for number in _stored(o.body[0])}
    summed = _along([t for t in folds if t.summed])
    cut = summed | _along([t for t in folds if t.id in stored and t.id not in read])
    kept = _along([t for t in folds if not (t.summed or (t.id in stored and t.id not in read))])
    unbroken = (
        {s.k for s in program.statements() if isinstance(s, Dot)} & cut - kept if chain else set[Axis]()
    )
    walked = unbroken & summed - _along([t for t in folds if not t.summed])
    for s in program.statements():
        if isinstance(s, Loop) and s.axis in unbroken and not _is_one_step(s):
            if s.axis not in walked or s.tile % chain:
                unbroken.discard(s.axis)
        elif isinstance(s, Collapse):
            unbroken -= set(s.axes)

    def change(s: Stmt) -> tuple[Stmt, ...] | None:
        return (replace(s, chain=chain),) if isinstance(s, Dot) and s.k in unbroken else None

    unbroken = {k for k in unbroken if not _fits(k, chain)}
    return replace(program, body=rewrite_body(program.body, change)) if unbroken else program


def _along(folds: Sequence[Item]) -> set[Axis]:
    """The classes that some of these walk."""
    return {a for t in folds for a in t.reduce}


def _stored(body: Expr) -> list[int]:
    """The fold that an output is, but for its type."""
    while body.op in ("cast", "narrow"):
        body = body.args[0]
    return folds_read((body,)) if body.op == "value" else []


def _is_one_step(loop: Loop) -> bool:
    most = dims.static(loop.axis.extent)
    return dims.static(loop.start) == 0 and most is not None and most <= loop.tile


def _fits(k: Axis, chain: int) -> bool:
    most = dims.static(k.extent)
    return most is not None and most <= chain
