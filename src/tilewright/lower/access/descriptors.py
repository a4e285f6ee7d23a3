"""Which loads are blocks of a tensor that a descriptor reaches: the machine copies them without an address for each
element.

A descriptor (CUDA's tensor map) knows a base, up to five extents, and strides that are multiples of 16 bytes, the last
of one element; it copies a box of powers of two, and what lies outside the extents arrives as 0. So the offset must be
affine in the block axes, one of them contiguous, and a mask may hold nothing but upper bounds of them. What else the
offset has (a head, an image of a batch) is a dim of its own with a tile of 1, never a shift along another dim: rows
behind the end of one head are outside the extents, not rows of the next head. Where sizes are symbols, only a call
knows whether strides are such multiples; here those are left that can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.errors import IllegalSchedule
from tilewright.ir.expr import Axis, Expr, axes_of, axis, conjuncts, is_const, substitute, walk
from tilewright.ir.program import (
    Descriptor,
    Load,
    Place,
    Stmt,
    Store,
    StoredBlock,
    TileProgram,
    Var,
    rewrite_body,
)
from tilewright.ir.sizes import dims

MAX_RANK = 5
"""What a descriptor may have."""

ALIGNMENT_BYTES = 16
"""Bytes of which strides, the start and the contiguous side of a box are multiples."""

MAX_BOX_EXTENT = 256
"""Elements of the longest side of a box."""

MAX_ELEMENT_BYTES = 4
"""Bytes of the largest element."""

NOWHERE = -1
"""The number of no value."""

DATA = frozenset({"var", "value", "read", "slot"})
"""What makes an offset or a mask depend on data."""


def with_descriptors(program: TileProgram) -> TileProgram:
    """The same program in which loads that descriptors reach say how."""
    tiles = {s.axis: s.tile for s in program.loops() if s.tile > 1}

    def change(s: Stmt) -> Sequence[Stmt] | None:
        found = described(s, tiles) if isinstance(s, Load) else None
        return None if found is None else (found,)

    return replace(program, body=rewrite_body(program.body, change))


def with_stored_blocks(program: TileProgram, pieces: int) -> TileProgram:
    """The same program in which stores of blocks of rows and columns that descriptors reach say how, in so many
    `pieces` side by side. What is loaded again, or stored over, is stored by threads: the machine orders these. Raises
    IllegalSchedule for more pieces than two: no machine's language takes a block apart otherwise."""
    if pieces > 2:
        raise IllegalSchedule(
            f"a block of results in {pieces} pieces", law="descriptors store a block whole, or in two halves"
        )
    tiles = {s.axis: s.tile for s in program.loops() if s.tile > 1}
    loaded = {s.buffer.name for s in program.statements() if isinstance(s, Load)}

    def change(s: Stmt) -> Sequence[Stmt] | None:
        if not isinstance(s, Store) or s.buffer.name in loaded or program.over:
            return None
        block = _stored_block(s, tiles, pieces)
        return None if block is None else (replace(s, block=block),)

    return replace(program, body=rewrite_body(program.body, change))


def _stored_block(s: Store, tiles: Mapping[Axis, int], pieces: int) -> StoredBlock | None:
    """The block of a store, where a descriptor reaches it; in one piece if `pieces` of it are too narrow."""
    whole = described(Load(Var(NOWHERE, s.buffer.dtype, s.axes), s.buffer, s.offset, s.mask), tiles)
    if whole is None or whole.descriptor is None or sum(n > 1 for n in whole.descriptor.tile) != 2:
        return None
    *rows, width = whole.descriptor.tile
    part = width // pieces
    if width % pieces or part * s.buffer.dtype.bytes < ALIGNMENT_BYTES:
        pieces, part = 1, width
    return StoredBlock(replace(whole.descriptor, tile=(*rows, part)), whole.at, pieces)


