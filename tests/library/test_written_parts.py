"""Which choices are boxes of new elements, and what becomes of the graphs that write them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tilewright.interp import run_graph
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, Expr, axis, call, integer, symbol
from tilewright.ir.graph import Value, Write
from tilewright.ir.ops.common import access
from tilewright.ir.ops.view import narrow_dim, select, select_scatter, slice_, slice_scatter
from tilewright.ir.sizes import dims
from tilewright.library.written.parts import box_of, with_written_parts
from tilewright.rewrite.normal.normalise import normalise

A, B = Axis("i0", integer(10)), Axis("i1", integer(6))
i, j = axis(A), axis(B)
AT = symbol("s", 2, 7)


def both(*conditions: Expr) -> Expr:
    total = conditions[0]
    for c in conditions[1:]:
        total = call("and", total, c)
    return total


BOXES: dict[str, tuple[Expr, tuple[tuple[object, object], ...] | None]] = {
    "one place": (call("eq", i, integer(3)), ((3, 1), (0, 6))),
    "a free place": (call("eq", i, AT), ((AT, 1), (0, 6))),
    "a range": (both(call("ge", i, integer(2)), call("lt", dims.sub(i, integer(2)), integer(5))), ((2, 5), (0, 6))),
    "the end": (call("gt", j, integer(3)), ((0, 10), (4, 2))),
    "the beginning": (call("le", j, integer(3)), ((0, 10), (0, 4))),
    "turned around": (call("gt", integer(4), i), ((0, 4), (0, 6))),
    "both dims": (both(call("eq", i, integer(3)), call("lt", j, integer(2))), ((3, 1), (0, 2))),
    "a diagonal": (call("eq", i, j), None),
    "outside": (call("eq", i, integer(10)), None),
    "perhaps outside": (call("eq", i, symbol("t")), None),
    "every second one": (call("eq", dims.mod(i, integer(2)), dims.ZERO), None),
    "two bounds on one side": (both(call("lt", i, integer(3)), call("lt", i, integer(5))), None),
    "all but one": (call("ne", i, integer(3)), None),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BOXES))
def test_what_is_a_box(name: str) -> None:
    condition, want = BOXES[name]
    box = box_of(condition, (A, B))
    if want is None or box is None:
        assert box is None and want is None
        return
    exprs = [tuple(integer(x) if isinstance(x, int) else x for x in pair) for pair in want]
    assert list(zip(box.starts, box.sizes, strict=True)) == exprs


def a_part_of_a_row(b: Builder, x: Value, y: Value) -> Value:
    """x[3, 1:4] = y[:3]"""
    new = narrow_dim(b, y, 0, dims.ZERO, integer(3))
    row = slice_scatter(b, select(b, x, 0, integer(3)), new, 0, integer(1), integer(4))
    return select_scatter(b, x, row, 0, integer(3))


def two_parts(b: Builder, x: Value, y: Value) -> Value:
    """x[3] = y; x[:, 4:] = x[:, :2]"""
    once = select_scatter(b, x, y, 0, integer(3))
    return slice_scatter(b, once, slice_(b, once, 1, None, integer(2)), 1, integer(4), None)


def a_step(b: Builder, x: Value, y: Value) -> Value:
    """x[:, ::2] = y[:3]"""
    return slice_scatter(b, x, expanded(b, y), 1, None, None, 2)


def expanded(b: Builder, y: Value) -> Value:
    """y[:3] in each of ten rows."""
    return access(b, "expand", y, (integer(10), integer(3)), lambda at: [at[1]])


GRAPHS = {"a part of a row": (a_part_of_a_row, 1), "two parts": (two_parts, 2), "a step": (a_step, 0)}


@pytest.mark.parametrize("name", list(GRAPHS))
def test_parts_mean_the_same(name: str) -> None:
    make, count = GRAPHS[name]
    b = Builder()
    x, y = b.value((integer(10), integer(6)), f32), b.value((integer(6),), f32)
    new = make(b, x, y)
    graph = normalise(replace(b.finish((x, y), (new,)), writes=(Write(0, new),)))
    parts = with_written_parts(graph)
    parts.verify()
    assert sum(op.call is not None and op.call.part is not None for op in parts.ops) == count
    given = [np.random.default_rng(0).standard_normal(s).astype(np.float32) for s in ((10, 6), (6,))]
    np.testing.assert_array_equal(run_graph(parts, given)[0], run_graph(graph, given)[0])
