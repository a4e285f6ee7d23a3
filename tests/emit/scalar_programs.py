"""Every scalar operation on samples of every element type, and random programs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
from tests.support.tile_programs import M, N, Vars, below, peeled

from tilewright.interp.algebra import STORAGE
from tilewright.ir.dtype import DType, bool_, f32, f64, i32, i64
from tilewright.ir.expr import SCALARS, Axis, Expr, axis, both, call, cast, const, integer, where
from tilewright.ir.program import (
    Branch,
    Buffer,
    Collapse,
    Compute,
    Declare,
    GridAxis,
    Load,
    Loop,
    Place,
    Stmt,
    Store,
    TileProgram,
    Update,
    value_of,
)
from tilewright.ir.reduction import any_, maximum, minimum, sum_
from tilewright.ir.sizes import dims

UNIT_INTERVAL = {"asin", "acos", "atanh"}
POSITIVE = {"log", "log2", "log10", "log1p", "sqrt", "rsqrt", "pow"}
FLOAT_ONLY = {"div", "fma", "isnan", "isinf", "pow", "atan2"} | {
    name for name, rule in SCALARS.items() if rule.arity == 1 and rule.cost >= 8
}
INTEGER_ONLY = {"and", "or", "xor", "not", "shl", "shr"}


TILE = 16


def pointwise(
    inputs: Sequence[DType], outputs: Sequence[tuple[str, DType, Callable[..., Expr]]]
) -> TileProgram:
    """Several functions of the same inputs, one output each; grid over blocks of `TILE` lanes."""
    g, c = Axis("g", dims.ceildiv(N, integer(TILE))), Axis("c", N)
    var = Vars()
    read = [Buffer(f"in{k}", t, N) for k, t in enumerate(inputs)]
    made = [Buffer(name, t, N) for name, t, _ in outputs]
    mask = below(c, N)
    body: list[Stmt] = []
    values: list[Expr] = []
    for b in read:
        v = var(b.dtype, c)
        body.append(Load(v, b, axis(c), mask, const(1, b.dtype)))
        values.append(value_of(v))
    for b, (_, _, make) in zip(made, outputs, strict=True):
        body.append(Store(b, axis(c), make(*values), (c,), mask))
    start = dims.mul(axis(g), integer(TILE))
    loop = Loop(c, start, dims.add(start, integer(TILE)), TILE, tuple(body))
    return TileProgram((*read, *made), (GridAxis(g, g.extent),), (loop,), lane=c)


def operations(dtype: DType) -> list[str]:
    """Those that are defined for a type."""
    if dtype is bool_:
        return ["and", "or", "xor", "not", "eq", "ne", "maximum", "minimum", "lt", "le", "gt", "ge"]
    skipped = INTEGER_ONLY if dtype.is_float else FLOAT_ONLY
    ours = [
        n for n in SCALARS if not n.startswith(("coarse_", "quick_", "close_"))
    ]  # the others only some machines have
    return [n for n in ours if n not in skipped and n not in ("where", "cast", "narrow")]


def sample(dtype: DType, n: int, op: str = "") -> np.ndarray:
    """Values that the operation takes, with special ones among floats."""
    if dtype is bool_:
        return np.random.randint(0, 2, n).astype(np.bool_)
    if not dtype.is_float:
        info = np.iinfo(STORAGE[dtype.name])
        x = np.random.randint(max(info.min, -1000), min(info.max, 1000), n, dtype=np.int64)
        x[:2] = info.min, info.max
        return x.astype(STORAGE[dtype.name])
    x = np.random.standard_normal(n) * 3
    if op in UNIT_INTERVAL:
        x = np.random.uniform(-0.99, 0.99, n)
    elif op in POSITIVE or op == "acosh":
        x = np.abs(x) + (1 if op == "acosh" else 0.01)
    else:
        x[3:7] = 0.0, -0.0, 2.5, -1.5
        if op not in ("fmod", "mod", "floordiv", "truncdiv", "sin", "cos", "tan"):
            x[:3] = np.inf, -np.inf, np.nan
    return x.astype(STORAGE[dtype.name])


def divisor(y: np.ndarray, op: str) -> np.ndarray:
    """No zeros where the interpreter would raise."""
    if op in ("floordiv", "mod", "truncdiv", "fmod"):
        return np.where(y == 0, y.dtype.type(3), y)
    if op in ("shl", "shr"):
        return (y.astype(np.int64) % (8 * y.dtype.itemsize)).astype(y.dtype)
    return y


FLOATS, INTEGERS = (f32, f64), (i32, i64)
ARITHMETIC = ("add", "sub", "maximum", "minimum")
COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")


class Maker:
    """Makes one random program over a grid of rows `r` and a loop over columns `c`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.r, self.c = Axis("r", N), Axis("c", M)
        self.var = Vars()
        self.at = dims.add(dims.mul(axis(self.r), M), axis(self.c))
        whole = dims.mul(N, M)
        self.inputs = [Buffer(f"x{k}", t, whole) for k, t in enumerate((f32, f64, i32, i64, bool_))]
        self.row = Buffer("row", f32, M)
        self.column = Buffer("column", i64, N)
        self.kept = Buffer("kept", f32, M, Place.SCRATCH)

    def index(self) -> Expr:
        """An index expression over the axes and sizes, with lanes."""
        c, r, k = axis(self.c), axis(self.r), integer(self.random.randint(1, 9))
        return self.random.choice(
            [
                c,
                dims.add(c, k),
                dims.sub(c, k),
                dims.add(c, r),
                dims.mul(c, k),
                dims.floordiv(c, k),
                dims.mod(c, k),
                dims.sub(M, c),
            ]
        )

    def condition(self, values: list[Expr], depth: int) -> Expr:
        """A truth value."""
        kind = self.random.randint(0, 4)
        if kind == 0:
            return call(
                self.random.choice(COMPARE),
                self.index(),
                self.random.choice([M, integer(7), axis(self.r), self.index()]),
            )
        if kind == 1 and depth > 0:
            a, b = self.condition(values, depth - 1), self.condition(values, depth - 1)
            return call(self.random.choice(("and", "or", "xor", "eq", "le")), a, b)
        if kind == 2 and depth > 0:
            return call("not", self.condition(values, depth - 1))
        held = [v for v in values if v.dtype is bool_]
        if kind == 3 and held:
            return self.random.choice(held)
        dtype = self.random.choice(FLOATS + INTEGERS)
        a, b = self.value(values, dtype, depth - 1), self.value(values, dtype, depth - 1)
        return call(self.random.choice(COMPARE), a, b)

    def value(self, values: list[Expr], dtype: DType, depth: int) -> Expr:
        """A number of a type; sums stay small, so that rounding does not decide comparisons often."""
        held = [v for v in values if v.dtype is dtype]
        if depth <= 0 or self.random.random() < 0.2:
            if held and self.random.random() < 0.8:
                return self.random.choice(held)
            return const(self.random.randint(-3, 3), dtype)
        kind = self.random.randint(0, 5)
        if kind <= 2:
            a, b = self.value(values, dtype, depth - 1), self.value(values, dtype, depth - 1)
            return call(self.random.choice(ARITHMETIC), a, b)
        if kind == 3:
            yes, no = self.value(values, dtype, depth - 1), self.value(values, dtype, depth - 1)
            return where(self.condition(values, depth - 1), yes, no)
        if kind == 4:
            source = self.random.choice((i32, i64, bool_) if not dtype.is_float else (f32, i32, i64, bool_))
            if source is bool_:
                return cast(self.condition(values, depth - 1), dtype)
            inner = (
                self.index()
                if source is i64 and self.random.random() < 0.5
                else self.value(values, source, depth - 1)
            )
            return cast(inner, dtype)
        return call(self.random.choice(("neg", "abs", "sign")), self.value(values, dtype, depth - 1))

    def mask(self, tail: Expr | None) -> Expr | None:
        """The tail with a random further condition over indices."""
        if self.random.random() < 0.6:
            return tail
        extra = call(
            self.random.choice(("lt", "ge", "le", "gt")),
            self.index(),
            self.random.choice([integer(11), axis(self.r), M]),
        )
        return both(tail, extra)

    def loads(self, tail: Expr | None, out: list[Stmt]) -> list[Expr]:
        """Random reads, all inside their buffers."""
        found: list[Expr] = []
        last = dims.sub(dims.mul(N, M), dims.ONE)
        turned = dims.add(dims.mul(axis(self.r), M), dims.sub(dims.sub(M, dims.ONE), axis(self.c)))
        wild = dims.minimum(
            dims.maximum(dims.add(dims.mul(axis(self.r), integer(3)), self.index()), dims.ZERO), last
        )
        for b in self.inputs:
            offset = self.random.choice([self.at, self.at, turned, wild])
            v = self.var(b.dtype, self.c)
            out.append(Load(v, b, offset, self.mask(tail), const(self.random.randint(0, 3), b.dtype)))
            found.append(value_of(v))
        v, w = self.var(f32, self.c), self.var(i64)
        out.append(Load(v, self.row, axis(self.c), tail, const(1, f32)))
        out.append(Load(w, self.column, axis(self.r)))
        return [*found, value_of(v), value_of(w)]

    def program(self) -> TileProgram:
        """Three loops: states and scratch, then stores, then a branch."""
        tile = self.random.choice((8, 16, 32, 64))
        states = [self.var(t, self.c) for t in (f32, i64, bool_, f64)]
        reductions = [self.random.choice((maximum, minimum))(f32), sum_(i64), any_(), maximum(f64)]
        results = [self.var(s.dtype) for s in states]
        outs = [Buffer(f"s{k}", s.dtype, N) for k, s in enumerate(states)]
        y, z = Buffer("y", f32, dims.mul(N, M)), Buffer("z", i64, dims.mul(N, M))

        def first(tail: Expr | None) -> list[Stmt]:
            out: list[Stmt] = []
            values = self.loads(tail, out)
            named = self.var(f32, self.c)
            out.append(Compute(named, self.value(values, f32, 3)))
            values.append(value_of(named))
            out.append(Store(self.kept, axis(self.c), value_of(named), (self.c,), tail))
            for s, f in zip(states, reductions, strict=True):
                e = self.condition(values, 2) if s.dtype is bool_ else self.value(values, s.dtype, 3)
                out.append(Update((s,), f.merged([value_of(s)], [e]), self.mask(tail)))
            return out

        def second(tail: Expr | None) -> list[Stmt]:
            out: list[Stmt] = []
            values = [*self.loads(tail, out), *(value_of(r) for r in results)]
            again = self.var(f32, self.c)
            out.append(Load(again, self.kept, axis(self.c), tail, const(0, f32)))
            values.append(value_of(again))
            out.append(Store(y, self.at, self.value(values, f32, 4), (self.c,), tail))
            out.append(Store(z, self.at, self.value(values, i64, 4), (self.c,), tail))
            return out

        body: list[Stmt] = [Declare((s,), f.identity) for s, f in zip(states, reductions, strict=True)]
        body += peeled(self.c, M, tile, first)
        for v, s, f, b in zip(results, states, reductions, outs, strict=True):
            body += [Collapse((v,), (s,), f, (self.c,)), Store(b, axis(self.r), value_of(v))]
        plain = tuple(peeled(self.c, M, tile, second))
        other = tuple(peeled(self.c, M, tile, second))
        body.append(Branch(call("lt", value_of(results[1]), integer(5)), plain, other))
        params = (*self.inputs, self.row, self.column, *outs, y, z)
        return TileProgram(params, (GridAxis(self.r, N),), tuple(body), scratch=(self.kept,), lane=self.c)
