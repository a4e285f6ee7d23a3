"""Single elements of a graph's values, computed on demand: for graphs whose values are too large to be held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tilewright.errors import UnsupportedError
from tilewright.ir.expr import Axis, Expr
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.sizes import dims
from tilewright.tuning.input_limits import PIECES

from .algebra import Array, Floats

Index = tuple[Array, ...]
"""One array of places per dim, broadcast against each other."""

REDUCE: Mapping[str, Callable[..., Array]] = {
    "add": np.sum, "mul": np.prod, "maximum": np.max, "minimum": np.min,
}  # fmt: skip


@dataclass
class Points:
    """Elements of the values of a graph of tensor expressions with sizes that are numbers, in fp64 without rounding.
    `read` gives elements of the graph's inputs."""

    graph: Graph
    read: Callable[[Value, Index], Array]
    _known: dict[tuple[object, ...], Array] = field(default_factory=dict[tuple[object, ...], Array])

    def __post_init__(self) -> None:
        self._producer = self.graph.producer()
        self._algebra = Floats(wide=True)

    def at(self, v: Value, index: Index) -> Array:
        """Elements of `v`. Raises UnsupportedError for what is no sum, product or extremum of pointwise values."""
        op = self._producer.get(v)
        if op is None:
            return self.read(v, index)
        key = (v, *((a.shape, a.tobytes()) for a in index))
        if key not in self._known:
            self._known[key] = self._made(op, index)
        return self._known[key]

    def _made(self, op: Op, index: Index) -> Array:
        e = op.expr
        if e is None or e.scan is not None or (e.reduction and e.reduction.combiner not in REDUCE):
            raise UnsupportedError(f"no single elements of {op.name}", phase="interp", op=op.name)
        rank = max((a.ndim for a in index), default=0)
        count = len(e.reduce)
        env = {a: _ranked(x, rank, count) for a, x in zip(e.axes, index, strict=True)}
        for k, a in enumerate(e.reduce):
            extent = dims.static(a.extent)
            if extent is None:
                raise UnsupportedError("a sum of unknown length", phase="interp", op=op.name)
            env[a] = np.arange(extent).reshape((1,) * (rank + k) + (extent,) + (1,) * (count - k - 1))
        if (
            np.prod(np.broadcast_shapes(*(x.shape for x in env.values())), dtype=np.int64)
            > PIECES.max_exact_elements
        ):
            raise UnsupportedError("too many elements at once", phase="interp", op=op.name)
        made = self._value(e.body[0], env, op, {})
        if e.reduction is None:
            return made
        # A body that is constant along a folded axis is folded as often all the same.
        shape = np.broadcast_shapes(made.shape, *(env[a].shape for a in e.reduce))
        axes = tuple(range(rank, rank + count))
        return REDUCE[e.reduction.combiner or ""](np.broadcast_to(made, shape), axis=axes)

    def _value(self, e: Expr, env: Mapping[Axis, Array], op: Op, memo: dict[Expr, Array]) -> Array:
        if e in memo:
            return memo[e]
        if e.op == "const":
            assert e.value is not None and not isinstance(e.value, tuple)
            found = self._algebra.constant(e.value, e.dtype)  # pyright: ignore[reportArgumentType]
        elif isinstance(e.value, Axis):
            found = env[e.value]
        elif e.op == "read":
            assert isinstance(e.value, int)
            places = tuple(np.asarray(self._value(a, env, op, memo)) for a in e.args)
            rank = max((x.ndim for x in env.values()), default=0)
            found = self.at(op.inputs[e.value], tuple(_ranked(p, rank, 0) for p in places))
        elif e.args and e.op != "checked":
            args = [self._value(a, env, op, memo) for a in e.args]
            found = self._algebra.apply(e.op, args, e.args[0].dtype, e.dtype)
        else:
            raise UnsupportedError(f"no single elements of {e.op}", phase="interp", op=op.name)
        memo[e] = found
        return found


def _ranked(x: Array, rank: int, more: int) -> Array:
    """With leading dims up to `rank` and `more` trailing ones."""
    return x.reshape((1,) * (rank - x.ndim) + x.shape + (1,) * more)
