"""Hand-written tile programs, as the lowering would make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.ir.dtype import DType, bool_, f16, f32, i64
from tilewright.ir.expr import Axis, Expr, axis, both, call, cast, const, integer, symbol
from tilewright.ir.program import (
    Buffer,
    Collapse,
    Compute,
    Declare,
    Dot,
    GridAxis,
    Load,
    Loop,
    Place,
    Stmt,
    Store,
    TileProgram,
    Update,
    Var,
    value_of,
)
from tilewright.ir.reduction import Reduction
from tilewright.ir.sizes import dims

N = symbol("n")
M = symbol("m")


def size(of: int | Expr) -> Expr:
    """An extent."""
    return integer(of) if isinstance(of, int) else of


def below(lane: Axis, bound: Expr) -> Expr:
    """The mask of a tail."""
    return call("lt", axis(lane), bound)


def peeled(lane: Axis, stop: Expr, tile: int, body: Callable[[Expr | None], Sequence[Stmt]]) -> list[Stmt]:
    """A loop over full tiles of `lane` below `stop`, then one over the masked rest."""
    whole = dims.mul(dims.floordiv(stop, integer(tile)), integer(tile))
    out: list[Stmt] = [Loop(lane, dims.ZERO, whole, tile, tuple(body(None)))]
    if not dims.divisible(stop, tile):
        out.append(Loop(lane, whole, stop, tile, tuple(body(below(lane, stop)))))
    return out


class Vars:
    """Hands out values with fresh numbers."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, dtype: DType = f32, *axes: Axis) -> Var:
        self.count += 1
        return Var(self.count - 1, dtype, axes)


def elementwise(
    n: int | Expr,
    inputs: Sequence[DType],
    out: DType,
    body: Callable[..., Expr],
    tile: int = 64,
    chunk: int = 1024,
    stream: bool = False,
) -> TileProgram:
    """out[c] = body(in0[c], ...) for c < n; grid over chunks."""
    total = size(n)
    g, c = Axis("g", dims.ceildiv(total, integer(chunk))), Axis("c", total)
    var = Vars()
    buffers = [Buffer(f"in{k}", t, total) for k, t in enumerate(inputs)] + [Buffer("out", out, total)]
    start = dims.mul(axis(g), integer(chunk))
    stop = dims.minimum(total, dims.add(start, integer(chunk)))
    whole = dims.add(start, dims.mul(dims.floordiv(dims.sub(stop, start), integer(tile)), integer(tile)))

    def inner(mask: Expr | None) -> list[Stmt]:
        loaded = [var(t.compute, c) for t in inputs]
        value = body(*map(value_of, loaded))
        result = var(value.dtype.compute, c)
        loads = [Load(v, b, axis(c), mask) for v, b in zip(loaded, buffers, strict=False)]
        return [
            *loads,
            Compute(result, value),
            Store(buffers[-1], axis(c), value_of(result), (c,), mask, const(True, bool_) if stream else None),
        ]

    main = Loop(c, start, whole, tile, tuple(inner(None)))
    tail = Loop(c, whole, stop, tile, tuple(inner(below(c, stop))))
    return TileProgram(tuple(buffers), (GridAxis(g, g.extent),), (main, tail), lane=c, grain=integer(4))


