"""Regions that compute what a routine of the library computes, whatever ops they are written with.

The roles of a region's inputs are guessed from its two contractions. Places may matter only through the causal
condition, which is read from the expressions. That the function is the routine's is then shown by evaluating both for
some rows of random inputs, in fp64 and at the real sizes: functions of this kind that agree there are the same
(identity testing: Schwartz, JACM 27, 1980, for polynomials). Rounding in half precision is not part of the comparison;
a fused routine rounds no more often than the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np

from tilewright.analysis.value.constant_regions import ValueAnalysis
from tilewright.errors import UnsupportedError
from tilewright.interp.algebra import Array
from tilewright.interp.points import Index, Points
from tilewright.ir.expr import Axis, Expr, axes_of, axis, read, walk
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.ops.common import position
from tilewright.ir.sizes import dims
from tilewright.ir.task import Attention
from tilewright.ir.tensor import TensorExpr, output_axes
from tilewright.target import Target
from tilewright.tuning.search_limits import CALLS
from tilewright.tuning.thresholds import LIBRARY

from .fused import fused_call
from .select import is_contraction

SMOOTH = frozenset({"cast", "narrow", "add", "sub", "mul", "fma", "div", "neg", "exp"})
COMBINERS = frozenset({"add", "maximum"})
"""Operations, and combiners of reductions, in regions that may be a routine."""

AS_AT_LEAST: Mapping[str, Callable[[Expr, Expr], tuple[Expr, Expr]]] = {
    "ge": lambda a, b: (a, b), "le": lambda a, b: (b, a),
    "gt": lambda a, b: (a, dims.add(b, dims.ONE)), "lt": lambda a, b: (b, dims.add(a, dims.ONE)),
}  # fmt: skip
"""How each comparison of places says first >= second: as (first, second)."""


@dataclass(frozen=True, slots=True)
class AttentionOperand:
    """A value seen as [batch, heads, places, depth]: the dims of the value that these are (-1: a dim of one)."""

    value: Value
    order: tuple[int, int, int, int]

    def sizes(self) -> tuple[Expr, ...]:
        """Extents in that order."""
        return tuple(dims.ONE if d < 0 else self.value.shape[d] for d in self.order)

    def index(self, places: Sequence[Array]) -> Index:
        """Places of the value's own dims, from those in that order; dims that have no part are 0."""
        found = [np.zeros((1,), np.int64)] * len(self.value.shape)
        for d, at in zip(self.order, places, strict=True):
            if d >= 0:
                found[d] = at
        return tuple(found)


@dataclass(frozen=True, slots=True)
class AttentionRegion:
    """A region as one call of fused attention: operands, result, and what the call is told."""

    q: AttentionOperand
    k: AttentionOperand
    v: AttentionOperand
    out: AttentionOperand
    scale: float
    causal: bool

    def flops(self) -> float:
        """Operations of both products, without what a causal mask hides."""
        sizes = [dims.static(s) or 1 for s in (*self.q.sizes(), self.k.sizes()[2], self.v.sizes()[3])]
        batch, heads, queries, depth, keys, wide = sizes
        return 2.0 * batch * heads * queries * keys * (depth + wide) * (0.5 if self.causal else 1.0)


def routine_of(region: Graph, target: Target) -> AttentionRegion | None:
    """The routine that computes a region, if the library has one on this machine."""
    if not target.fused_attention or len(region.outputs) != 1:
        return None
    result = region.outputs[0]
    inputs = [v for v in region.inputs if isinstance(v, Value)]
    sizes = [s for v in (*inputs, result) if isinstance(v, Value) for s in v.shape]
    if not isinstance(result, Value) or len(inputs) != 3 or any(dims.static(s) is None for s in sizes):
        return None
    layout = region.layouts.get(result)
    if layout is not None and layout.strides != dims.dense_strides(result.shape):
        return None
    if not all(v.dtype is result.dtype and v.dtype.is_half for v in inputs):
        return None
    try:
        found = [
            r for r in _guesses(region, result) if _number(r.q.sizes()[2]) >= LIBRARY.min_attention_queries
        ]
        if not found or not _uniform(region, found[0]):
            return None
        return next((r for r in found if _same(region, result, r)), None)
    except UnsupportedError:  # what has no single elements is no routine
        return None


