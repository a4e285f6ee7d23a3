"""Products of blocks in vector registers: which loads they read in place, what their sums start from, how many rows.

One side of a product has the vector axis; it stands in an array of registers. The other side is read number by number,
each of them multiplied with several registers: straight from memory where it is an input in fp32, else from an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.dtype import DType, f32
from tilewright.ir.expr import Axis, Expr, axes_of, axis, conjuncts, is_const, walk
from tilewright.ir.program import (
    Declare,
    Dot,
    Load,
    Stmt,
    TileProgram,
    Update,
    Var,
    defines,
    uses,
    walk_statements,
)
from tilewright.ir.selection import MicroKernel
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import CPU_MATMUL

from .blocks import Blocks


def is_block(s: Dot, lane: Axis | None) -> bool:
    """Whether a product is one of blocks of two axes each, of which one has the vector axis."""
    pair = [set(v.axes) for v in (s.acc, s.a, s.b)]
    if (
        lane is None
        or any(len(axes) != 2 for axes in pair)
        or lane not in s.acc.axes
        or s.acc.dtype is not f32
    ):
        return False
    return all(s.k in axes for axes in pair[1:]) and (lane in pair[1]) != (lane in pair[2])


def sides(s: Dot, lane: Axis | None) -> tuple[Var, Var]:
    """The side with the vector axis, and the other one."""
    return (s.a, s.b) if lane in s.a.axes else (s.b, s.a)


def read_in_place(program: TileProgram, *, exact: bool) -> set[int]:
    """Numbers of the loaded values that only products use, as the side without the vector axis, and can address."""
    loads = [s for s in program.statements() if isinstance(s, Load)]
    fit = {s.var.id for s in loads if _addressable(s, program.lane, exact)}
    for s in program.statements():
        if isinstance(s, Dot) and is_block(s, program.lane):
            fit.discard(sides(s, program.lane)[0].id)
        else:
            fit.difference_update(uses(s))
    return fit


def _addressable(s: Load, lane: Axis | None, exact: bool) -> bool:
    if not _is_single(s.buffer.dtype, exact) or len(s.var.axes) != 2 or s.ahead is not None:
        return False
    if lane in s.var.axes or any(x.op == "var" for x in walk(s.offset)):
        return False
    steps = [dims.coefficient(s.offset, axis(a)) for a in s.var.axes]
    if any(e is None or axes_of(e) for e in steps) or (s.other is not None and not is_const(s.other, 0)):
        return False
    return all(bound_of(term, s.var.axes) is not None for term in conjuncts(s.mask))


def _is_single(dtype: DType, exact: bool) -> bool:
    """Whether elements in memory have the type that products take: exact numbers, if all floats are such."""
    return dtype is f32 or (exact and dtype.is_float)


def bound_of(term: Expr, blocks: Sequence[Axis]) -> tuple[Axis, Expr] | None:
    """A condition as `axis < bound` for one of `blocks`, with a bound that has none of them."""
    if term.op != "lt" or not isinstance(term.args[0].value, Axis) or term.args[0].value not in blocks:
        return None
    used = {a.value for a in axes_of(term.args[1])}
    plain = not used & set(blocks) and not any(x.op in ("var", "read") for x in walk(term.args[1]))
    return (term.args[0].value, term.args[1]) if plain else None


def select_micro_kernel(s: Dot, blocks: Blocks, held: int) -> MicroKernel:
    """Rows and registers per row of a product where a machine has `held` vector registers: sums, a row of the one side
    and a number of the other one fit."""
    _, narrow = sides(s, blocks.lane)
    (row,) = (a for a in narrow.axes if a != s.k)
    shape = blocks.dims(s.acc.axes)
    rows, width = dict(shape)[row], blocks.registers(shape, shape[-1][0])
    across = max(n for n in range(1, CPU_MATMUL.max_lane_registers + 1) if width % n == 0 and n * n <= held)
    most = max(1, min(CPU_MATMUL.max_rows, (held - 1 - across) // across))
    return MicroKernel(-(-rows // -(-rows // most)), across)


def start_from(kernel: MicroKernel, s: Dot, body: Sequence[Stmt]) -> tuple[MicroKernel, Stmt | None]:
    """A product, a statement of `body`, that starts as the last statement says that touches its sums before, and that
    statement, which is then part of it; None if the sums just stand there."""
    before = [x for x in body[: next(k for k, x in enumerate(body) if x is s)] if s.acc.id in touched(x)]
    last = before[-1] if before else None
    match last:
        case Declare(vars=(_,), values=(value,)) if is_const(value, 0):
            return replace(kernel, start="nothing"), last
        case Update(vars=(_,), values=(value,), mask=None) if value.op == "mul":
            sums, factor = value.args
            if sums.value == s.acc.id and sums.op == factor.op == "var":
                made = next((v for x in body for v in defines(x) if v.id == factor.value), None)
                if made is not None and len(made.axes) == 1 and made.axes[0] in s.acc.axes:
                    return replace(kernel, start="scaled", factor=made.id), last
        case _:
            pass
    return kernel, None


def touched(s: Stmt) -> set[int]:
    """Numbers of the values that a statement and what is inside it read, define or change."""
    found: set[int] = set()
    for x in walk_statements([s]):
        found |= {*uses(x), *(v.id for v in defines(x))}
        if isinstance(x, Update):
            found |= {v.id for v in x.vars}
    return found
