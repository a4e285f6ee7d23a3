"""Values of expressions and tensor expressions on blocks of their index grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce as fold_left

import numpy as np

from tilewright.errors import IndexOutOfRange, VerifyError
from tilewright.ir.expr import Axis, Expr, Symbol, slot, walk
from tilewright.ir.reduction import Reduction
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.tuning.input_limits import PIECES

from .algebra import Algebra, Array

Condition = tuple[tuple[Expr, bool], ...]
Symbols = Mapping[str, int | float]


_DIVISIONS = ("floordiv", "mod", "truncdiv", "fmod")


@dataclass
class Evaluator:
    """Expressions over arrays. `axes` gives each axis its positions as an array of the grid's rank,
    `operands` what a read reads, `slots` the values of placeholders, `symbols` the sizes."""

    algebra: Algebra
    operands: Sequence[Array] = ()
    symbols: Symbols = field(default_factory=dict[str, "int | float"])
    axes: Mapping[Axis, Array] = field(default_factory=dict[Axis, Array])
    slots: Mapping[Expr, Array] = field(default_factory=dict[Expr, Array])

    def __post_init__(self) -> None:
        self._memo: dict[tuple[Expr, Condition], Array] = {}
        self._partial: dict[Expr, bool] = {}

    def value(self, e: Expr, under: Condition = ()) -> Array:
        """The value of `e` wherever the conditions `under` hold (anything elsewhere).

        Raises IndexOutOfRange for a read outside its tensor, ZeroDivisionError for an integer division by
        0."""
        key = (e, under if under and self._is_partial(e) else ())
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self._leaf(e) if not e.args and e.op != "read" else self._node(e, under)
        return found

    def _is_partial(self, e: Expr) -> bool:
        """Whether evaluation may fail, so that it depends on where it is performed."""
        known = self._partial.get(e)
        if known is None:
            divides = e.op in _DIVISIONS and not e.dtype.is_float
            known = self._partial[e] = e.op == "read" or divides or any(self._is_partial(a) for a in e.args)
        return known

    def _leaf(self, e: Expr) -> Array:
        if e.op == "const":
            assert isinstance(e.value, (bool, int, float)) or e.value is not None
            return self.algebra.constant(e.value, e.dtype)  # pyright: ignore[reportArgumentType]
        if isinstance(e.value, Axis):
            return self.axes[e.value]
        if isinstance(e.value, Symbol):
            return self.algebra.load(self.symbols[e.value.name], e.dtype)
        return self.slots[e]

    def _node(self, e: Expr, under: Condition) -> Array:
        if e.op == "where":
            condition, yes, no = e.args
            chosen = (self.value(condition, under), self.value(yes, (*under, (condition, True))),
                      self.value(no, (*under, (condition, False))))  # fmt: skip
            return self.algebra.apply("where", chosen, condition.dtype, e.dtype)
        if e.op == "checked":
            if not np.asarray(self.value(e.args[1])).all():
                raise IndexOutOfRange(f"{e.args[1]} does not hold", phase="interp")
            return self.value(e.args[0], under)
        if e.op == "implied":
            return self.value(e.args[0], under)
        args = [self.value(a, under) for a in e.args]
        if e.op == "read":
            return self._read(e, [np.asarray(a) for a in args], under)
        if e.op in _DIVISIONS and not e.dtype.is_float:
            args[1] = self._divisor(np.asarray(args[0]), np.asarray(args[1]), under)
        return self.algebra.apply(e.op, args, e.args[0].dtype, e.dtype)

    def _active(self, under: Condition) -> Array | None:
        """Where all conditions hold, or None for everywhere."""
        parts: list[Array] = []
        for k, (condition, wanted) in enumerate(under):
            value = np.asarray(self.value(condition, under[:k]))
            parts.append(value if wanted else ~value)
        return fold_left(np.logical_and, parts) if parts else None

    def _wrong(self, bad: Array, under: Condition) -> bool:
        if not bad.any():
            return False
        active = self._active(under)
        return bool((bad if active is None else bad & active).any())

    def _divisor(self, a: Array, b: Array, under: Condition) -> Array:
        zero = b == 0
        if not zero.any():
            return b
        if self._wrong(np.broadcast_to(zero, np.broadcast_shapes(a.shape, b.shape)), under):
            raise ZeroDivisionError("integer division by zero")
        return np.where(zero, np.ones_like(b), b)

    def _read(self, e: Expr, index: list[Array], under: Condition) -> Array:
        assert isinstance(e.value, int)
        source = self.operands[e.value]
        if len(source.shape) != len(index):
            raise VerifyError(f"{e} has {len(index)} indices for rank {len(source.shape)}", phase="interp")
        if not index:
            return source
        inside: list[Array] = []
        for at, size in zip(index, source.shape, strict=True):
            bad = (at < 0) | (at >= size)
            if self._wrong(bad, under):
                raise IndexOutOfRange(f"index out of range for size {size} in {e}", phase="interp")
            inside.append(np.where(bad, 0, at) if bad.any() else at)
        if 0 in source.shape:
            shape = np.broadcast_shapes(*[at.shape for at in index])
            return self.algebra.empty(shape, e.dtype)
        return source[tuple(inside)]


Ranges = dict[Axis, tuple[int, int]]


@dataclass(frozen=True)
class TensorEvaluator:
    """Runs one tensor expression over given operands and sizes."""

    expr: TensorExpr
    algebra: Algebra
    operands: Sequence[Array]
    symbols: Symbols

    def run(self) -> list[Array]:
        """The results, each of shape `expr.shape`."""
        sizes = {name: int(v) for name, v in self.symbols.items()}
        ranges = {a: (0, dims.evaluate(a.extent, sizes)) for a in self.expr.axes + self.expr.reduce}
        return self._outputs(ranges)

    def _outputs(self, ranges: Ranges) -> list[Array]:
        """Results on a block: split along an output axis while too large, else fold and finish."""
        expr = self.expr
        shape = tuple(ranges[a][1] - ranges[a][0] for a in expr.axes)
        if 0 in shape:
            return [self.algebra.empty(shape, t) for t in expr.dtypes]
        free = [a for a in expr.axes if a is not expr.scan and ranges[a][1] - ranges[a][0] > 1]
        if free and self._points(ranges) > PIECES.evaluated_points:
            widest = max(free, key=lambda a: ranges[a][1] - ranges[a][0])
            parts = [self._outputs(half) for half in _halves(ranges, widest)]
            return [self.algebra.join(two, expr.axes.index(widest)) for two in zip(*parts, strict=True)]
        if expr.reduction is None:
            return [self._spread(self._block(ranges).value(expr.body[0]), shape)]
        state = self._state(ranges, expr.reduction)
        if expr.scan is not None:
            state = prefixes(self.algebra, expr.reduction, state, expr.axes.index(expr.scan))
        return [
            self._spread(r, shape)
            for r in over_slots(self.algebra, expr.reduction.finish, expr.reduction, a=state)
        ]

    def _points(self, ranges: Ranges) -> int:
        """Elements of the largest array that evaluation of the block makes."""
        factors = self._factors()
        if factors is None:
            return _volume(ranges, self.expr.axes + self.expr.reduce)
        used = [[a for a in self.expr.axes + self.expr.reduce if a in _axes(f)] for f in factors]
        return max([_volume(ranges, u) for u in used] + [_volume(ranges, self.expr.axes)])

    def _factors(self) -> tuple[Expr, ...] | None:
        r = self.expr.reduction
        body = self.expr.body[0]
        is_sum = r is not None and r.combiner == "add" and r.lift[0].op == "slot"
        return (
            body.args
            if is_sum and body.op == "mul" and body.dtype.is_float and body.dtype.bytes >= 4
            else None
        )

    def _block(self, ranges: Ranges) -> Evaluator:
        grid = self.expr.axes + self.expr.reduce
        positions: dict[Axis, Array] = {}
        for k, a in enumerate(grid):
            low, high = ranges[a]
            positions[a] = np.arange(low, high, dtype=np.int64).reshape(
                [-1 if j == k else 1 for j in range(len(grid))]
            )
        return Evaluator(self.algebra, self.operands, self.symbols, positions)

    def _spread(self, x: Array, shape: tuple[int, ...]) -> Array:
        """`x` broadcast to `shape`, in storage of its own."""
        full = (1,) * (len(shape) - len(x.shape)) + x.shape
        index = tuple(np.zeros(n, np.int64) if full[k] == 1 else np.arange(n) for k, n in enumerate(shape))
        x = x.reshape(full)
        return x if x.shape == shape else x[np.ix_(*index)]

    def _state(self, ranges: Ranges, reduction: Reduction) -> list[Array]:
        """The folded state on a block, of the shape of its output axes."""
        expr, algebra = self.expr, self.algebra
        kept = tuple(ranges[a][1] - ranges[a][0] for a in expr.axes)
        over = tuple(ranges[a][1] - ranges[a][0] for a in expr.reduce)
        if 0 in over:
            return [self._spread(Evaluator(algebra).value(i), kept) for i in reduction.identity]
        wide = [a for a in expr.reduce if ranges[a][1] - ranges[a][0] > 1]
        if wide and self._points(ranges) > PIECES.evaluated_points:
            first, second = (self._state(half, reduction) for half in _halves(ranges, wide[0]))
            return over_slots(algebra, reduction.merge, reduction, a=first, b=second)
        block = self._block(ranges)
        positions = tuple(range(len(kept), len(kept) + len(over)))
        factors = self._factors()
        if factors is not None and over:
            x, y = (block.value(f) for f in factors)
            quick = algebra.contract(_rank(x, len(kept + over)), _rank(y, len(kept + over)), positions)
            if quick is not None:
                return [self._spread(quick, kept)]
        elements = [self._spread(block.value(b), kept + over) for b in expr.body]
        lifted = over_slots(algebra, reduction.lift, reduction, e=elements)
        lifted = [self._spread(x, kept + over) for x in lifted]
        if reduction.combiner is not None and over:
            quick = algebra.reduce(
                reduction.combiner, lifted[0], positions, Evaluator(algebra).value(reduction.identity[0])
            )
            if quick is not None:
                return [quick]
        return merge_last(algebra, reduction, [x.reshape(*kept, -1) for x in lifted]) if over else lifted


def _axes(e: Expr) -> set[Axis]:
    return {x.value for x in walk(e) if isinstance(x.value, Axis)}


def _rank(x: Array, rank: int) -> Array:
    return x if len(x.shape) == rank else x.reshape(*((1,) * (rank - len(x.shape)) + x.shape))


def _volume(ranges: Ranges, axes: Sequence[Axis]) -> int:
    total = 1
    for a in axes:
        total *= ranges[a][1] - ranges[a][0]
    return total


def _halves(ranges: Ranges, cut: Axis) -> tuple[Ranges, Ranges]:
    low, high = ranges[cut]
    middle = (low + high) // 2
    return ranges | {cut: (low, middle)}, ranges | {cut: (middle, high)}


def over_slots(
    algebra: Algebra, exprs: Sequence[Expr], reduction: Reduction, **sides: Sequence[Array]
) -> list[Array]:
    """Expressions over slots with arrays in their place."""
    types = {"e": reduction.elements, "a": reduction.state, "b": reduction.state}
    slots = {
        slot(side, k, t): x
        for side, xs in sides.items()
        for k, (t, x) in enumerate(zip(types[side], xs, strict=True))
    }
    evaluator = Evaluator(algebra, slots=slots)
    return [evaluator.value(e) for e in exprs]


def merge_last(algebra: Algebra, reduction: Reduction, state: list[Array]) -> list[Array]:
    """Merge neighbours along the last axis until one is left; the order of the parts is kept."""
    while (n := state[0].shape[-1]) > 1:
        even, odd = ([x[..., k : n - n % 2 : 2] for x in state] for k in (0, 1))
        merged = over_slots(algebra, reduction.merge, reduction, a=even, b=odd)
        state = (
            [algebra.join([m, x[..., n - 1 :]], -1) for m, x in zip(merged, state, strict=True)]
            if n % 2
            else merged
        )
    return [x[..., 0] for x in state]


def prefixes(algebra: Algebra, reduction: Reduction, state: list[Array], axis: int) -> list[Array]:
    """All prefixes along `axis`, merged one element at a time."""
    at = lambda k: (slice(None),) * axis + (slice(k, k + 1),)  # noqa: E731
    running = [x[at(0)] for x in state]
    results = [running]
    for k in range(1, state[0].shape[axis]):
        running = over_slots(algebra, reduction.merge, reduction, a=running, b=[x[at(k)] for x in state])
        results.append(running)
    return [algebra.join(parts, axis) for parts in zip(*results, strict=True)]