def routine_seconds(routine: AttentionRegion, target: Target) -> float:
    """Seconds of the call: flash attention takes keys and values of one width, up to a bound; other kernels take the
    rest."""
    widths = {_number(v.sizes()[3]) for v in (routine.q, routine.v)}
    flash = len(widths) == 1 and max(widths) <= LIBRARY.max_flash_width
    rate = target.fused_attention * (1.0 if flash else LIBRARY.other_attention_rate_ratio)
    values = (routine.q, routine.k, routine.v, routine.out)
    moved = sum(_number(v.value.numel) * v.value.dtype.bytes for v in values)
    return max(routine.flops() / rate, moved / target.device.bandwidth) + target.launch_seconds


# --- roles ---------------------------------------------------------------------------


def _guesses(region: Graph, result: Value) -> Iterator[AttentionRegion]:
    """What the inputs may be, from the two contractions; scale and mask are filled in."""
    inputs = set(region.inputs)
    found = [op for op in region.ops if is_contraction(op)]
    if len(found) != 2:
        return
    scores, product = found
    sides = [_operand(scores, x, inputs) for x in _reads(scores)]
    values = [_operand(product, x, inputs) for x in _reads(product) if product.inputs[_slot(x)] in inputs]
    if len(sides) != 2 or len(values) != 1 or None in (*sides, *values):
        return
    for q, k in permutations(sides):
        v = values[0]
        assert q is not None and k is not None and v is not None
        for out in _results(result, q, v):
            scale = _scale(region, result, q, k, v, out)
            if scale is not None:
                yield from (AttentionRegion(q, k, v, out, scale, causal) for causal in (True, False))


def _reads(op: Op) -> list[Expr]:
    assert op.expr is not None
    return [x for x in op.expr.reads() if axes_of(x)]


def _slot(x: Expr) -> int:
    assert isinstance(x.value, int)
    return x.value


def _operand(op: Op, x: Expr, inputs: set[Value | Expr]) -> AttentionOperand | None:
    """A read of a contraction as an operand: its summed axis is depth or, of values, places; axes that both sides have
    are the batch's and heads'."""
    assert op.expr is not None
    value = op.inputs[_slot(x)]
    if value not in inputs or len(op.expr.reduce) != 1:
        return None
    summed = op.expr.reduce[0]
    others = {a for y in _reads(op) if y is not x for a in _axes(y)}
    place: list[int] = []
    depth: list[int] = []
    batch: list[int] = []
    for d, e in enumerate(x.args):
        used = _axes(e)
        if value.shape[d] is dims.ONE and not used:
            continue
        if used == {summed}:
            depth.append(d)
        elif used and not used & others:
            place.append(d)
        else:
            batch.append(d)
    attended = any(v not in inputs for v in op.inputs)
    if attended:
        place, depth = depth, place
    return _ordered(value, batch, place, depth)


def _axes(e: Expr) -> set[Axis]:
    return {a for x in walk(e) if isinstance(a := x.value, Axis)}


def _ordered(value: Value, batch: list[int], place: list[int], depth: list[int]) -> AttentionOperand | None:
    if len(place) != 1 or len(depth) != 1 or len(batch) > 2:
        return None
    first, second = [*(-1,) * (2 - len(batch)), *batch]
    return AttentionOperand(value, (first, second, place[0], depth[0]))


def _results(result: Value, q: AttentionOperand, v: AttentionOperand) -> Iterator[AttentionOperand]:
    """Where the dims of the result may lie."""
    wanted = [*q.sizes()[:3], v.sizes()[3]]
    own = [d for d, s in enumerate(result.shape) if s is not dims.ONE]
    needed = [k for k, s in enumerate(wanted) if s is not dims.ONE]
    if len(own) != len(needed):
        return
    for chosen in permutations(own):
        if all(result.shape[d] is wanted[k] for d, k in zip(chosen, needed, strict=True)):
            order = dict(zip(needed, chosen, strict=True))
            first, second, third, fourth = (order.get(k, -1) for k in range(4))
            yield AttentionOperand(result, (first, second, third, fourth))


# --- identity ------------------------------------------------------------------------


def _uniform(region: Graph, r: AttentionRegion) -> bool:
    """Whether the region is of the kind that a few rows show: made of products, sums, exponentials and maxima, of all
    elements alike, at places as they lie, but for a comparison of a query's place with a key's."""
    analysis = ValueAnalysis(region.ops)
    sizes = {r.q.sizes()[2], r.k.sizes()[2]}
    moving = {v for v in region.inputs if isinstance(v, Value)}
    for op in region.ops:
        if op.expr is None or op.expr.scan is not None:
            return False
        if not moving & set(op.inputs):
            continue
        moving |= set(op.outputs)
        reduction = op.expr.reduction
        if reduction and (reduction.combiner not in COMBINERS or reduction.finish[0].op != "slot"):
            return False
        for e in op.expr.body:
            if not _smooth(e, op, moving):
                return False
            if not all(_causal(x, sizes) for x in _conditions(analysis.inlined(e, op))):
                return False
    return True


