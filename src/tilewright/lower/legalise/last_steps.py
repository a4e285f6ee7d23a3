"""Last steps of loops that stay loops.

A loop that a mask cuts often leaves one step (the tile on the diagonal of causal attention). Printed as a row of
statements it has no stages, and products that are added to one accumulator one after the other (a score's sum in parts)
then come to the assembler with moves of its registers between them: it waits for each product of the kernel, those of
the loop beside it included (ptxas says C7515), and may spill. As a loop of one step they do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.program import Dot, Loop, Nest, Stmt, is_binding, walk_statements
from tilewright.ir.selection import MatrixMultiply


def keep_last_steps(body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """`body` in which single steps beside loops over the same axis stay loops, where a matrix unit adds several
    products to one accumulator."""
    walked = {s.axis for s in body if isinstance(s, Loop) and not is_binding(s)}
    made: list[Stmt] = []
    for s in body:
        if isinstance(s, Loop) and is_binding(s) and s.axis in walked:
            made.append(replace(s, looped=_adds_parts(s)))
        elif isinstance(s, (Loop, Nest)):
            made.append(replace(s, body=keep_last_steps(s.body)))
        else:
            made.append(s)
    return tuple(made)


def _adds_parts(s: Loop) -> bool:
    dots = (x for x in walk_statements(s.body) if isinstance(x, Dot) and isinstance(x.method, MatrixMultiply))
    return max(Counter(x.acc.id for x in dots).values(), default=0) > 1
