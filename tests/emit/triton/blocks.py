"""Tile programs over blocks for tests of the printer."""

from __future__ import annotations

from tests.support.tile_programs import M, N, Vars

from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, axis, call, const, integer
from tilewright.ir.program import Buffer, GridAxis, Load, Loop, Stmt, Store, TileProgram, value_of
from tilewright.ir.sizes import dims


def blocked(tile: int = 64) -> TileProgram:
    """z[n, m] = x[n, m] + y[m] * 2 over two-dimensional blocks, both sizes unknown."""
    gr, gc = (Axis(name, dims.ceildiv(e, integer(tile))) for name, e in (("gr", N), ("gc", M)))
    r, c = Axis("r", N), Axis("c", M)
    var = Vars()
    x, y, z = Buffer("x", f32, dims.mul(N, M)), Buffer("y", f32, M), Buffer("z", f32, dims.mul(N, M))
    v, w = var(f32, r, c), var(f32, c)
    at = dims.add(dims.mul(axis(r), M), axis(c))
    inside = call("and", call("lt", axis(r), N), call("lt", axis(c), M))
    total = call("add", value_of(v), call("mul", value_of(w), const(2, f32)))
    body: tuple[Stmt, ...] = (
        Load(v, x, at, inside, const(0, f32)),
        Load(w, y, axis(c), call("lt", axis(c), M), const(0, f32)),
        Store(z, at, total, (r, c), inside),
    )
    for a, g in ((c, gc), (r, gr)):
        start = dims.mul(axis(g), integer(tile))
        body = (Loop(a, start, dims.add(start, integer(tile)), tile, body),)
    return TileProgram((x, y, z), (GridAxis(gr, gr.extent), GridAxis(gc, gc.extent)), body, lane=c, warps=8)
