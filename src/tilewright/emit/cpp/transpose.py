"""Accesses that are contiguous along another axis than the lanes: turned in registers, or into an array of numbers.

A block over (a, lane) holds vectors along the lane axis. Where memory is contiguous along `a` instead, whole tiles of
lanes x lanes elements are transposed, so that memory is still touched by vectors. A block of two axes without the lane
axis is an array of numbers; it is loaded by vectors along the axis that is contiguous in memory.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from tilewright.errors import VerifyError
from tilewright.ir.dtype import DType, Kind
from tilewright.ir.expr import Axis
from tilewright.ir.program import Load, Store
from tilewright.ir.selection import Access
from tilewright.lower.legalise.blocks import Dims, step_along

from .scope import RegisterPlace, Scope, VectorUnit, bare
from .statements import Body


def load_dense(body: Body, s: Load, dims: Dims, along: Axis) -> None:
    """Print a load along `dense_axis`."""
    lines, printer = body.lines, body.printer
    lanes = str(body.program.width)
    ((row, rows),) = [d for d in dims if d[0] != along]
    tile = dict(dims)[along]
    printer.places[s.var.id] = RegisterPlace(f"v{s.var.id}", s.var, ((row, rows), (along, tile)), True)
    kind = printer.style.scalar(s.var.dtype)
    lines.put(f"alignas(64) {kind} v{s.var.id}[{rows}][{tile}];")
    u, w = (f"u{body.axis_name(x)[1:]}" for x in (row, along))
    values = dict(body.axes)
    values[row], values[along] = f"({values[row]} + {u})", f"({values[along]} + {w})"
    outer_unit, outer_scope = printer.unit, printer.scope
    with lines.block(f"for (i64 {u} = 0; {u} < {rows}; {u}++)"):
        with lines.block(f"for (i64 {w} = 0; {w} < {tile}; {w} += {lanes})"):
            printer.unit = VectorUnit(values, along, lanes)
            printer.scope = Scope(outer_scope, frozenset((row, along)))
            lines.put(f"store(&v{s.var.id}[{u}][{w}], {bare(body.memory.load(s))});")
    printer.unit, printer.scope = outer_unit, outer_scope


class Turn:
    """Prints one such access."""

    def __init__(self, body: Body, dims: Dims, access: Access) -> None:
        self.body, self.access = body, access
        self.dims = dims
        (self.a, self.tile), (self.lane, self.width) = dims
        self.count = body.blocks.lanes(dims)
        self.lanes = str(self.count)
        number_a, number_lane = (body.axis_name(x)[1:] for x in (self.a, self.lane))
        self.row = f"u{number_a}"
        self.column = f"u{number_lane}"

    def straight(self) -> VectorUnit:
        """The unit of one register along the lane axis: `a` at position `q * lanes + j`."""
        base = self._place("j", self.row, self.tile)
        values = dict(self.body.axes)
        values[self.a] = f"{values[self.a]} + {base}"
        column = self._place("", self.column, self.width)
        values[self.lane] += f" + {column}" if column else ""
        index_of = {self.a: base}
        if self.width > self.count:
            index_of[self.lane] = self.column
        return VectorUnit(self._bracketed(values), self.lane, self.lanes, index_of)

    def turned(self, base: str = "j") -> VectorUnit:
        """The unit of one register along `a`: the lane axis at position `u * lanes + base`."""
        values = dict(self.body.axes)
        row = self._place("", self.row, self.tile)
        values[self.a] += f" + {row}" if row else ""
        column = self._place(base, self.column, self.width)
        values[self.lane] += f" + {column}" if column else ""
        return VectorUnit(self._bracketed(values), self.a, self.lanes)

    def _place(self, j: str, counter: str, tile: int) -> str:
        block = f"{counter} * {self.lanes}" if tile > self.count else ""
        return " + ".join(x for x in (block, j) if x)

    @staticmethod
    def _bracketed(values: dict[Axis, str]) -> dict[Axis, str]:
        return {a: f"({text})" if " " in text else text for a, text in values.items()}

    def register(self, dtype: DType) -> str:
        """The type of a turned register: truth values are turned as integers."""
        name = "i32" if dtype.kind is Kind.BOOL else self.body.printer.style.scalar(dtype)
        return f"vec<{name}, {self.lanes}>"

    @contextmanager
    def loop(self, counter: str, count: int, unroll: bool = False) -> Generator[None]:
        """A loop, left out where it has one step."""
        if count > 1:
            if unroll:
                self.body.lines.put(f"#pragma GCC unroll {count}")
            self.body.lines.put(f"for (i64 {counter} = 0; {counter} < {count}; {counter}++) {{")
            self.body.lines.depth += 1
        yield
        if count > 1:
            self.body.lines.depth -= 1
            self.body.lines.put("}")

    @contextmanager
    def each(self, unit: VectorUnit) -> Generator[None]:
        """The loop over the registers of a square tile, with the unit of one of them."""
        printer = self.body.printer
        outer_unit, outer_scope = printer.unit, printer.scope
        with self.loop("j", self.count, unroll=True):
            printer.unit = unit
            printer.scope = Scope(outer_scope, frozenset((self.a, self.lane)))
            yield
        printer.unit, printer.scope = outer_unit, outer_scope

    def run(self, s: Load | Store) -> None:
        """Print the access as a loop over square tiles."""
        dtype = s.var.dtype if isinstance(s, Load) else s.value.dtype
        if isinstance(s, Load) and self.body.place(s.var, self.dims, array=True).array:
            self.body.declare_array(s.var, self.dims)
        unroll = isinstance(s, Load) and self.access.unrolled
        with self.body.lines.block(""), self.loop(self.column, self.width // self.count, unroll):
            if isinstance(s, Load):
                self.load(s, dtype)
            else:
                self.store(s, dtype)

    def load(self, s: Load, dtype: DType) -> None:
        """Print a load: tile by tile, from rows along `a` to registers along the lane axis."""
        lines, printer = self.body.lines, self.body.printer
        truth = dtype.kind is Kind.BOOL
        with self.loop(self.row, self.tile // self.count):
            lines.put(f"{self.register(dtype)} rows[{self.lanes}];")
            if self.access.at_once:
                self.load_transposed(s)
            else:
                with self.each(self.turned()):
                    text = self.body.memory.load(s)
                    lines.put(f"rows[j] = {f'{text}.m' if truth else bare(text)};")
                lines.put("transpose(rows);")
            with self.each(self.straight()):
                value = f"mask<{self.lanes}>{{rows[j]}}" if truth else "rows[j]"
                lines.put(f"{printer.access(s.var.id)} = {value};")

    def load_transposed(self, s: Load) -> None:
        """Print the load of a tile at once: a fixed distance from row to row."""
        printer = self.body.printer
        step = step_along(s.offset, self.lane)
        if s.mask is not None or step is None or s.buffer.dtype is not s.var.dtype:
            raise VerifyError(f"{s.var} cannot be loaded at once", phase="emit")
        outer_unit, outer_scope = printer.unit, printer.scope
        printer.unit = self.turned(base="")
        printer.scope = Scope(outer_scope, frozenset((self.a, self.lane)))
        pointer = self.body.memory.address(s.buffer, s.offset).pointer
        stride = bare(printer.scalar(step))
        printer.unit, printer.scope = outer_unit, outer_scope
        self.body.lines.put(f"load_transposed({pointer}, {stride}, rows);")

    def store(self, s: Store, dtype: DType) -> None:
        """Print a store: all tiles along `a` are turned first, then written one long row after the other (lines that
        follow each other in memory are written together)."""
        lines, printer = self.body.lines, self.body.printer
        blocks, truth = self.tile // self.count, dtype.kind is Kind.BOOL
        rows = f"rows[{self.row}]" if blocks > 1 else "rows"
        sizes = f"[{blocks}]" if blocks > 1 else ""
        lines.put(f"{self.register(dtype)} rows{sizes}[{self.lanes}];")
        with self.loop(self.row, blocks):
            with self.each(self.straight()):
                text = printer.vector(s.value)
                lines.put(f"{rows}[j] = {f'{text}.m' if truth else bare(text)};")
            lines.put(f"transpose({rows});")
        value = f"mask<{self.lanes}>{{{rows}[j]}}" if truth else f"{rows}[j]"
        if blocks == 1:
            with self.each(self.turned()):
                self.body.memory.store(s, value)
            return
        outer_unit, outer_scope = printer.unit, printer.scope
        with self.loop("j", self.count), self.loop(self.row, blocks, self.access.unrolled):
            printer.unit = self.turned()
            printer.scope = Scope(outer_scope, frozenset((self.a, self.lane)))
            self.body.memory.store(s, value)
        printer.unit, printer.scope = outer_unit, outer_scope


def turn(body: Body, s: Load | Store, dims: Dims, access: Access) -> None:
    """Print an access along another axis than the lanes."""
    if access.kind == "dense" and isinstance(s, Load) and access.along is not None:
        load_dense(body, s, dims, access.along)
    else:
        Turn(body, dims, access).run(s)
