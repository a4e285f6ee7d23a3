"""Last steps of loops that stay loops.

A loop that a mask cuts often leaves one step (the tile on the diagonal of causal attention). Printed as a row of
statements it stands beside what follows, and the assembler moves registers of wide accumulators between its products:
it then waits for each product of the kernel, those of the loop before included, and spills. As a loop of one step it
does neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.ir.expr import Axis
from tilewright.ir.program import Dot, Loop, Nest, Stmt, is_binding, walk_statements
from tilewright.ir.selection import MatrixMultiply
from tilewright.tuning.thresholds import GPU_MATMUL


def keep_last_steps(body: Sequence[Stmt], tiles: Mapping[Axis, int], threads: int) -> tuple[Stmt, ...]:
    """`body` in which single steps behind loops over the same axis stay loops, where their products add to accumulators
    that take many registers of each of a block's `threads`."""
    walked = {s.axis for s in body if isinstance(s, Loop) and not is_binding(s)}
    made: list[Stmt] = []
    for s in body:
        if isinstance(s, Loop) and is_binding(s) and s.axis in walked:
            made.append(replace(s, looped=any(_is_wide(x, tiles, threads) for x in walk_statements(s.body))))
        elif isinstance(s, (Loop, Nest)):
            made.append(replace(s, body=keep_last_steps(s.body, tiles, threads)))
        else:
            made.append(s)
    return tuple(made)


def _is_wide(s: Stmt, tiles: Mapping[Axis, int], threads: int) -> bool:
    if not isinstance(s, Dot) or not isinstance(s.method, MatrixMultiply):
        return False
    elements = 1
    for a in s.acc.axes:
        elements *= tiles.get(a, 1)
    return elements >= GPU_MATMUL.min_apart_registers * threads
