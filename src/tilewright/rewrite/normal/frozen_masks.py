"""Frozen masks become predicates: a buffer that is a band, a prefix, sinks or blocks is replaced by what it says.

A kernel then reads no mask of S x S elements, and knows which of its tiles are empty or full. Recognition is exact: a
few rows suggest predicates, and every element is compared with one before it is believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch

from tilewright.analysis.runtime_checks import checked_index, from_data, with_tests
from tilewright.interp import FLOATS, Array
from tilewright.interp.evaluate import Evaluator
from tilewright.ir.dtype import DType, bool_
from tilewright.ir.expr import Expr, axis, call, const, integer, rebuild, substitute, where
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import output_axes
from tilewright.tuning.input_limits import MODELS, PIECES
from tilewright.tuning.rewrite_limits import MASK_SEARCH
from tilewright.tuning.thresholds import MASKS

from .normalise import drop_dead, map_reads, simplify, tidy_operands


def recognise_masks(graph: Graph) -> Graph:
    """The graph in which reads of recognised buffers are predicates over their indices. Reads at indices from data
    stay (an index out of bounds must raise), and so do library calls."""
    known: dict[Value, Expr] = {}
    for v, tensor in graph.constants.items():
        if isinstance(tensor, torch.Tensor) and (
            tensor.numel() >= MASKS.min_mask_elements or not tensor.dim()
        ):
            found = recognise(tensor, v.dtype)
            if found is not None:
                known[v] = found
    if not known:
        return graph
    return drop_dead(simplify(graph.with_ops([without_buffers(op, known) for op in graph.ops])))


def without_buffers(op: Op, known: dict[Value, Expr]) -> Op:
    """An op that has what is `known` of buffers, over their axes, in place of reads of them at plain indices."""
    if op.expr is None or not any(v in known for v in op.inputs):
        return op

    def change(r: Expr) -> Expr | None:
        assert isinstance(r.value, int)
        v = op.inputs[r.value]
        index = tuple(map_reads(i, change) for i in r.args)
        index = tuple(
            checked_index(new, size, data=True) if new is not old and not from_data(new) else new
            for new, old, size in zip(index, r.args, v.shape, strict=True)
        )
        if v not in known or any(map(from_data, index)):
            return None if index == r.args else rebuild(r, index)
        places = [axis(a) for a in output_axes(v.shape)]
        return with_tests(substitute(known[v], dict(zip(places, index, strict=True))), index)

    body = tuple(map_reads(b, change) for b in op.expr.body)
    return tidy_operands(replace(op, expr=replace(op.expr, body=body)))


def recognise(tensor: torch.Tensor, dtype: DType) -> Expr | None:
    """An expression over the tensor's axes i0, i1, ... that equals every element of it, or None: one number, or a
    choice of two by a predicate of the last two axes. Dims before those must not matter."""
    if not 0 < tensor.numel() <= MODELS.max_mask_elements or tensor.device.type == "meta":
        return None
    matrix = _matrix(tensor.detach())
    values = None if matrix is None else _values(matrix)
    if matrix is None or values is None:
        return None
    if len(values) == 1:
        return const(values[0], dtype)
    bits = (matrix == values[1]).numpy()
    *_, rows, columns = (dims.ZERO, dims.ZERO, *map(axis, output_axes(tuple(map(integer, tensor.shape)))))
    single = {
        a: dims.ZERO for a, n in zip((rows, columns), matrix.shape, strict=True) if n == 1 and a.op == "axis"
    }
    for flipped in (False, True):
        for guess in _guesses(bits != flipped, rows, columns):
            condition = substitute(guess, single)
            if _equals(condition, bits != flipped, rows, columns):
                yes, no = (const(v, dtype) for v in (values if flipped else values[::-1]))
                return where(condition, yes, no) if dtype is not bool_ or flipped else condition
    return None


def _matrix(t: torch.Tensor) -> torch.Tensor | None:
    """The last two dims, if the others only repeat them."""
    if t.dim() < 2:
        return t.reshape(1, -1).cpu()
    first = t[(0,) * (t.dim() - 2)]
    if any(n > 1 and s for n, s in zip(t.shape[:-2], t.stride()[:-2], strict=True)) and not torch.equal(
        t, first.expand(t.shape)
    ):
        return None
    return first.cpu()


def _values(m: torch.Tensor) -> list[float] | None:
    """Its values in ascending order, if they are one or two; a look at a few elements refuses most tensors."""
    if len(set(m[0, : MASK_SEARCH.first_elements].tolist())) > 2:
        return None
    some = m[:: max(1, m.shape[0] // PIECES.mask_rows)][:, :: max(1, m.shape[1] // PIECES.mask_rows)]
    for part in (some, m):
        low, high = part.min(), part.max()
        if not bool(((part == low) | (part == high)).all()):
            return None
    ends = [m.min().item(), m.max().item()]
    return ends[:1] if ends[0] == ends[1] else ends


def _equals(condition: Expr, bits: Array, rows: Expr, columns: Expr) -> bool:
    """Whether the condition is true exactly where `bits` is."""
    few = np.arange(0, bits.shape[0], max(1, bits.shape[0] // MASK_SEARCH.sample_rows))
    parts = [
        few[::32],
        few,
        *(
            np.arange(k, min(k + PIECES.mask_rows, bits.shape[0]))
            for k in range(0, bits.shape[0], PIECES.mask_rows)
        ),
    ]
    across = np.arange(bits.shape[1])[None, :]
    for part in parts:
        axes = {a.value: x for a, x in ((rows, part[:, None]), (columns, across)) if a.op == "axis"}
        found = Evaluator(FLOATS, axes=axes).value(condition)  # pyright: ignore[reportArgumentType]
        if not np.array_equal(np.broadcast_to(found, (len(part), bits.shape[1])), bits[part]):
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Rows:
    """Of some rows with a true element: its number, its first and last one, the start of the run that the last one
    ends, and the length of the run from the first one."""

    number: Array
    first: Array
    last: Array
    start: Array
    run: Array
    width: int


def _rows(bits: Array) -> _Rows:
    number = np.flatnonzero(bits.any(1))
    number = np.union1d(number[:: max(1, len(number) // MASK_SEARCH.sample_rows)], number[-1:])
    part = bits[number]
    width = bits.shape[1]
    last = width - 1 - part[:, ::-1].argmax(1)
    places = np.arange(width)[None, :]
    first = part.argmax(1)
    before = np.where(~part & (places < last[:, None]), places, -1).max(1)
    after = np.where(~part & (places > first[:, None]), places, width).min(1)
    return _Rows(number, first, last, before + 1, after - first, width)


def _guesses(bits: Array, i: Expr, j: Expr) -> Iterator[Expr]:
    """Predicates that some rows of `bits` suggest, simple ones first."""
    seen = _rows(bits)
    if not len(seen.number):
        return
    gap = dims.sub(j, i)
    at_most = lambda e, n: call("le", e, integer(int(n)))  # noqa: E731
    at_least = lambda e, n: call("ge", e, integer(int(n)))  # noqa: E731
    yield at_most(j, seen.last.max())
    yield at_least(j, seen.first.min())
    yield at_most(i, seen.number[-1])
    yield at_least(i, seen.number[0])
    uppers = [at_most(gap, n) for n in _shifts(seen.last, seen, seen.last < seen.width - 1)]
    cut = seen.start > seen.first
    run = (seen.run[cut] if cut.any() else seen.run).min()
    heads = dict.fromkeys((at_most(j, seen.last.min()), at_most(j, run - 1)))
    lowers: dict[Expr, None] = {}
    for start in (seen.first, seen.start):
        lowers |= {at_least(gap, n): None for n in _shifts(start, seen, start > 0)}
    for upper, lower in product([*uppers, None], [*lowers, None]):
        band = upper if lower is None else lower if upper is None else call("and", upper, lower)
        if band is None:
            continue
        yield band
        for head in heads:
            yield call("or", band, head)
            if upper is not None and lower is not None:
                yield call("and", upper, call("or", lower, head))
    yield from _blocks(bits, i, j, [*uppers, call("le", gap, dims.ZERO)])


def _shifts(column: Array, seen: _Rows, where_: Array) -> list[int]:
    """Distances from the diagonal that the ends of rows have: the least, and the commonest."""
    shifts = (column - seen.number)[where_]
    if not len(shifts):
        return []
    values, counts = np.unique(shifts, return_counts=True)
    return list(dict.fromkeys((int(values[0]), int(values[counts.argmax()]))))


def _blocks(bits: Array, i: Expr, j: Expr, uppers: Sequence[Expr]) -> Iterator[Expr]:
    """Blocks along the diagonal of the top left corner, or of the bottom right one."""
    rows, columns = bits.shape
    for size in dict.fromkeys((int(bits[0].sum()), int(bits[:, 0].sum()), int(bits[-1].sum()))):
        for offset in dict.fromkeys((0, columns - rows)):
            if size < 2 or offset < 0:
                continue
            row = dims.floordiv(dims.add(i, integer(offset)), integer(size))
            column = dims.floordiv(j, integer(size))
            same = call("eq", row, column)
            yield same
            yield call("le", column, row)
            yield from (call("and", same, upper) for upper in uppers)
