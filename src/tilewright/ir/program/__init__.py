"""The tile program: how one kernel computes. Grid, loops, loads and stores of blocks, states, reductions over a block.

Meaning. A program runs its body once per point of the grid; points are independent, in any order or at once. An axis
that is *bound* with tile t stands for t consecutive values base .. base+t-1: with t = 1 it is a scalar, with t > 1 it
is a *block axis*, and a value that depends on it is a block with that named axis. Blocks of different axes combine by
name, as in broadcasting. A bound axis may run past its extent; statements that would then touch memory or a state
carry a mask that excludes those lanes.

A buffer is addressed by an element offset from its base. Offsets, masks and computations are `Expr`s whose leaves are
bound axes, size symbols, constants, and `var` leaves (`value_of(var)`) for values computed before.
"""

from .statements import (
    Await,
    Branch,
    Buffer,
    Check,
    Collapse,
    Compute,
    Declare,
    Descriptor,
    Dot,
    Load,
    Loop,
    Nest,
    Place,
    Prefix,
    Release,
    Stmt,
    Store,
    StoredBlock,
    Update,
    Var,
    value_of,
)
from .tile_program import GridAxis, TileProgram
from .walks import defines, expressions, in_order, is_binding, rewrite_body, uses, walk_statements

__all__ = [
    "Await",
    "Branch",
    "Buffer",
    "Check",
    "Collapse",
    "Compute",
    "Declare",
    "Descriptor",
    "Dot",
    "GridAxis",
    "Load",
    "Loop",
    "Nest",
    "Place",
    "Prefix",
    "Release",
    "Stmt",
    "Store",
    "StoredBlock",
    "TileProgram",
    "Update",
    "Var",
    "defines",
    "expressions",
    "in_order",
    "is_binding",
    "rewrite_body",
    "uses",
    "value_of",
    "walk_statements",
]
