"""For machines whose threads share a grid point: which products a matrix unit does, and how it takes their sides;
which loops have loads of several steps under way; which loads take descriptors, and which halves stay halves; what is
told of accesses; where kernels that are launched early wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.errors import VerifyError
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis
from tilewright.ir.program import (
    Branch,
    Compute,
    Declare,
    Dot,
    Load,
    Loop,
    Nest,
    Stmt,
    Store,
    TileProgram,
    Update,
    Var,
    is_binding,
    rewrite_body,
    uses,
    walk_statements,
)
from tilewright.ir.selection import MatrixMultiply, Precision
from tilewright.lower.variants import has_odd_steps
from tilewright.target import Target

from .addresses import share_addresses
from .early_launch import with_early_launch
from .index_floats import convert_by_axes
from .last_steps import keep_last_steps
from .product_sums import add_products
from .runs import copy_for_threads, load_once, tell_runs
from .stores import with_stores_last

MIN_DOT_EXTENT = 16
"""Elements that each side of a block on a matrix unit has at least."""

ALONG_ELEMENTS = (Load, Store, Compute, Declare, Update, Loop, Nest, Branch)
"""Statements that mean the same for a block that has an element more than once; a merge of lanes would count it
twice."""


def legalise_for_gpu(program: TileProgram, target: Target) -> TileProgram:
    """`program` with what `target` does of it selected. Raises VerifyError for a target of another kind, and for block
    axes that it cannot have."""
    if target.language != "triton":
        raise VerifyError(f"target {target.name} takes {target.language}", phase="legalise")
    program = with_stores_last(program)
    program = convert_by_axes(program) if program.warp_specialised else program
    tiles = block_axes(program)
    multiplied = only_multiplied(program)

    def change(s: Stmt) -> Sequence[Stmt] | None:
        match s:
            case Dot():
                return (replace(s, method=select_matrix_multiply(s, tiles, target.singles)),)
            case Load():
                half = s.buffer.dtype.is_half and s.var.dtype is s.buffer.dtype
                s = replace(s, as_stored=half and s.var.id in multiplied)
                return (s if target.descriptors else replace(s, descriptor=None, at=()),)
            case Loop() if loads_ahead(s):
                return (replace(s, stages=program.stages),)
            case Store():
                # sizes are not known where a store gets its cache modifier
                known = s.stream is not None and s.stream.op == "const"
                block = s.block if target.descriptors else None
                return (replace(s, stream=s.stream if known else None, block=block),)
            case _:
                return None

    made = add_products(replace(program, body=rewrite_body(program.body, change)))
    sides = {v.id for s in made.statements() if isinstance(s, Dot) for v in (s.a, s.b)}
    # Of what products make the matrix unit says how it lies in registers; other blocks lie as they are stored.
    body = tell_runs(load_once(made.body, tiles, sides), tiles, interleave=bool(sides))
    own = made.own_copies and all(isinstance(s, ALONG_ELEMENTS) for s in made.statements())
    body = copy_for_threads(body, tiles, made.lane) if own else body
    body = share_addresses(body, target.offset_bytes)
    made = replace(made, body=keep_last_steps(body), odd_steps=has_odd_steps(program))
    early = "none" if made.warp_specialised else target.early_launch
    return made if early == "none" else with_early_launch(made, outside=early == "any")


def block_axes(program: TileProgram) -> dict[Axis, int]:
    """The block axes with their tiles, in the order in which the program binds them first: that of dimensions.

    Raises VerifyError for a tile that is no power of two, or an axis bound with different ones."""
    found: dict[Axis, int] = {}
    for s in program.loops():
        if s.tile & (s.tile - 1) or s.tile < 1:
            raise VerifyError(f"axis {s.axis.name} has tile {s.tile}, no power of two", phase="legalise")
        if s.tile > 1 and found.setdefault(s.axis, s.tile) != s.tile:
            raise VerifyError(f"axis {s.axis.name} has two tiles", phase="legalise")
    return found


def only_multiplied(program: TileProgram) -> set[int]:
    """Numbers of the values that nothing but products of blocks reads."""
    sides: set[int] = set()
    others: set[int] = set()
    for s in program.statements():
        if isinstance(s, Dot):
            sides |= {s.a.id, s.b.id}
        else:
            others |= set(uses(s))
    return sides - others


def loads_ahead(s: Loop) -> bool:
    """Whether this is an innermost loop that loads, of several steps; loops that only bind an axis do not count."""
    inner = list(walk_statements(s.body))
    loops = [x for x in inner if isinstance(x, Loop)]
    return not is_binding(s) and all(map(is_binding, loops)) and any(isinstance(x, Load) for x in inner)


def select_matrix_multiply(s: Dot, tiles: Mapping[Axis, int], singles: Precision) -> MatrixMultiply | None:
    """How a matrix unit, which reads `singles` so, takes a product of two matrices of one type, both large enough;
    None for any other product."""

    def dimensions(v: Var) -> list[Axis]:
        return [x for x in tiles if x in v.axes]

    acc, a, b = map(dimensions, (s.acc, s.a, s.b))
    if not len(acc) == len(a) == len(b) == 2 or set(a) & set(b) != {s.k}:
        return None
    dtype = s.a.dtype
    if s.b.dtype is not dtype or not dtype.is_float or (dtype.bytes > 4) != (s.acc.dtype.bytes > 4):
        return None
    if min(tiles[x] for x in (*a, *b)) < MIN_DOT_EXTENT:
        return None
    precision = None if dtype.is_half else singles if dtype is f32 else "ieee"
    crossed = acc[0] not in a
    sides = "straight" if not crossed else "turned" if precision == "bf16x6" else "swapped"
    return MatrixMultiply(sides, precision, apart=precision == "ieee")
