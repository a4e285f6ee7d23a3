"""Which part of its inputs a tile needs: by hand, and never less than what the interpreter reads."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.corpus import CASES
from tests.support.one_kernel import capture
from tests.tilegraph.covers import Covered, case, result

from tilewright.errors import UnsupportedError, VerifyError
from tilewright.interp.algebra import STORAGE, Array
from tilewright.interp.points import Index, Points
from tilewright.ir.expr import symbol
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.kernel import Kernel
from tilewright.ir.sizes import dims
from tilewright.tilegraph.footprint import required
from tilewright.tilegraph.propagate import Span, Tile, block, elements, full_tile, join, propagate


def shown(tile: Tile) -> str:
    return ", ".join(map(str, tile))


def needed(found: Covered, name: str, *tile: tuple[int, int]) -> list[str]:
    """What a tile (first place and size of each dim) of an op's result needs of each input."""
    op = found.op(name)
    boxes = propagate(op, block([p for p, _ in tile], [n for _, n in tile]))
    return [shown(boxes[v]) for v in op.inputs]


# --- by hand -------------------------------------------------------------------


def test_a_reduction_needs_all_of_its_axis() -> None:
    found = case(lambda x, w: (x[:, :, None] * w[None]).sum(1), (9, 20), (20, 33))
    assert needed(found, "sum", (3, 4), (8, 16)) == ["3:7, 0:20, 8:24"]
    assert needed(found, "mul", (3, 4), (0, 20), (8, 16)) == ["3:7, 0:20", "0:20, 8:24"]


def test_a_softmax_needs_its_row() -> None:
    found = case(lambda x: torch.softmax(x, -1), (33, 200))
    assert needed(found, "softmax", (5, 2), (64, 64)) == ["5:7, 64:128", "5:7, 0:1"]
    boxes = required(found.kernel, {result(found): block([5, 64], [2, 64])})
    assert shown(boxes[found.op("exp").output]) == "5:7, 0:200", "its sum needs more than its quotient"


def test_windows_reach_over_the_border_of_a_tile() -> None:
    """A pool of 3 every 2 places over what a convolution of 3 made, both padded by 1."""
    found = case(
        lambda x, w: F.max_pool2d(F.conv2d(x, w, padding=1).relu(), 3, 2, 1), (2, 3, 16, 16), (5, 3, 3, 3)
    )
    pool = (0, 1), (0, 5), (2, 2), (0, 8)
    assert needed(found, "max_pool", *pool)[0] == "0:1, 0:5, 3:8, 0:16"
    graph = found.cover.graph
    together = Kernel(graph.ops, (result(found),))
    box = required(together, {result(found): block([p for p, _ in pool], [n for _, n in pool])})
    x, _ = graph.inputs
    assert isinstance(x, Value)
    assert shown(box[x]) == "0:1, 0:3, 2:9, 0:16", "a row more on each side"


def test_merged_dims_are_cut_where_the_tile_lies() -> None:
    found = case(lambda x: x.reshape(600).exp(), (6, 100))
    (op,) = found.cover.graph.ops
    rows = [shown(propagate(op, block([p], [n]))[op.inputs[0]]) for p, n in ((50, 50), (150, 50), (60, 60))]
    assert rows == ["0:1, 50:100", "1:2, 50:100", "0:2, 0:100"]


def test_a_place_may_be_a_symbol() -> None:
    found = case(lambda x: torch.softmax(x, -1), (33, 200), dynamic=True)
    n, t = result(found).shape[0], symbol("t")
    tile = block([dims.mul(t, dims.integer(4)), 0], [4, 200])
    (x,) = (v for v in found.op("max").inputs)
    box = propagate(found.op("exp"), tile)[x]
    assert box[0].high is dims.minimum(dims.add(dims.mul(t, dims.integer(4)), dims.integer(4)), n)
    for at, size in ((0, 4), (2, 1), (5, 0)):  # the last tiles stand out of the 9 rows, or are behind them
        assert dims.evaluate(box[0].size, {repr(n): 9, "t": at}) == size
    assert elements(full_tile(result(found))) is result(found).numel


