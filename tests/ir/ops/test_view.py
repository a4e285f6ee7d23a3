"""Index arithmetic of views: groups of dims, and the maps that reshapes, rolls and borders give."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, Expr, axis, integer, symbol, walk
from tilewright.ir.ops import view
from tilewright.ir.sizes import dims


def _sizes(*values: int) -> tuple[Expr, ...]:
    return tuple(integer(v) for v in values)


def _index(shape: tuple[Expr, ...]) -> list[Expr]:
    return [axis(Axis(f"i{k}", s)) for k, s in enumerate(shape)]


def _divisions(index: list[Expr]) -> int:
    return sum(x.op in ("floordiv", "mod") for e in index for x in walk(e))


@st.composite
def _reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    factors = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))

    def grouped() -> tuple[int, ...]:
        out = [1]
        for f in factors:
            if draw(st.booleans()):
                out.append(f)
            else:
                out[-1] *= f
        return tuple(out)

    return grouped(), grouped()


@given(_reshapes())
def test_reshape_reads_in_row_major_order(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    source, shape = shapes
    index = view.reshape_index(_sizes(*source), _sizes(*shape), _index(_sizes(*shape)))
    strides = [int(dims.static(s) or 0) for s in dims.dense_strides(_sizes(*source))]
    for flat, place in enumerate(itertools.product(*map(range, shape))):
        values = {f"i{k}": v for k, v in enumerate(place)}
        read = [dims.evaluate(e, values) for e in index]
        assert sum(r * s for r, s in zip(read, strides, strict=True)) == flat


@pytest.mark.parametrize(
    ("source", "shape", "divisions"),
    [
        ((2, 3, 4), (2, 3, 4), 0),
        ((2, 3, 4), (2, 12), 2),
        ((2, 12), (2, 3, 4), 0),
        ((6, 1, 4), (6, 4), 0),
        ((8, 12, 5), (96, 5), 2),
        ((4, 15), (10, 6), 2),
    ],
)
def test_divisions_stand_only_where_a_dim_is_split(
    source: tuple[int, ...], shape: tuple[int, ...], divisions: int
) -> None:
    index = view.reshape_index(_sizes(*source), _sizes(*shape), _index(_sizes(*shape)))
    assert _divisions(index) == divisions


def test_symbolic_heads_split_without_division() -> None:
    b, s = symbol("b", 2), symbol("s", 2)
    target = (b, s, *_sizes(12, 64))
    index = view.reshape_index((b, s, integer(768)), target, _index(target))
    assert _divisions(index) == 0
    flat = (dims.mul(b, s), integer(768))
    index = view.reshape_index((b, s, integer(768)), flat, _index(flat))
    assert [repr(e) for e in index] == ["(i0 // s)", "(i0 % s)", "i1"]


def test_inferred_size() -> None:
    b, s = symbol("b", 2), symbol("s", 2)
    shape = view.inferred((b, s, integer(12)), (integer(-1), integer(4), integer(3)))
    assert dims.equal(shape[0], dims.mul(b, s))


@given(st.integers(1, 9), st.integers(-9, 18))
def test_mirrored_places(size: int, place: int) -> None:
    if -size < place < 2 * size - 1:
        want = abs(place) if place < size else 2 * (size - 1) - place
        assert dims.evaluate(view.reflected(integer(place), integer(size)), {}) == want
    want = min(max(place, 0), size - 1)
    assert dims.evaluate(view.replicated(integer(place), integer(size)), {}) == want


@given(st.integers(0, 7), st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3))
def test_slice_borders(size: int, start: int, stop: int, step: int) -> None:
    first, length = view.slice_borders(integer(size), integer(start), integer(stop), step)
    want = range(size)[start:stop:step]
    assert dims.static(length) == len(want)
    if want:
        assert dims.static(first) == want[0]


def test_pad_without_amount_needs_no_condition() -> None:
    b = Builder()
    x = b.value(_sizes(2, 3), f32)
    out = view.pad(b, x, _sizes(0, 0), _sizes(0, 0), integer(0))
    assert b.ops[-1].expr is not None and b.ops[-1].expr.is_view() and out.shape == x.shape


def test_wrong_dims_are_refused() -> None:
    b = Builder()
    with pytest.raises(ValueError, match="rank"):
        view.unsqueeze(b, b.value(_sizes(2), f32), 4)
