"""What a tile program issues: vector instructions of all its grid points, from a few of them.

Where parts of loops are left out, grid points differ: those in the middle of equal shares of the grid stand for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.dtype import i64
from tilewright.ir.expr import SCALARS, Axis, Expr, axis, substitute, walk
from tilewright.ir.program import (
    Branch,
    Collapse,
    Dot,
    Load,
    Loop,
    Prefix,
    Stmt,
    Store,
    TileProgram,
    Update,
    defines,
    expressions,
    in_order,
)
from tilewright.ir.sizes import dims
from tilewright.tuning.search_limits import SCHEDULES
from tilewright.tuning.thresholds import SIZES


def count_instructions(program: TileProgram, width: int, hints: SizeHints) -> float:
    """Vector instructions of `width` lanes, symbols taken as typical sizes."""
    points = hints.estimate(dims.prod(g.extent for g in program.grid))
    total = 0.0
    for k in range(SCHEDULES.work_samples):
        at = {
            axis(g.axis): dims.integer(hints.estimate(g.extent) * (2 * k + 1) // (2 * SCHEDULES.work_samples))
            for g in program.grid
        }
        total += _Walk(program, width, hints).body(program.body, at)
    return total / SCHEDULES.work_samples * points


class _Walk:
    def __init__(self, program: TileProgram, width: int, hints: SizeHints) -> None:
        self.width, self.hints = width, hints
        self.tiles = {s.axis: s.tile for s in program.loops()}
        self.plain: dict[int, float] = {}
        """Instructions of the statements of a body that are not loops, by the body's identity."""

    def body(self, body: Sequence[Stmt], at: Mapping[Expr, Expr]) -> float:
        """Instructions of statements where axes have the values `at`."""
        total = self.plain.get(id(body))
        if total is None:
            total = self.plain[id(body)] = sum(map(self.statement, in_order(body)))
        for s in in_order(body):
            if isinstance(s, Loop):
                start = self.hints.estimate(substitute(_with_data(s.start, -SIZES.data_size), at))
                stop = self.hints.estimate(substitute(_with_data(s.stop, SIZES.data_size), at))
                length = dims.static(dims.sub(s.stop, s.start))
                trips = max(0, -(-(stop - start if length is None else length) // s.tile))
                if trips:
                    middle = dims.integer(start + trips // 2 * s.tile)
                    total += trips * self.body(s.body, {**at, axis(s.axis): middle})
            elif isinstance(s, Branch):
                total += self.body(s.body, at) + self.body(s.orelse, at)
        return total

    def statement(self, s: Stmt) -> float:
        """Instructions of one statement without those of its body."""
        match s:
            case Loop() | Branch():
                return 0.0
            case Dot():
                return self.registers((*s.acc.axes, s.k))
            case Collapse() | Prefix():
                return self.registers(s.parts[0].axes)
            case Load() | Store():
                return self.registers(s.var.axes if isinstance(s, Load) else s.axes)
            case _:
                made = s.vars if isinstance(s, Update) else defines(s)
                return self.registers(made[0].axes if made else ()) * sum(map(_operations, expressions(s)))

    def registers(self, axes: Sequence[Axis]) -> float:
        """Registers of a block."""
        count = 1
        for a in set(axes):
            count *= self.tiles.get(a, 1)
        return count / self.width if count > 1 else 1.0


def _with_data(e: Expr, number: int) -> Expr:
    """`e` with `number` for each value from memory."""
    return substitute(e, {x: dims.integer(number) for x in walk(e) if x.op == "var"})


def _operations(e: Expr) -> int:
    """Instructions of one evaluation."""
    return sum(SCALARS[x.op].cost for x in set(walk(e)) if x.op in SCALARS and x.dtype is not i64)