def row_sum(
    rows: int | Expr, cols: int | Expr, reduction: Reduction, dtype: DType = f32, tile: int = 64
) -> TileProgram:
    """out[r, k] = result k of the reduction over row r."""
    r, c = Axis("r", size(rows)), Axis("c", size(cols))
    var = Vars()
    x = Buffer("x", dtype, dims.mul(r.extent, c.extent))
    outs = [Buffer(f"y{k}", t, r.extent) for k, t in enumerate(reduction.results)]
    states = [var(t, c) for t in reduction.state]
    body: list[Stmt] = [Declare(tuple(states), reduction.identity)]

    def inner(mask: Expr | None) -> list[Stmt]:
        v = var(dtype.compute, c)
        element: list[Expr] = [cast(value_of(v), t) if t is not i64 else axis(c) for t in reduction.elements]
        new = reduction.merged([value_of(s) for s in states], reduction.lifted(element))
        at = dims.add(dims.mul(axis(r), c.extent), axis(c))
        return [Load(v, x, at, mask), Update(tuple(states), new, mask)]

    body += peeled(c, c.extent, tile, inner)
    merged = [var(t) for t in reduction.state]
    body.append(Collapse(tuple(merged), tuple(states), reduction, (c,)))
    for b, e in zip(outs, reduction.finished([value_of(v) for v in merged]), strict=True):
        body.append(Store(b, axis(r), e))
    return TileProgram((x, *outs), (GridAxis(r, r.extent),), tuple(body), lane=c)


def softmax(rows: int | Expr, cols: int | Expr, tile: int = 64, scratch: bool = True) -> TileProgram:
    """Row softmax in three loops; exp(x - max) is kept in scratch."""
    from tilewright.ir.reduction import maximum, sum_

    r, c = Axis("r", size(rows)), Axis("c", size(cols))
    var = Vars()
    x, y = (Buffer(name, f32, dims.mul(r.extent, c.extent)) for name in "xy")
    kept = Buffer("kept", f32, c.extent, Place.SCRATCH)
    at = dims.add(dims.mul(axis(r), c.extent), axis(c))
    top, total = var(f32, c), var(f32, c)
    top1, total1, scale = var(), var(), var()

    def first(mask: Expr | None) -> list[Stmt]:
        v = var(f32, c)
        return [Load(v, x, at, mask), Update((top,), (call("maximum", value_of(top), value_of(v)),), mask)]

    def second(mask: Expr | None) -> list[Stmt]:
        v, e = var(f32, c), var(f32, c)
        out: list[Stmt] = [
            Load(v, x, at, mask),
            Compute(e, call("exp", call("sub", value_of(v), value_of(top1)))),
        ]
        if scratch:
            out.append(Store(kept, axis(c), value_of(e), (c,), mask))
        return [*out, Update((total,), (call("add", value_of(total), value_of(e)),), mask)]

    def third(mask: Expr | None) -> list[Stmt]:
        v, e, w = var(f32, c), var(f32, c), var(f32, c)
        if scratch:
            got: list[Stmt] = [Load(e, kept, axis(c), mask)]
        else:
            got = [Load(v, x, at, mask), Compute(e, call("exp", call("sub", value_of(v), value_of(top1))))]
        return [
            *got,
            Compute(w, call("mul", value_of(e), value_of(scale))),
            Store(y, at, value_of(w), (c,), mask),
        ]

    body: list[Stmt] = [
        Declare((top,), (const(float("-inf"), f32),)),
        *peeled(c, c.extent, tile, first),
        Collapse((top1,), (top,), maximum(f32), (c,)),
        Declare((total,), (const(0, f32),)),
        *peeled(c, c.extent, tile, second),
        Collapse((total1,), (total,), sum_(f32), (c,)),
        Compute(scale, call("div", const(1, f32), value_of(total1))),
        *peeled(c, c.extent, tile, third),
    ]
    return TileProgram(
        (x, y),
        (GridAxis(r, r.extent),),
        tuple(body),
        scratch=(kept,) if scratch else (),
        lane=c,
        grain=integer(2),
    )