def _smooth(e: Expr, op: Op, moving: set[Value]) -> bool:
    """Whether an element is made by arithmetic that has no special values: choices only where no data decide."""
    if e.op == "read":
        return op.inputs[_slot(e)] not in moving or _in_place(e, op)
    if e.op == "where":
        fixed = not any(x.op == "read" and op.inputs[_slot(x)] in moving for x in walk(e.args[0]))
        return fixed and all(_smooth(a, op, moving) for a in e.args[1:])
    if e.op in ("const", "axis") or not any(x.op == "read" for x in walk(e)):
        return True
    return e.op in SMOOTH and e.dtype.is_float and all(_smooth(a, op, moving) for a in e.args)


def _in_place(x: Expr, op: Op) -> bool:
    """Whether a read takes each element from the place of its own axes: those alone, or batch and heads as one."""
    assert op.expr is not None
    shape, rank = op.inputs[_slot(x)].shape, {a: k for k, a in enumerate((*op.expr.axes, *op.expr.reduce))}
    for d, e in enumerate(x.args):
        axes = sorted(_axes(e), key=rank.__getitem__)
        if e.op == "axis" or not axes:
            continue
        if e.op in ("floordiv", "mod") and e.args[0].op == "axis":
            first, last = (d, d + 1) if e.op == "floordiv" else (d - 1, d)
            pairs = [(k, y) for k, y in enumerate(x.args) if y.op in ("floordiv", "mod")]
            split = [y.op for _, y in pairs] == ["floordiv", "mod"] and len({y.args for _, y in pairs}) == 1
            sizes = dims.prod(shape[k] for k, _ in pairs)
            if (
                first > last
                or not split
                or e.args[1] is not shape[pairs[1][0]]
                or sizes is not axes[0].extent
            ):
                return False
            continue
        merged = dims.add(dims.mul(axis(axes[0]), axes[-1].extent), axis(axes[-1]))
        if len(axes) != 2 or e is not merged or shape[d] is not dims.prod(a.extent for a in axes):
            return False
    return True


def _conditions(e: Expr) -> Iterator[Expr]:
    """The smallest conditions of an expression that have axes outside reads, and axes that stand in none."""
    todo = [e]
    while todo:
        x = todo.pop()
        if x.op == "read":
            todo += [y for a in x.args for y in walk(a) if y.op == "read"]
        elif x.op == "axis" or (
            x.op in AS_AT_LEAST and axes_of(x) and not any(y.op == "read" for y in walk(x))
        ):
            yield x
        else:
            todo += x.args


def _causal(x: Expr, sizes: set[Expr]) -> bool:
    """Whether a condition says that one of two places is later than the other."""
    if x.op not in AS_AT_LEAST:
        return False
    places = list(axes_of(x))
    slack = dims.sub(*AS_AT_LEAST[x.op](*x.args))
    steps = [dims.static(dims.coefficient(slack, a) or dims.ZERO) or 0 for a in places]
    if sorted(steps) != [-1, 1] or any(
        not isinstance(a.value, Axis) or a.value.extent not in sizes for a in places
    ):
        return False
    rest = dims.sub(
        slack, dims.add(*(dims.mul(a, dims.integer(n)) for a, n in zip(places, steps, strict=True)))
    )
    return dims.static(rest) in (0, -1)


def _noise(index: Index, seed: int) -> Array:
    """Numbers that look normally distributed, a function of the place."""
    mixed = np.zeros((), np.uint64)
    for k, at in enumerate(index):
        step = np.uint64(0x9E3779B97F4A7C15 + 2 * (k + 31 * seed) * 0x2545F4914F6CDD1D & ((1 << 64) - 1))
        mixed = (mixed ^ at.astype(np.uint64)) * (step | np.uint64(1))
        mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    uniform = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53
    return (uniform - 0.5) * math.sqrt(12)


def _scale(
    region: Graph,
    result: Value,
    q: AttentionOperand,
    k: AttentionOperand,
    v: AttentionOperand,
    out: AttentionOperand,
) -> float | None:
    """What scores are multiplied by: the logarithm of the ratio of two weights, where queries are unit vectors and the
    first depth of a key is its place up to 1."""
    if min(_number(k.sizes()[2]), _number(v.sizes()[3])) < 2:
        return None

    def read_at(value: Value, index: Index) -> Array:
        if value is v.value:
            return (index[v.order[2]] == index[v.order[3]]).astype(np.float64)
        own = q if value is q.value else k
        first = (index[own.order[3]] == 0).astype(np.float64)
        return first if own is q else first * np.minimum(index[own.order[2]], 1)

    zero = np.zeros((1,), np.int64)
    last = np.full((1,), _number(q.sizes()[2]) - 1)
    if len({q.value, k.value, v.value}) < 3:
        return None
    weights = Points(region, read_at).at(result, out.index((zero, zero, last, np.arange(2))))
    with np.errstate(all="ignore"):
        found = float(np.log(weights.reshape(-1)[1] / weights.reshape(-1)[0]))
    return found if math.isfinite(found) and found > 0 else None


