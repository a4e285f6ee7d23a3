"""Sizes that a program cannot have together: rows of 200 numbers that are 8 planes of s by s."""

from __future__ import annotations

import pytest

from tilewright.analysis.fitting_sizes import fit, fitting
from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import f32
from tilewright.ir.expr import axis, call, const, read, symbol, where
from tilewright.ir.graph import Graph
from tilewright.ir.ops import view
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr, output_axes

N, S = symbol("n", 1), symbol("s", 1)
OWN = SizeHints({"n": 3, "s": 5})


def planes_as_rows() -> Graph:
    """[n, 8, s, s] as [n, 200]."""
    b = Builder()
    x = b.value((N, dims.integer(8), S, S), f32)
    return b.finish((N, S, x), (view.reshape(b, x, (N, dims.integer(200))),))


def padded() -> Graph:
    """[s] as [s + 5], with zeros behind it: it reads inside alone."""
    b = Builder()
    x = b.value((S,), f32)
    axes = output_axes((dims.add(S, dims.integer(5)),))
    (i,) = (axis(a) for a in axes)
    body = where(call("lt", i, S), read(0, (i,), f32), const(0.0, f32))
    return b.finish((S, x), b.emit("pad", (x,), TensorExpr(axes, (body,))))


def test_a_size_that_nothing_ties() -> None:
    for n in (1, 24, 4096):
        assert fit(planes_as_rows(), OWN.also({"n": n}), OWN)


@pytest.mark.parametrize("s", [1, 4])
def test_a_number_of_elements_that_is_known(s: int) -> None:
    wrong, graph = OWN.also({"s": s}), planes_as_rows()
    assert not fit(graph, wrong, OWN)
    assert fitting(graph, OWN.also({"n": 7}), OWN).sizes == {"n": 7, "s": 5}
    assert fitting(graph, wrong, OWN) is OWN


def test_what_a_condition_guards_counts_as_inside() -> None:
    for s in (1, 40):
        assert fit(padded(), OWN.also({"s": s}), OWN)


def test_what_data_choose_between_is_asked_about() -> None:
    """Rows of 200 numbers, or zeros where those say so."""
    b = Builder()
    x = b.value((N, dims.integer(8), S, S), f32)
    axes = output_axes((N, dims.integer(200)))
    place = view.reshape_index(x.shape, (N, dims.integer(200)), [axis(a) for a in axes])
    element = read(0, place, f32)
    body = where(call("lt", element, const(0.0, f32)), const(0.0, f32), element)
    graph = b.finish((N, S, x), b.emit("kept", (x,), TensorExpr(axes, (body,))))
    assert not fit(graph, OWN.also({"s": 4}), OWN) and fit(graph, OWN.also({"n": 4}), OWN)


def test_what_cannot_be_proved_at_the_sizes_of_a_program_says_nothing() -> None:
    short = SizeHints({"n": 3, "s": 4})
    assert fit(planes_as_rows(), OWN.also({"s": 3}), short)
