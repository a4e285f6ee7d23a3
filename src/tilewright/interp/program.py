"""The meaning of a `TileProgram`: every statement on whole blocks, and at many grid points at once.

In every array, dimension 0 runs over grid points and each block axis of the program has a dimension of its own, of
size 1 where the value does not depend on it. Grid points whose loops or branches differ are run one after the other.
What a program must not look at is filled with poison (NaN, or the lowest integer): scratch memory at the start of a
grid point, lanes of a masked load without `other`. Races between grid points are not modelled.
Fields of `ir/selection` are not looked at: a merge adds neighbours first, whatever order was selected.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from tilewright.errors import IndexOutOfRange, InputError, VerifyError
from tilewright.ir.dtype import DType, Kind, bool_
from tilewright.ir.expr import Axis, Expr
from tilewright.ir.program import (
    Await,
    Branch,
    Buffer,
    Check,
    Collapse,
    Compute,
    Declare,
    Dot,
    Load,
    Loop,
    Nest,
    Prefix,
    Release,
    Stmt,
    Store,
    TileProgram,
    Update,
    Var,
    value_of,
)
from tilewright.ir.reduction import lowest, sum_
from tilewright.tuning.input_limits import PIECES

from .algebra import FLOATS, Algebra, Array
from .evaluate import Evaluator, merge_last, prefixes


def run_program(
    program: TileProgram,
    buffers: Sequence[object | None],
    symbols: Mapping[str, int | float] | None = None,
    algebra: Algebra = FLOATS,
) -> list[Array]:
    """The flat contents of `program.params` after a run.

    `buffers` gives the contents before it, from the base of each buffer on (None = nothing yet), `symbols` the sizes.
    Raises VerifyError for an access outside a buffer or a value that varies along an axis it should not have,
    InputError for a buffer that is too small, IndexOutOfRange if a `Check` failed."""
    program.verify()
    if len(buffers) != len(program.params):
        raise InputError(f"{len(program.params)} buffers expected, got {len(buffers)}", phase="interp")
    run = _Run(program, dict(symbols or {}), algebra)
    for b, contents in zip(program.params, buffers, strict=True):
        run.memory[b.name] = run.poisoned(b) if contents is None else run.filled(b, contents)
    extents = [range(run.number(g.extent)) for g in program.grid]
    every = list(itertools.product(*extents))
    points = np.array(every, np.int64).reshape(len(every), len(extents))
    for low in range(0, len(points), PIECES.interpreted_grid_points):
        run.points(points[low : low + PIECES.interpreted_grid_points])
    if run.failed:
        raise IndexOutOfRange(f"check {min(run.failed)} failed", phase="interp")
    return [run.memory[b.name] for b in program.params]


class _Diverged(Exception):
    """Grid points that run in step need different numbers of loop steps, or different branches."""


class _Run:
    """State of a run: memory, what is bound, and the values computed so far at some grid points."""

    def __init__(self, program: TileProgram, symbols: dict[str, int | float], algebra: Algebra) -> None:
        self.program = program
        self.algebra = algebra
        self.symbols = symbols
        self.tiles = {s.axis: s.tile for s in program.loops() if s.tile > 1}
        self.place = {a: k for k, a in enumerate(self.tiles, 1)}
        self.rank = 1 + len(self.place)
        self.memory: dict[str, Array] = {}
        self.bound: dict[Axis, Array] = {}
        self.values: dict[Expr, Array] = {}
        self.failed: set[int] = set()
        self.own = np.zeros(1, np.int64)
        self.everywhere = np.ones((1,) * self.rank, np.bool_)
        self.scratch = {b.name: self.number(b.size) for b in program.scratch}

    def points(self, points: Array) -> None:
        """Run grid points (one a row) in step, or if that is not possible one by one."""
        before = {b.name: self.memory[b.name].copy() for b in self.program.params}
        failed = set(self.failed)
        try:
            self.in_step(points)
        except _Diverged:
            self.memory |= before
            self.failed = failed
            for k in range(len(points)):
                self.in_step(points[k : k + 1])

    def in_step(self, points: Array) -> None:
        """Run grid points statement by statement."""
        for b in self.program.scratch:
            self.memory[b.name] = np.full(self.scratch[b.name] * len(points), self.poison(b.dtype))
        shape = (len(points),) + (1,) * (self.rank - 1)
        self.bound = {g.axis: points[:, k].reshape(shape) for k, g in enumerate(self.program.grid)}
        self.own = np.arange(len(points), dtype=np.int64).reshape(shape)
        self.values = {}
        self.execute(self.program.body)

    def poison(self, dtype: DType) -> Array:
        """What must not be looked at."""
        bad = float("nan") if dtype.is_float else False if dtype.kind is Kind.BOOL else int(lowest(dtype))
        return self.algebra.constant(bad, dtype)

    def poisoned(self, b: Buffer) -> Array:
        """Memory that nothing was written to."""
        return np.full(self.number(b.size), self.poison(b.dtype))

    def filled(self, b: Buffer, contents: object) -> Array:
        """Memory with given contents; a copy."""
        flat = self.algebra.load(contents, b.dtype).reshape(-1).copy()
        size = self.number(b.size)
        if len(flat) < size:
            raise InputError(f"buffer {b.name} has {len(flat)} elements, needs {size}", phase="interp")
        return flat[:size]

    def evaluate(self, e: Expr) -> Array:
        """The value of `e` here, with one dimension per block axis."""
        found = Evaluator(self.algebra, (), self.symbols, self.bound, self.values).value(e)
        return found.reshape((1,) * (self.rank - found.ndim) + found.shape)

    def number(self, e: Expr) -> int:
        """The value of an integer expression that is the same in all lanes and at all grid points."""
        found = self.evaluate(e)
        if found.size != len(found):
            raise VerifyError(f"{e} should be scalar", phase="interp")
        if np.any(found != found[:1]):
            raise _Diverged
        return int(found.flat[0])

    def lanes(self, mask: Expr | None) -> Array:
        """Where a statement acts."""
        return self.everywhere if mask is None else self.evaluate(mask)

    def assign(self, var: Var, value: Array) -> None:
        """Set `var`, which may only vary along its own axes."""
        for a, k in self.place.items():
            if value.shape[k] != 1 and a not in var.axes:
                raise VerifyError(f"{var} varies along {a.name}", phase="interp")
        self.values[value_of(var)] = value

    def execute(self, body: Sequence[Stmt]) -> None:
        """Run statements in order."""
        for s in body:
            match s:
                case Load():
                    self.assign(s.var, self.load(s))
                case Compute():
                    self.assign(s.var, self.evaluate(s.expr))
                case Store():
                    self.store(s)
                case Declare():
                    for var, value in zip(s.vars, [self.evaluate(v) for v in s.values], strict=True):
                        self.assign(var, value)
                case Update():
                    self.update(s)
                case Collapse():
                    self.collapse(s)
                case Prefix():
                    self.prefix(s)
                case Dot():
                    self.dot(s)
                case Check():
                    if np.any(self.lanes(s.mask) & ~self.evaluate(s.condition)):
                        self.failed.add(s.code)
                case Loop():
                    self.loop(s)
                case Nest():
                    self.execute(s.body)
                case Branch():
                    self.execute(s.body if self.number(s.condition) else s.orelse)
                case Await() | Release():
                    pass  # what runs before and behind is no part of a program's meaning

    def loop(self, s: Loop) -> None:
        """Bind the axis to one tile after the other; it is free again afterwards."""
        shape = (1, *(-1 if a == s.axis and s.tile > 1 else 1 for a in self.place))
        for base in range(self.number(s.start), self.number(s.stop), s.tile):
            self.bound[s.axis] = np.arange(base, base + s.tile, dtype=np.int64).reshape(shape)
            self.execute(s.body)
        self.bound.pop(s.axis, None)

    def address(self, s: Load | Store, active: Array) -> tuple[Array, Array]:
        """Offsets (0 where inactive) and active lanes, of one shape. Raises VerifyError outside the buffer."""
        offset = self.evaluate(s.offset)
        if offset.shape != active.shape:
            offset, active = np.broadcast_arrays(offset, active)
        private = s.buffer.name in self.scratch
        size = self.scratch[s.buffer.name] if private else len(self.memory[s.buffer.name])
        wrong = active & ((offset < 0) | (offset >= size))
        if wrong.any():
            bad = int(offset[wrong][0])
            raise VerifyError(
                f"access to {s.buffer.name}[{bad}] of size {size} at {s.offset}", phase="interp"
            )
        inside = np.where(active, offset, 0)
        if private:
            inside, active = np.broadcast_arrays(inside + self.own * size, active)
        return inside, active

    def load(self, s: Load) -> Array:
        """The loaded block; inactive lanes hold `other` or poison."""
        offset, active = self.address(s, self.lanes(s.mask))
        idle = self.poison(s.var.dtype) if s.other is None else self.evaluate(s.other)
        if not active.any():
            return np.broadcast_to(idle, np.broadcast_shapes(idle.shape, offset.shape))
        found = self.algebra.apply("cast", [self.memory[s.buffer.name][offset]], s.buffer.dtype, s.var.dtype)
        return (
            found
            if s.mask is None
            else self.algebra.apply("where", [active, found, idle], bool_, s.var.dtype)
        )

    def store(self, s: Store) -> None:
        """Write the active lanes; two lanes may write one element only if they agree."""
        value = self.algebra.apply("cast", [self.evaluate(s.value)], s.value.dtype, s.buffer.dtype)
        shape = np.broadcast_shapes(value.shape, self.lanes(s.mask).shape)
        offset, active = self.address(s, np.broadcast_to(self.lanes(s.mask), shape))
        places, data = offset[active], np.broadcast_to(value, active.shape)[active]
        memory = self.memory[s.buffer.name]
        memory[places] = data
        if memory[places].tobytes() != data.tobytes():
            raise VerifyError(f"lanes write different values to {s.buffer.name}", phase="interp")

    def update(self, s: Update) -> None:
        """Assign all at once; lanes outside the mask keep what they had."""
        active = self.lanes(s.mask)
        values = [self.evaluate(v) for v in s.values]
        for var, value in zip(s.vars, values, strict=True):
            old = self.values[value_of(var)]
            new = (
                value
                if s.mask is None
                else self.algebra.apply("where", [active, value, old], bool_, var.dtype)
            )
            self.assign(var, new)

    def collapse(self, s: Collapse) -> None:
        """Merge lanes along one axis after the other, neighbours first."""
        merged = list(np.broadcast_arrays(*[self.values[value_of(p)] for p in s.parts]))
        for a in s.axes:
            k = self.place.get(a)
            if k is None:
                continue
            count = max(merged[0].shape[k], self.tiles[a])
            full = [np.broadcast_to(p, (*p.shape[:k], count, *p.shape[k + 1 :])) for p in merged]
            last = merge_last(self.algebra, s.reduction, [np.moveaxis(p, k, -1) for p in full])
            merged = [np.expand_dims(x, k) for x in last]
        for var, value in zip(s.vars, merged, strict=True):
            self.assign(var, value)

    def prefix(self, s: Prefix) -> None:
        """Merge each lane with those before it."""
        k = self.place[s.axis]
        count = self.tiles[s.axis]
        parts = np.broadcast_arrays(*[self.values[value_of(p)] for p in s.parts])
        full = [np.broadcast_to(p, (*p.shape[:k], count, *p.shape[k + 1 :])) for p in parts]
        for var, value in zip(s.vars, prefixes(self.algebra, s.reduction, full, k), strict=True):
            self.assign(var, value)

    def dot(self, s: Dot) -> None:
        """Add the product of two blocks to a state."""
        dtype = s.acc.dtype
        a, b = (self.algebra.apply("cast", [self.values[value_of(v)]], v.dtype, dtype) for v in (s.a, s.b))
        product = self.algebra.apply("mul", [a, b], dtype, dtype)
        k = self.place.get(s.k)
        if k is not None:
            (last,) = merge_last(self.algebra, sum_(dtype), [np.moveaxis(product, k, -1)])
            product = np.expand_dims(last, k)
        old = self.values[value_of(s.acc)]
        self.assign(s.acc, self.algebra.apply("add", [old, product], dtype, dtype))