def test_a_concatenation_needs_only_the_pieces_that_a_tile_meets() -> None:
    (op,) = case(lambda a, b: torch.cat([a, b], 1) * 1, (4, 30), (4, 50)).cover.graph.ops[:1]
    boxes = [
        [elements(propagate(op, block([0, p], [4, n]))[v]) for v in op.inputs] for p, n in ((0, 30), (20, 20))
    ]
    assert boxes == [[dims.integer(120), dims.ZERO], [dims.integer(40), dims.integer(40)]]


def test_a_running_sum_needs_all_before() -> None:
    found = case(lambda x: x.cumsum(1), (6, 40))
    (op,) = found.cover.graph.ops
    assert needed(found, op.name, (2, 2), (16, 8)) == ["2:4, 0:24"]


def test_an_index_from_data_needs_the_whole_dim() -> None:
    (embedding,) = (c for c in CASES if c.name == "embedding")
    (op,) = (op for op in capture(embedding, False).ops if op.name == "embedding")
    table, places = (v for v in sorted(op.inputs, key=lambda v: v.dtype.is_float, reverse=True))
    boxes = propagate(op, block([1, 2, 8], [1, 3, 4]))
    assert (shown(boxes[table]), shown(boxes[places])) == ("0:50, 8:12", "1:2, 2:5")


def test_a_call_needs_all_of_its_inputs() -> None:
    op = case(lambda x: torch.topk(x, 2).values, (3, 5)).op("aten.topk")
    assert propagate(op, block([0, 0], [1, 1])) == {op.inputs[0]: full_tile(op.inputs[0])}


def test_boxes_of_several_readers_are_joined() -> None:
    one, other, none = block([2, 0], [2, 8]), block([3, 4], [4, 8]), block([7, 7], [0, 1])
    assert shown(join(one, other)) == "2:7, 0:12"
    assert join(None, one) is join(none, one) is join(one, none) is one
    assert Span(dims.integer(4), dims.integer(3)).size is dims.ZERO


def test_a_tile_of_another_rank_is_refused() -> None:
    (op,) = case(lambda x: x.exp(), (3, 5)).cover.graph.ops
    with pytest.raises(VerifyError, match="a tile of 1 dims"):
        propagate(op, block([0], [1]))


# --- against the interpreter -----------------------------------------------------


@functools.cache
def ops() -> tuple[Op, ...]:
    """Ops of the corpus that the interpreter evaluates point by point."""
    found = [op for c in CASES for op in capture(c, False).ops if op.expr is not None and op.inputs]
    return tuple(op for op in found if read_by(op, full_tile(op.outputs[0])))


def read_by(op: Op, tile: Tile) -> list[tuple[Value, Index]]:
    """The elements that the interpreter asks for to compute a tile; none if it refuses."""
    asked: list[tuple[Value, Index]] = []

    def read(v: Value, index: Index) -> Array:
        asked.append((v, index))
        return np.zeros(np.broadcast_shapes(*(i.shape for i in index)), STORAGE[v.dtype.name])

    ends = [(dims.static(s.low), dims.static(s.high)) for s in tile]
    places = np.meshgrid(*(np.arange(low, high) for low, high in ends), indexing="ij")
    try:
        Points(Graph(op.inputs, (op,), op.outputs), read).at(op.outputs[0], tuple(places))
    except UnsupportedError:
        return []
    return asked


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_element_that_is_read_is_in_the_box(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(ops()), label="op")
    spans: list[Span] = []
    for n in op.outputs[0].shape:
        extent = dims.static(n)
        assert extent is not None
        low = data.draw(st.integers(0, extent - 1))
        high = data.draw(st.integers(low + 1, extent))
        spans.append(Span(dims.integer(low), dims.integer(high)))
    boxes = propagate(op, tuple(spans))
    for v, index in read_by(op, tuple(spans)):
        index = np.broadcast_arrays(*index)
        inside = np.logical_and.reduce(
            [(i >= 0) & (i < dims.static(n)) for i, n in zip(index, v.shape, strict=True)], initial=True
        )
        for i, s in zip(index, boxes[v], strict=True):
            low, high = dims.static(s.low), dims.static(s.high)
            assert low is not None and high is not None
            assert ((low <= i[inside]) & (i[inside] < high)).all(), f"{op.name}: {boxes[v]}"