def _number(e: Expr) -> int:
    n = dims.static(e)
    assert n is not None
    return n


def _same(region: Graph, result: Value, r: AttentionRegion) -> bool:
    """Whether region and routine agree on rows of random inputs."""
    batch, heads, queries, depth = map(_number, r.q.sizes())
    keys, wide = _number(r.k.sizes()[2]), _number(r.v.sizes()[3])
    if [_number(s) for s in r.k.sizes()] != [batch, heads, keys, depth]:
        return False
    if [_number(s) for s in r.v.sizes()] != [batch, heads, keys, wide]:
        return False
    rng = np.random.default_rng(0)
    for seed, spread in enumerate(CALLS.score_deviations):
        rows = sorted({0, 1, queries - 1, *(int(n) for n in rng.integers(0, queries, CALLS.random_rows))})
        lead = [(n - 1) if not seed else int(rng.integers(0, n)) for n in (batch, heads)]
        inputs = _Inputs(r, seed, spread / (r.scale * math.sqrt(depth)))
        points = Points(region, inputs.read)
        for row in rows:
            b, h, i = (np.full((1,), n) for n in (*lead, row))
            made = points.at(result, r.out.index((b, h, i, np.arange(wide)))).reshape(-1)
            if not np.allclose(
                made, inputs.row(b, h, i), rtol=CALLS.equal_result_ratio, atol=CALLS.equal_result_ratio
            ):
                return False
    return True


@dataclass
class _Inputs:
    """Random inputs of a routine, the queries times `factor`."""

    routine: AttentionRegion
    seed: int
    factor: float
    known: dict[object, Array] = field(default_factory=dict[object, Array])

    def read(self, value: Value, index: Index) -> Array:
        """Elements of an input."""
        r = self.routine
        which = (r.q.value, r.k.value, r.v.value).index(value)
        key = (which, *((a.shape, a.tobytes()) for a in index))
        if key not in self.known:
            self.known[key] = _noise(index, 3 * self.seed + which) * (1.0 if which else self.factor)
        return self.known[key]

    def row(self, b: Array, h: Array, i: Array) -> Array:
        """A row of the routine's result."""
        r = self.routine
        keys, depth, wide = (np.arange(_number(s)) for s in (*r.k.sizes()[2:], r.v.sizes()[3]))
        query = self.read(r.q.value, r.q.index((b, h, i, depth[None])))
        key = self.read(r.k.value, r.k.index((b, h, keys[:, None], depth[None])))
        scores = r.scale * (query * key).sum(-1)
        if r.causal:
            scores = np.where(keys <= i, scores, -np.inf)
        weights = np.exp(scores - scores.max())
        values = self.read(r.v.value, r.v.index((b, h, keys[:, None], wide[None])))
        return (weights / weights.sum()) @ values


# --- the call ------------------------------------------------------------------------


def as_call(region: Graph, r: AttentionRegion, fresh: int) -> Graph:
    """The region as views, the call, and a view of its result; new values have numbers from `fresh` on."""
    ops: list[Op] = []
    operands: list[Value] = []
    for n, x in enumerate((r.q, r.k, r.v)):
        seen = Value(fresh + n, x.sizes(), x.value.dtype)
        axes = output_axes(seen.shape)
        index = [dims.ZERO] * len(x.value.shape)
        for a, d in zip(axes, x.order, strict=True):
            if d >= 0:
                index[d] = position(a)
        ops.append(Op("permute", (x.value,), (seen,), TensorExpr(axes, (read(0, index, seen.dtype),))))
        operands.append(seen)
    result = r.out.value
    task = Attention(result.dtype, r.q.sizes(), r.k.sizes(), r.causal, r.scale)
    call = fused_call(task, result.shape, r.out.order)
    origins = tuple(dict.fromkeys(op.origin for op in region.ops if op.origin >= 0))
    first = next(op.origin for op in region.ops if is_contraction(op))
    rest = tuple(o for o in origins if o != first)
    ops.append(Op(call.name, tuple(operands), (result,), call=call, origin=first, absorbed=rest))
    return region.with_ops(ops)