def column_sum(rows: int | Expr, cols: int | Expr, tile: int = 64) -> TileProgram:
    """y[c] = sum over r of x[r, c]; one grid point per tile of columns."""
    r, c = Axis("r", size(rows)), Axis("c", size(cols))
    g = Axis("g", dims.ceildiv(c.extent, integer(tile)))
    var = Vars()
    x, y = Buffer("x", f32, dims.mul(r.extent, c.extent)), Buffer("y", f32, c.extent)
    total, v = var(f32, c), var(f32, c)
    start = dims.mul(axis(g), integer(tile))
    mask = None if dims.divisible(c.extent, tile) else below(c, c.extent)
    at = dims.add(dims.mul(axis(r), c.extent), axis(c))
    step = Loop(r, dims.ZERO, r.extent, 1, (
        Load(v, x, at, mask), Update((total,), (call("add", value_of(total), value_of(v)),))))  # fmt: skip
    body = Loop(c, start, dims.add(start, integer(tile)), tile, (
        Declare((total,), (const(0, f32),)), step, Store(y, axis(c), value_of(total), (c,), mask)))  # fmt: skip
    return TileProgram((x, y), (GridAxis(g, g.extent),), (body,), lane=c)


def dot_tiles(rows: int, cols: int, depth: int, tile: int, lane_tile: int) -> TileProgram:
    """z = x @ y for sizes that the tiles divide: one register block of `tile` rows per grid point."""
    r, c, k = Axis("r", integer(rows)), Axis("c", integer(cols)), Axis("k", integer(depth))
    gr, gc = Axis("gr", integer(rows // tile)), Axis("gc", integer(cols // lane_tile))
    var = Vars()
    x, y, z = (
        Buffer(n, f32, integer(s)) for n, s in (("x", rows * depth), ("y", depth * cols), ("z", rows * cols))
    )
    acc, a, b = var(f32, r, c), var(f32, r), var(f32, c)
    step = (
        Load(a, x, dims.add(dims.mul(axis(r), k.extent), axis(k))),
        Load(b, y, dims.add(dims.mul(axis(k), c.extent), axis(c))),
        Dot(acc, a, b, k),
    )
    body: tuple[Stmt, ...] = (
        Declare((acc,), (const(0, f32),)),
        Loop(k, dims.ZERO, k.extent, 1, step),
        Store(z, dims.add(dims.mul(axis(r), c.extent), axis(c)), value_of(acc), (r, c)),
    )
    r0, c0 = dims.mul(axis(gr), integer(tile)), dims.mul(axis(gc), integer(lane_tile))
    inner = Loop(c, c0, dims.add(c0, integer(lane_tile)), lane_tile, body)
    outer = Loop(r, r0, dims.add(r0, integer(tile)), tile, (inner,))
    return TileProgram((x, y, z), (GridAxis(gc, gc.extent), GridAxis(gr, gr.extent)), (outer,), lane=c)


def matrices(dtype: DType, swapped: bool, tile: int = 16) -> TileProgram:
    """z = x @ y in blocks of `tile` x 2 `tile`, `tile` deep; `swapped` binds the axis of y's columns first."""
    r, c, k = Axis("r", integer(2 * tile)), Axis("c", integer(4 * tile)), Axis("k", integer(3 * tile))
    gr, gc = Axis("gr", integer(2)), Axis("gc", integer(2))
    var = Vars()
    x, y, z = (
        Buffer(name, t, dims.mul(a.extent, b.extent))
        for name, t, a, b in (("x", dtype, r, k), ("y", dtype, k, c), ("z", f32, r, c))
    )
    acc, a, b = var(f32, r, c), var(dtype, r, k), var(dtype, k, c)
    step = (
        Load(a, x, dims.add(dims.mul(axis(r), k.extent), axis(k))),
        Load(b, y, dims.add(dims.mul(axis(k), c.extent), axis(c))),
        Dot(acc, a, b, k),
    )
    body: tuple[Stmt, ...] = (
        Declare((acc,), (const(0, f32),)),
        Loop(k, dims.ZERO, k.extent, tile, step),
        Store(z, dims.add(dims.mul(axis(r), c.extent), axis(c)), value_of(acc), (r, c)),
    )
    for of, g, step_of in (
        ((r, gr, tile), (c, gc, 2 * tile)) if swapped else ((c, gc, 2 * tile), (r, gr, tile))
    ):
        start = dims.mul(axis(g), integer(step_of))
        body = (Loop(of, start, dims.add(start, integer(step_of)), step_of, body),)
    grid = (GridAxis(gr, gr.extent), GridAxis(gc, gc.extent))
    return TileProgram((x, y, z), grid, body, lane=c, warps=4, stages=3)


COLUMNS = 64


def _at(row: Axis, column: Axis, pitch: int) -> Expr:
    """The offset of an element of a dense matrix."""
    return dims.add(dims.mul(axis(row), integer(pitch)), axis(column))


def scaled_product(
    rows: int, depth: int, tile: int, across: bool = False, half: bool = False, step: int = 16
) -> TileProgram:
    """z of x [rows, depth] and y, in one grid point with blocks of `tile` rows and steps of `step` along the depth: in
    each step the columns of z are multiplied by the first row of y, then x y is added. `across`: x is stored as [depth,
    rows]. `half`: in fp16."""
    r, c, k = Axis("r", integer(rows)), Axis("c", integer(COLUMNS)), Axis("k", integer(depth))
    var, dtype = Vars(), f16 if half else f32
    x, y = Buffer("x", dtype, integer(rows * depth)), Buffer("y", f32, integer(depth * COLUMNS))
    z = Buffer("z", f32, integer(rows * COLUMNS))
    acc, b, factor = var(f32, r, c), var(f32, k, c), var(f32, c)
    a = var(dtype, r, k)
    mask = both(below(r, r.extent) if rows % tile else None, below(k, k.extent) if depth % step else None)
    zero = const(0.0, f32)
    body: tuple[Stmt, ...] = (
        Load(factor, y, axis(c)),
        Load(a, x, _at(k, r, rows) if across else _at(r, k, depth), mask, const(0.0, dtype)),
        Load(b, y, _at(k, c, COLUMNS), below(k, k.extent) if depth % step else None, zero),
        Update((acc,), (call("mul", value_of(acc), value_of(factor)),)),
        Dot(acc, a, b, k),
    )
    inner: tuple[Stmt, ...] = (
        Declare((acc,), (zero,)),
        Loop(k, dims.ZERO, k.extent, step, body),
        Store(z, _at(r, c, COLUMNS), value_of(acc), (r, c), below(r, r.extent) if rows % tile else None),
    )
    columns = Loop(c, dims.ZERO, c.extent, COLUMNS, (Loop(r, dims.ZERO, r.extent, tile, inner),))
    return TileProgram((x, y, z), (), (columns,), lane=c)


__all__ = [
    "COLUMNS",
    "M",
    "N",
    "Vars",
    "below",
    "bool_",
    "column_sum",
    "dot_tiles",
    "elementwise",
    "matrices",
    "peeled",
    "row_sum",
    "scaled_product",
    "size",
    "softmax",
]


def column_merge(reduction: Reduction, count: int, *, computed: bool) -> TileProgram:
    """y[c] = x[0, c] merged with x[1, c], ... of `count` rows in one block, or with what is `computed` of them (-x)."""
    k, c, var = Axis("k", integer(count)), Axis("c", integer(16)), Vars()
    dtype = reduction.state[0]
    x, y = Buffer("x", dtype, integer(count * 16)), Buffer("y", dtype, integer(16))
    v, w, total = var(dtype, k, c), var(dtype, k, c), var(dtype, c)
    body: tuple[Stmt, ...] = (
        Load(v, x, dims.add(dims.mul(axis(k), integer(16)), axis(c))),
        Compute(w, call("neg", value_of(v))),
        Collapse((total,), (w if computed else v,), reduction, (k,)),
        Store(y, axis(c), value_of(total), (c,)),
    )
    inner = Loop(k, dims.ZERO, k.extent, count, body)
    return TileProgram((x, y), (), (Loop(c, dims.ZERO, c.extent, 16, (inner,)),), lane=c)
