"""For vectors of elements: products in registers, accesses along other axes than the vector axis, orders of merges."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from tilewright.ir.dtype import Kind, bool_, f32
from tilewright.ir.expr import Axis, walk
from tilewright.ir.program import (
    Branch,
    Collapse,
    Declare,
    Dot,
    Load,
    Loop,
    Nest,
    Stmt,
    Store,
    TileProgram,
    Update,
    defines,
)
from tilewright.ir.selection import IN_PLACE, Access, MicroKernel
from tilewright.ir.sizes import dims as index
from tilewright.target import Target
from tilewright.tuning.thresholds import CPP_TEXT, SUM_LEVELS

from .blocks import Blocks, Dims, blocks_of, step_along
from .nests import by_registers
from .products import is_block, read_in_place, select_micro_kernel, start_from

MERGED_LANES = frozenset({"add", "mul", "maximum", "minimum"})
"""What the vector headers merge of all lanes of a register at once."""
MERGED_TRUTHS = frozenset({*MERGED_LANES, "and", "or"})
MIN_TRANSPOSED_LANES = 4
"""From how many lanes on the vector headers transpose registers."""


def legalise_for_cpu(program: TileProgram, target: Target, *, exact: bool = False) -> TileProgram:
    """`program` with what `target` does of it selected. `exact`: where floats are exact numbers, one at a time. One
    that has nests is legalised already."""
    if any(isinstance(s, Nest) for s in program.statements()):
        return program
    width, held = (1, 1) if exact else (max(1, target.vector_bytes // f32.bytes), target.vector_registers)
    program = replace(program, width=width)
    selecting = _Selecting(blocks_of(program), held, read_in_place(program, exact=exact))
    return by_registers(replace(program, body=selecting.body(program.body)))


class _Selecting:
    """Selects statement by statement, where the axes around are bound, for a machine that has `held` registers."""

    def __init__(self, blocks: Blocks, held: int, in_place: Set[int]) -> None:
        self.blocks, self.held, self.in_place = blocks, held, in_place
        self.shapes: dict[int, Dims] = {}
        """The block of each value that is defined so far."""

    def body(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        """The statements of one body."""
        kernels: dict[int, MicroKernel] = {}
        absorbed: set[int] = set()
        for s in body:
            if isinstance(s, Dot) and is_block(s, self.blocks.lane):
                kernels[id(s)], start = start_from(select_micro_kernel(s, self.blocks, self.held), s, body)
                absorbed.add(id(start))
        found: list[Stmt] = []
        for s in body:
            match s:
                case Load() if s.var.id in self.in_place:
                    found.append(replace(s, access=IN_PLACE))
                case Load() | Store():
                    found.append(replace(s, access=self.access(s)))
                case Declare() | Update() if id(s) in absorbed:
                    found.append(replace(s, absorbed=True))
                case Dot() if id(s) in kernels:
                    found.append(replace(s, method=kernels[id(s)]))
                case Collapse():
                    found.append(self.merge(s))
                case Loop() | Branch():
                    found.append(self.nested(s))
                case _:
                    found.append(s)
            made = defines(s)
            self.shapes |= {v.id: self.blocks.dims(made[0].axes) for v in made}
        return tuple(found)

    def nested(self, s: Loop | Branch) -> Loop | Branch:
        """A statement with bodies."""
        if isinstance(s, Branch):
            return replace(s, body=self.body(s.body), orelse=self.body(s.orelse))
        outer, self.blocks = self.blocks, self.blocks.inside(s)
        made = replace(s, body=self.body(s.body))
        self.blocks = outer
        return made

    # --- accesses ----------------------------------------------------------

    def access(self, s: Load | Store) -> Access | None:
        """How memory is touched by vectors where it is contiguous along another axis than the vector axis."""
        dims = self.blocks.dims(s.var.axes if isinstance(s, Load) else s.axes)
        read = (x.value for e in (s.offset, s.mask) if e is not None for x in walk(e) if x.op == "var")
        if len(dims) != 2 or not dict(dims).keys() <= self.blocks.bound.keys():
            return None
        if any(isinstance(v, int) and self.shapes[v] for v in read):
            return None  # a place that differs from element to element
        along = _turned_axis(s, dims, self.blocks.lanes(dims))
        if along is not None:
            return Access("turned", along, _is_whole(s), _few_squares(s, dims, self.blocks))
        along = _dense_axis(s, dims, self.blocks)
        return None if along is None else Access("dense", along)

    # --- merges ------------------------------------------------------------

    def merge(self, s: Collapse) -> Collapse:
        """The order of a merge. A long sum of floats adds blocks up apart: a single chain would round as often as there
        are values, each time by the size of the whole."""
        (axis, *_), part, op = s.axes, s.parts[0], s.reduction.combiner
        if axis == self.blocks.lane:
            merged = MERGED_TRUTHS if s.vars[0].dtype is bool_ else MERGED_LANES
            registers = self.blocks.registers(self.shapes[part.id], axis)
            across = self.blocks.lanes(self.blocks.dims(s.axes)) > 1
            few = registers <= CPP_TEXT.max_inline_tree_registers
            return replace(s, pairwise=across and few and op in merged)
        count = self.blocks.registers(self.blocks.dims(part.axes), axis)
        long = count > SUM_LEVELS.max_single_chain and op == "add" and s.vars[0].dtype.is_float
        return replace(s, block=_near_root(count) if long else 0)


def _turned_axis(s: Load | Store, dims: Dims, lanes: int) -> Axis | None:
    """The axis of a block over `dims` that is contiguous in memory, if it is not the vector axis."""
    (a, tile), (lane, _) = dims
    plain = not isinstance(s, Load) or s.other is None or s.other.op == "const"
    if lanes < MIN_TRANSPOSED_LANES or tile % lanes or not plain:
        return None
    along, across = step_along(s.offset, a), step_along(s.offset, lane)
    fits = along is index.ONE and across is not None and across is not index.ONE and across is not index.ZERO
    return a if fits else None


def _is_whole(s: Load | Store) -> bool:
    """Whether squares of a load are whole, and numbers that stay as they are in memory."""
    if not isinstance(s, Load) or s.mask is not None:
        return False
    dtype = s.buffer.dtype
    return dtype.kind is not Kind.BOOL and dtype.compute is dtype and dtype is s.var.dtype


def _few_squares(s: Load | Store, dims: Dims, blocks: Blocks) -> bool:
    """Whether the squares of a load along the lanes, or of a store along the other axis, are few but several."""
    (_, tile), (_, width) = dims
    lanes = blocks.lanes(dims)
    if isinstance(s, Store):
        return 1 < tile // lanes <= CPP_TEXT.max_unrolled_squares
    return lanes < width and blocks.number(dims) <= CPP_TEXT.max_unrolled_registers


def _dense_axis(s: Load | Store, dims: Dims, blocks: Blocks) -> Axis | None:
    """The axis along which `s` reads a block of numbers contiguously, if whole vectors cover it."""
    if not isinstance(s, Load) or blocks.lanes(dims) > 1 or blocks.width < MIN_TRANSPOSED_LANES:
        return None
    if s.var.dtype.compute is not f32:
        return None
    dense = [a for a, tile in dims if tile % blocks.width == 0 and step_along(s.offset, a) is index.ONE]
    return dense[0] if dense else None


def _near_root(count: int) -> int:
    """The power of two, at least 4, next above the square root."""
    block = 4
    while block * block < count:
        block *= 2
    return block
