"""Tile programs that address memory in two axes."""

from __future__ import annotations

from tests.support.tile_programs import M, N, Vars, below

from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, axis, both, call, const, integer
from tilewright.ir.program import (
    Buffer,
    Collapse,
    Compute,
    Declare,
    Dot,
    GridAxis,
    Load,
    Loop,
    Stmt,
    Store,
    TileProgram,
    Update,
    value_of,
)
from tilewright.ir.reduction import sum_
from tilewright.ir.sizes import dims

NM = dims.mul(N, M)


def scan() -> TileProgram:
    """Cumulative sums along rows, one step at a time."""
    r, c = Axis("r", N), Axis("c", M)
    var = Vars()
    x, y = Buffer("x", f32, NM), Buffer("y", f32, NM)
    total, v = var(), var()
    at = dims.add(dims.mul(axis(r), M), axis(c))
    step = (
        Load(v, x, at),
        Update((total,), (call("add", value_of(total), value_of(v)),)),
        Store(y, at, value_of(total)),
    )
    return TileProgram(
        (x, y), (GridAxis(r, N),), (Declare((total,), (const(0, f32),)), Loop(c, dims.ZERO, M, 1, step))
    )


def transpose(tile: int, lane_tile: int) -> TileProgram:
    """y[c, r] = x[r, c] in blocks of two axes."""
    r, c = Axis("r", N), Axis("c", M)
    gr = Axis("gr", dims.ceildiv(N, integer(tile)))
    gc = Axis("gc", dims.ceildiv(M, integer(lane_tile)))
    var = Vars()
    x, y = Buffer("x", f32, NM), Buffer("y", f32, NM)
    v, w = var(f32, r, c), var(f32, c, r)
    inside = call("and", below(r, N), below(c, M))
    body: tuple[Stmt, ...] = (
        Load(v, x, dims.add(dims.mul(axis(r), M), axis(c)), inside, const(0, f32)),
        Compute(w, call("mul", value_of(v), const(2, f32))),
        Store(y, dims.add(dims.mul(axis(c), N), axis(r)), value_of(w), (r, c), inside),
    )
    r0, c0 = dims.mul(axis(gr), integer(tile)), dims.mul(axis(gc), integer(lane_tile))
    inner = Loop(c, c0, dims.add(c0, integer(lane_tile)), lane_tile, body)
    outer = Loop(r, r0, dims.add(r0, integer(tile)), tile, (inner,))
    return TileProgram((x, y), (GridAxis(gr, gr.extent), GridAxis(gc, gc.extent)), (outer,), lane=c)


def matmul(tile: int = 4, lane_tile: int = 32, k_tile: int = 1) -> TileProgram:
    """z[r, c] = sum over k of x[r, k] y[k, c]; K is 7."""
    r, c, k = Axis("r", N), Axis("c", M), Axis("k", integer(7))
    gr = Axis("gr", dims.ceildiv(N, integer(tile)))
    gc = Axis("gc", dims.ceildiv(M, integer(lane_tile)))
    var = Vars()
    x, y, z = (
        Buffer("x", f32, dims.mul(N, k.extent)),
        Buffer("y", f32, dims.mul(k.extent, M)),
        Buffer("z", f32, NM),
    )
    wide = k_tile > 1
    acc = var(f32, r, c)
    a, b = var(f32, *((r, k) if wide else (r,))), var(f32, *((k, c) if wide else (c,)))
    k_mask = below(k, k.extent) if wide else None
    load_a = Load(
        a, x, dims.add(dims.mul(axis(r), k.extent), axis(k)), both(below(r, N), k_mask), const(0, f32)
    )
    load_b = Load(b, y, dims.add(dims.mul(axis(k), M), axis(c)), both(below(c, M), k_mask), const(0, f32))
    r0, c0 = dims.mul(axis(gr), integer(tile)), dims.mul(axis(gc), integer(lane_tile))
    inside = call("and", below(r, N), below(c, M))
    body: tuple[Stmt, ...] = (
        Declare((acc,), (const(0, f32),)),
        Loop(k, dims.ZERO, k.extent, k_tile, (load_a, load_b, Dot(acc, a, b, k))),
        Store(z, dims.add(dims.mul(axis(r), M), axis(c)), value_of(acc), (r, c), inside),
    )
    inner = Loop(c, c0, dims.add(c0, integer(lane_tile)), lane_tile, body)
    outer = Loop(r, r0, dims.add(r0, integer(tile)), tile, (inner,))
    return TileProgram((x, y, z), (GridAxis(gr, gr.extent), GridAxis(gc, gc.extent)), (outer,), lane=c)


def row_and_column(tile: int = 4) -> TileProgram:
    """y[c] = sum over r of x[r, c] with a block of rows: partial sums per row position, collapsed at the end."""
    r, c = Axis("r", N), Axis("c", M)
    var = Vars()
    x, y = Buffer("x", f32, NM), Buffer("y", f32, M)
    parts, v, total = var(f32, r, c), var(f32, r, c), var(f32, c)
    gc = Axis("gc", dims.ceildiv(M, integer(32)))
    inside = call("and", below(r, N), below(c, M))
    c0 = dims.mul(axis(gc), integer(32))
    step = Loop(r, dims.ZERO, N, tile, (
        Load(v, x, dims.add(dims.mul(axis(r), M), axis(c)), inside, const(0, f32)),
        Update((parts,), (call("add", value_of(parts), value_of(v)),), inside)))  # fmt: skip
    body: tuple[Stmt, ...] = (
        Declare((parts,), (const(0, f32),)),
        step,
        Collapse((total,), (parts,), sum_(f32), (r,)),
        Store(y, axis(c), value_of(total), (c,), below(c, M)),
    )
    return TileProgram(
        (x, y), (GridAxis(gc, gc.extent),), (Loop(c, c0, dims.add(c0, integer(32)), 32, body),), lane=c
    )
