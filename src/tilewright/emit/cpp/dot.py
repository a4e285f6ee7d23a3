"""Products of blocks as C++: which operands are read where they lie, what the sums start from, the micro-kernel.

One side of a product has the vector axis; it stands in an array of registers. The other side is read number by number,
each of them multiplied with several registers: straight from memory where it is an input in fp32, else from an array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, Expr, axes_of, axis, conjuncts, is_const, walk
from tilewright.ir.program import (
    Branch,
    Declare,
    Dot,
    Load,
    Loop,
    Stmt,
    TileProgram,
    Update,
    Var,
    defines,
    uses,
)
from tilewright.ir.sizes import dims
from tilewright.tuning.thresholds import CPU_MATMUL

from .scope import Style, bare
from .statements import Body, Start


def start_of(body: Sequence[Stmt], dot: Dot) -> Start:
    """How the sums of `dot`, a statement of `body`, start, from the last statement before it that touches them."""
    before = [s for s in body[: next(k for k, s in enumerate(body) if s is dot)] if dot.acc.id in touched(s)]
    last = before[-1] if before else None
    match last:
        case Declare(vars=(_,), values=(value,)) if is_const(value, 0):
            return Start("nothing", last)
        case Update(vars=(_,), values=(value,), mask=None) if value.op == "mul":
            sums, factor = value.args
            if sums.value == dot.acc.id and sums.op == factor.op == "var" and isinstance(factor.value, int):
                made = next((v for s in body for v in defines(s) if v.id == factor.value), None)
                if made is not None and len(made.axes) == 1 and made.axes[0] in dot.acc.axes:
                    return Start("scaled", last, made)
        case _:
            pass
    return Start("block")


def touched(s: Stmt) -> set[int]:
    """Numbers of the values that a statement and what is inside it read, define or change."""
    found = set(uses(s)) | {v.id for v in defines(s)}
    if isinstance(s, Update):
        found |= {v.id for v in s.vars}
    inside = s.body if isinstance(s, Loop) else (*s.body, *s.orelse) if isinstance(s, Branch) else ()
    return found.union(*map(touched, inside))


def read_in_place(program: TileProgram, style: Style) -> dict[int, Load]:
    """Loads, by the number of their value, of which nothing is printed: only products use them, as the side without
    the vector axis, and can address them."""
    loads = {s.var.id: s for s in program.statements() if isinstance(s, Load)}
    fit = {v: s for v, s in loads.items() if _addressable(s, program, style)}
    for s in program.statements():
        if isinstance(s, Dot) and is_block(s, program.lane):
            wide, _ = sides(s, program.lane)
            fit.pop(wide.id, None)
        else:
            for v in uses(s):
                fit.pop(v, None)
    return fit


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


def _addressable(s: Load, program: TileProgram, style: Style) -> bool:
    if style.memory(s.buffer.dtype) not in ("float", "Exact") or len(s.var.axes) != 2 or s.ahead is not None:
        return False
    if program.lane in s.var.axes or any(x.op == "var" for x in walk(s.offset)):
        return False
    steps = [dims.coefficient(s.offset, axis(a)) for a in s.var.axes]
    if any(e is None or axes_of(e) for e in steps) or (s.other is not None and not is_const(s.other, 0)):
        return False
    return all(bound_of(term, s.var.axes) is not None for term in conjuncts(s.mask))


def bound_of(term: Expr, blocks: Sequence[Axis]) -> tuple[Axis, Expr] | None:
    """A condition as `axis < bound` for one of `blocks`, with a bound that has none of them."""
    if term.op != "lt" or not isinstance(term.args[0].value, Axis) or term.args[0].value not in blocks:
        return None
    used = {a.value for a in axes_of(term.args[1])}
    plain = not used & set(blocks) and not any(x.op in ("var", "read") for x in walk(term.args[1]))
    return (term.args[0].value, term.args[1]) if plain else None


class Product:
    """Prints one product of blocks."""

    def __init__(self, body: Body, s: Dot, start: Start) -> None:
        self.body, self.s, self.start = body, s, start
        self.wide, self.narrow = sides(s, body.program.lane)
        self.row = next(a for a in self.narrow.axes if a != s.k)

    def run(self) -> None:
        """Print it."""
        body, lines, s = self.body, self.body.lines, self.s
        shape = body.dims(s.acc.axes)
        if self.start.kind == "nothing" and body.place(s.acc, shape, array=True).array:
            body.declare_array(s.acc, shape)
            body.printer.states.add(s.acc.id)
        tiles = dict(body.dims((*s.acc.axes, s.k)))
        limits: dict[Axis, str] = {}
        load = body.special.in_place.get(self.narrow.id)
        if load is None:
            a, row_step, k_step = self._array()
        else:
            a, row_step, k_step = self._memory(load)
            for limit in (bound_of(term, load.var.axes) for term in conjuncts(load.mask)):
                assert limit is not None
                limits[limit[0]] = self._limit(limit[0], limit[1], tiles[limit[0]])
        width = dict(body.counts(shape)).get(shape[-1][0], 1)
        rows, depth = limits.get(self.row, str(tiles[self.row])), limits.get(s.k, str(tiles[s.k]))
        acc, b = (self._first(v) for v in (s.acc, self.wide))
        if self.row in limits and self.start.kind == "nothing":
            lines.put(f"clear({acc} + {rows} * {width}, ({tiles[self.row]} - {rows}) * {width});")
        m, j = self._registers(tiles[self.row], width)
        factor = f"decltype({acc})(nullptr)"
        if self.start.factor is not None:
            factor = self._first(self.start.factor)
        steps = f"{a}, {row_step}, {k_step}, {b}, {factor}, {depth}"
        chain = f", {s.chain}" if s.chain else ""
        lines.put(f"dot<{m}, {j}, Start::{self.start.kind}{chain}>({acc}, {rows}, {width}, {steps});")

    def _registers(self, rows: int, width: int) -> tuple[int, int]:
        """Rows and registers per row of the micro-kernel."""
        if self.body.printer.style.exact:
            return 1, 1
        held = self.body.printer.style.registers
        across = max(
            n for n in range(1, CPU_MATMUL.max_lane_registers + 1) if width % n == 0 and n * n <= held
        )
        most = max(1, min(CPU_MATMUL.max_rows, (held - 1 - across) // across))
        return -(-rows // -(-rows // most)), across

    def _first(self, v: Var) -> str:
        place = self.body.printer.places[v.id]
        return (
            "&" + place.name + "[0]" * len(self.body.counts(place.dims)) if place.array else f"&{place.name}"
        )

    def _limit(self, a: Axis, bound: Expr, tile: int) -> str:
        name = self.body.printer.fresh()
        left = bare(self.body.printer.scalar(dims.sub(bound, axis(a))))
        self.body.lines.put(f"const i64 {name} = min({tile}, {left});")
        return name

    def _memory(self, load: Load) -> tuple[str, str, str]:
        printer = self.body.printer
        steps = [dims.coefficient(load.offset, axis(x)) for x in (self.row, self.s.k)]
        row, k = (bare(printer.scalar(e)) for e in steps if e is not None)
        return self.body.memory.address(load.buffer, load.offset).pointer, row, k

    def _array(self) -> tuple[str, str, str]:
        shape = self.body.counts(self.body.printer.places[self.narrow.id].dims)
        (_, _), (last, length) = shape
        steps = {last: 1, next(x for x, _ in shape if x != last): length}
        return self._first(self.narrow), str(steps[self.row]), str(steps[self.s.k])


def dot(body: Body, s: Dot, start: Start) -> None:
    """Print a product of blocks."""
    Product(body, s, start).run()


def starts(body: Sequence[Stmt], lane: Axis | None) -> Iterator[tuple[Dot, Start]]:
    """The products of blocks among the statements of `body`, and how they start."""
    for s in body:
        if isinstance(s, Dot) and is_block(s, lane):
            yield s, start_of(body, s)