def described(s: Load, tiles: Mapping[Axis, int]) -> Load | None:
    """The load with its descriptor and indices; None if no descriptor reaches its block. `tiles` are those of block
    axes, in the order in which they are bound."""
    dtype = s.buffer.dtype
    own = [a for a in tiles if a in s.var.axes]
    if s.buffer.place is not Place.PARAMETER or not dtype.is_float or dtype.bytes > MAX_ELEMENT_BYTES:
        return None
    if not own or max(tiles[a] for a in own) > MAX_BOX_EXTENT or any(x.op in DATA for x in walk(s.offset)):
        return None
    steps = {a: dims.coefficient(s.offset, axis(a)) for a in own}
    ends = _ends(s, own)
    near = [a for a, step in steps.items() if step is dims.ONE]
    if ends is None or len(near) != 1 or tiles[near[0]] * dtype.bytes < ALIGNMENT_BYTES:
        return None
    own = [*(a for a in own if a not in near), *near]
    strides = [step for a in own if (step := steps[a]) is not None]
    rest = dims.sub(s.offset, dims.add(*(dims.mul(x, axis(a)) for x, a in zip(strides, own, strict=False))))
    beside = _beside(rest) if len(strides) == len(own) else None
    if beside is None or any(axis(a) in axes_of(x) for x in beside.values() for a in own):
        return None
    start = beside.pop(dims.ONE, dims.ZERO)
    places = [*beside, *map(axis, own)]
    strides = [*beside.values(), *strides]
    most = [*map(_bound, beside), *(ends[a] for a in own)]
    if len(places) > MAX_RANK or not all(_steps_well(x, dtype.bytes) for x in strides[:-1]):
        return None
    extents = tuple(b for b in most if b is not None and not axes_of(b))
    if len(extents) < len(places) or axes_of(start) or not _multiple(start, dtype.bytes):
        return None
    tile = (*[1] * len(beside), *(tiles[a] for a in own))
    return replace(s, descriptor=Descriptor(start, extents, tuple(strides), tile), at=tuple(places))


def _ends(s: Load, own: Sequence[Axis]) -> dict[Axis, Expr] | None:
    """Where a mask ends each block axis; None if it says anything else, or gives other lanes another value than 0."""
    if s.other is not None and not is_const(s.other, 0):
        return None
    ends = {a: a.extent for a in own}
    for c in conjuncts(s.mask):
        a = c.args[0].value if c.op == "lt" else None
        if not isinstance(a, Axis) or a not in ends or axes_of(c.args[1]):
            return None
        ends[a] = dims.minimum(ends[a], c.args[1])
    return ends


def _beside(rest: Expr) -> dict[Expr, Expr] | None:
    """An index expression as a sum of places times strides over symbols: place -> stride, and the part without a place
    as that of 1. None if a place is no single axis or quotient, or may be negative."""
    found: dict[Expr, Expr] = {}
    for monomial, factor in dims.linear(rest).items():
        moving = [atom for atom in monomial if axes_of(atom)]
        if len(moving) > 1 or (moving and not dims.at_least(moving[0], 0)):
            return None
        place = moving[0] if moving else dims.ONE
        stride = dims.mul(dims.integer(factor), *(atom for atom in monomial if not axes_of(atom)))
        found[place] = dims.add(found.get(place, dims.ZERO), stride)
    return found


def _bound(place: Expr) -> Expr | None:
    """One more than the largest value of a place."""
    last = dims.bounds(place)[1]
    return None if last is None else dims.add(last, dims.ONE)


def _steps_well(stride: Expr, size: int) -> bool:
    """Whether a stride is not negative and can be a multiple of what descriptors take."""
    return not axes_of(stride) and dims.at_least(stride, 0) and _multiple(stride, size)


def _multiple(e: Expr, size: int) -> bool:
    """Whether elements of `size` bytes behind `e` others lie on a granule if all symbols are multiples of one."""
    rounded = {s: dims.mul(s, dims.integer(ALIGNMENT_BYTES)) for s in dims.symbols_of(e)}
    return dims.divisible(substitute(e, rounded), max(1, ALIGNMENT_BYTES // size))
