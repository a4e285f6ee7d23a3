"""Index-set splitting against enumeration, trimming, and what stays whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.analysis.loop_segments import split_range
from tilewright.analysis.predicate import constant_under, decide, is_neutral, threshold
from tilewright.ir.dtype import f32
from tilewright.ir.expr import Axis, Expr, axis, call, const, read, where
from tilewright.ir.form import Item
from tilewright.ir.reduction import maximum, sum_
from tilewright.ir.sizes import dims

J = Axis("c1", dims.integer(40))
I = Axis("c0", dims.integer(40))  # noqa: E741
X = read(0, [axis(J)], f32)
MINUS = const(float("-inf"), f32)


@given(
    st.sampled_from(["lt", "le", "gt", "ge"]),
    st.sampled_from([1, -1]),
    st.integers(-50, 50),
    st.integers(0, 39),
)
def test_threshold_agrees_with_enumeration(op: str, sign: int, offset: int, i: int) -> None:
    left = dims.add(dims.mul(axis(J), dims.integer(sign)), dims.integer(offset))
    found = threshold(call(op, left, axis(I)), J, frozenset({I}))
    assert found is not None
    at = dims.evaluate(found.at, {"c0": i})
    for j in range(40):
        a = sign * j + offset
        holds = {"lt": a < i, "le": a <= i, "gt": a > i, "ge": a >= i}[op]
        assert holds == ((j >= at) == found.rising)


def test_threshold_refuses_data_and_unbound_classes() -> None:
    assert threshold(call("lt", axis(J), axis(I)), J, frozenset()) is None
    data = read(0, [axis(I)], dims.ONE.dtype)
    assert threshold(call("lt", axis(J), data), J, frozenset({I})) is None
    assert threshold(call("lt", dims.mul(axis(J), dims.integer(2)), axis(I)), J, frozenset({I})) is None


def pieces(condition: Expr, folds: list[Item], tile: int) -> list[tuple[int, int, tuple[bool, ...]]]:
    body = where(condition, X, MINUS)
    made = split_range(J, (dims.ZERO, J.extent), tile, [body], frozenset({I}), folds, (), {})
    value = {"c0": 25}
    return [
        (dims.evaluate(p.start, value), dims.evaluate(p.stop, value), tuple(p.truths.values())) for p in made
    ]


def fold(body: Expr) -> Item:
    return Item(0, (I,), (body,), (J,), maximum(f32))


def test_causal_mask_trims_a_maximum() -> None:
    mask = call("le", axis(J), axis(I))
    assert pieces(mask, [fold(where(mask, X, MINUS))], 1) == [(0, 26, (True,))]


def test_what_is_left_out_is_stored_for_later_passes() -> None:
    """Where it is constant; otherwise nothing is left out."""
    mask = call("le", axis(J), axis(I))
    e = call("exp", where(mask, X, MINUS))
    total = Item(0, (I,), (e,), (J,), sum_(f32))

    def made(kept: Expr) -> list[tuple[int, int, bool]]:
        found = split_range(J, (dims.ZERO, J.extent), 1, [e], frozenset({I}), [total], [kept], {})
        ends = [[dims.evaluate(x, {"c0": 25}) for x in (p.start, p.stop)] for p in found]
        return [(low, high, p.left_out) for (low, high), p in zip(ends, found, strict=True)]

    assert made(e) == [(0, 26, False), (26, 40, True)]
    assert made(call("exp", X)) == [(0, 40, False)]


def test_window_mask_trims_both_sides() -> None:
    window = call(
        "and", call("le", axis(J), axis(I)), call("gt", axis(J), dims.sub(axis(I), dims.integer(8)))
    )
    assert pieces(window, [fold(where(window, X, MINUS))], 1) == [(18, 26, (True, True))]


def test_scalar_loop_without_a_neutral_part_stays_whole() -> None:
    mask = call("le", axis(J), axis(I))
    assert pieces(mask, [fold(where(mask, X, const(1.0, f32)))], 1) == [(0, 40, ())]


def test_lanes_are_cut_at_a_seam() -> None:
    seam = call("lt", axis(J), dims.integer(13))
    assert pieces(seam, [], 16) == [(0, 13, (True,)), (13, 40, (False,))]


def test_conjuncts_are_decided_one_by_one() -> None:
    causal, data = call("le", axis(J), axis(I)), call("gt", read(1, [axis(J)], f32), const(0.0, f32))
    both = call("and", causal, data)
    assert decide(both, {causal: True}) is data
    assert decide(both, {causal: False}).value is False
    assert decide(call("not", causal), {causal: True}).value is False


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (call("exp", call("sub", MINUS, X)), 0.0),
        (call("mul", const(0.0, f32), X), 0.0),
        (call("mul", const(0.0, f32), MINUS), None),
        (call("mul", call("exp", call("sub", MINUS, X)), call("sub", MINUS, X)), None),
        (call("add", MINUS, X), float("-inf")),
        (call("div", const(0.0, f32), X), 0.0),
        (call("sub", X, X), None),
    ],
)
def test_constants_under_assumptions(body: Expr, value: float | None) -> None:
    assert constant_under(body, {}) == value


def test_a_sum_of_masked_exponentials_is_neutral_only_where_masked() -> None:
    mask = call("le", axis(J), axis(I))
    body = call("exp", call("sub", where(mask, X, MINUS), const(1.0, f32)))
    item = Item(0, (I,), (body,), (J,), sum_(f32))
    assert is_neutral(item, {mask: False}) and not is_neutral(item, {mask: True}) and not is_neutral(item, {})
