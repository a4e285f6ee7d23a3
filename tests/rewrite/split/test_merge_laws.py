"""What the parts of a reduction leave, merged, is the reduction of all: for each state, with short and empty parts."""

from __future__ import annotations

import numpy as np
import pytest

from tilewright.interp.graph import run_graph
from tilewright.ir.dtype import bool_, f32, f64, i64
from tilewright.ir.expr import Axis, Expr, axis, const, read, substitute
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.reduction import (
    Reduction,
    all_,
    any_,
    argmax,
    argmin,
    logsumexp,
    maximum,
    minimum,
    moments,
    product,
    sum_,
)
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr
from tilewright.rewrite.split.merge_laws import (
    IN_WIDE_PARTS,
    SINGLES,
    MergeLaw,
    has_neutral,
    law_of,
    means_of_parts,
    moments_of_parts,
    of_states,
)
from tilewright.rewrite.split.parts import Cut, ReductionParts, split_reduction

ROWS, COUNT = 3, 4
SIMPLE = [sum_(f32), product(f32), maximum(f32), minimum(i64), any_(), all_(), argmax(f32), argmin(i64)]


def reduced(reduction: Reduction, x: np.ndarray, law: MergeLaw | None) -> list[np.ndarray]:
    """Each row of `x`, as a whole or in COUNT parts by a law."""
    whole = Axis("r", dims.integer(x.shape[1]))
    v = Value(0, tuple(map(dims.integer, x.shape)), reduction.elements[0])
    kept = (Axis("i", v.shape[0]),)
    element: list[Expr] = [read(0, (axis(kept[0]), axis(whole)), v.dtype), axis(whole)]
    body = element[: len(reduction.elements)]
    made = tuple(Value(1 + k, v.shape[:1], t) for k, t in enumerate(reduction.results))
    if law is None:
        ops = [Op("whole", (v,), made, expr=TensorExpr(kept, tuple(body), (whole,), reduction))]
    else:
        cut = Cut.into(whole, COUNT)
        assert cut.part is not None and cut.element is not None
        parts = ReductionParts(kept, (cut.part,), (cut.element,), cut.inside)
        body = [substitute(b, {axis(whole): cut.place}) for b in body]
        part, merge = split_reduction(body, parts, law)
        left = parts.values(10, part.dtypes)
        ops = [Op("part", (v,), left, expr=part), Op("merge", left, made, expr=merge)]
    graph = Graph((v,), tuple(ops), made)
    graph.verify()
    return [np.asarray(y) for y in run_graph(graph, [x])]


@pytest.mark.parametrize("extent", [5, 12, 13])
@pytest.mark.parametrize("reduction", SIMPLE, ids=lambda r: r.name)
def test_states_merge_by_the_reduction_itself(reduction: Reduction, extent: int) -> None:
    """5 elements in 4 parts of 2: the third has one, the last none."""
    x = np.random.default_rng(extent).integers(-3, 4, (ROWS, extent))
    typed = x.astype({f32: np.float32, i64: np.int64, bool_: np.bool_}[reduction.elements[0]])
    whole = reduced(reduction, typed, None)
    for a, b in zip(whole, reduced(reduction, typed, law_of(reduction)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert has_neutral(reduction) and of_states(reduction) == reduction


def test_what_cancels_between_parts_is_left_in_doubles() -> None:
    x = np.asarray([[1e8, 1.0, 3.0, 1.0, -1e8, 1.0, 1.0]] * ROWS, np.float32)
    (plain,) = reduced(SINGLES, x, law_of(SINGLES))
    (wide,) = reduced(SINGLES, x, IN_WIDE_PARTS)
    assert wide.dtype == np.float32 and (wide == 7).all() and (plain != 7).all()


def test_an_element_that_is_no_state_is_not_neutral() -> None:
    assert not has_neutral(logsumexp(f32)) and not has_neutral(moments(f32))


def test_moments_of_parts_are_those_of_all() -> None:
    """By the mean or by the sum: both merge by Chan, Golub and LeVeque, whatever a part has."""
    x = np.random.default_rng(0).normal(5, 2, 12)
    parts = [x[:0], x[:1], x[1:7], x[7:]]
    for reduction, middle in ((means_of_parts(f64), np.mean), (moments_of_parts(f64), np.sum)):
        state = reduction.identity
        for p in parts:
            spread = float(((p - p.mean()) ** 2).sum()) if p.size else 0.0
            about = float(middle(p)) if p.size else 0.0
            found = (const(float(p.size), f64), const(about, f64), const(spread, f64))
            state = reduction.merged(state, found)
        wanted = [12.0, float(middle(x)), float(((x - x.mean()) ** 2).sum())]
        np.testing.assert_allclose([_number(e) for e in state], wanted, rtol=1e-12)


def _number(e: Expr) -> float:
    """What an expression of constants is."""
    v = Value(0, (), f64)
    return float(
        np.asarray(run_graph(Graph((), (Op("number", (), (v,), expr=TensorExpr((), (e,))),), (v,)), [])[0])
    )
