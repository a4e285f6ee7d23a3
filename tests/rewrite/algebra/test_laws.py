"""Algebraic rules: each is proved on random programs by the exact oracle; where it must not apply, it does not, and
what is NaN or infinite stays so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.rewrite.algebra.algebra_cases import (
    CASES,
    RULE,
    Net,
    after,
    agree,
    build,
    keeps_what_is_not_finite,
    special_inputs,
)

from tilewright.interp import run_graph
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import DType, bf16, f16, f32
from tilewright.ir.expr import Expr, call, cast, const, symbol
from tilewright.ir.graph import Graph, Value
from tilewright.ir.ops import norm, pointwise, reduce
from tilewright.ir.ops.common import pointwise as each
from tilewright.ir.sizes import dims
from tilewright.rewrite.algebra.laws import RULES

PAIRS = [(rule, case) for rule, cases in CASES.items() for case in cases]


def test_every_rule_has_cases_a_law_and_a_condition():
    assert set(CASES) == {rule.name for rule in RULES} and len(RULE) == len(RULES)
    assert all(rule.law and rule.condition for rule in RULES)
    assert {rule.proof for rule in RULES} == {"ring", "field", "exp", "order", "real only"}


@pytest.mark.parametrize(("rule", "case"), PAIRS)
def test_rules_hold_exactly(rule: str, case: str):
    applied = 0
    for seed in range(4):
        graph = build(CASES[rule][case], seed)
        for k, new in enumerate(after(graph, rule)):
            applied += 1
            assert agree(graph, new, 10 * seed + k), f"{graph.show()}\n{new.show()}"
    assert applied


# --- what is no law ------------------------------------------------------------


def square(make: Callable[[Net], Value]) -> Graph:
    """A program over square matrices, so that a factor along the wrong dim fits in shape."""
    net = Net()
    net.m = net.n = net.k = 4
    return net.done(make(net))


def test_a_divisor_along_the_axis_of_the_sum_stays():
    """Figure 9 of FlashTensor: (a) is refused, and would be wrong; (b) is applied."""
    inside = square(lambda t: t.matmul(t.over(t.a(), t.at_least_one(1, 4)), t.bb()))
    outside = square(
        lambda t: (lambda a, d, b: t.over(t.matmul(a, b), d))(t.a(), t.at_least_one(1, 4), t.bb())
    )
    assert not after(inside, "factor leaves sum") and not agree(inside, outside)
    inside = square(lambda t: t.matmul(t.over(t.a(), t.at_least_one(4, 1)), t.bb()))
    outside = square(
        lambda t: (lambda a, d, b: t.over(t.matmul(a, b), d))(t.a(), t.at_least_one(4, 1), t.bb())
    )
    (applied,) = after(inside, "factor leaves sum")
    assert agree(inside, applied) and agree(inside, outside)


def masked_sum(t: Net, count: bool) -> Value:
    """sum of where(keep, x, 0), plus t times the number of elements that are kept, or of all."""
    x, row = t.positive(t.a()), t.positive(t.input(4, 1))
    keep = each(t.b, "gt", lambda e: call("gt", e, const(0, e.dtype)), t.input(4, 4))

    def admit(e: Expr, c: Expr) -> Expr:
        return call("where", c, e, const(0, f32))

    total = reduce.sum_(t.b, each(t.b, "masked", admit, x, keep), [1], True)
    ones = each(t.b, "ones", lambda c: call("where", c, const(1, f32), const(0, f32)), keep)
    n = reduce.sum_(t.b, ones, [1], True) if count else t.scaled(t.scaled(row, 0.0), 0.0)
    times = t.times(n, row) if count else t.scaled(row, 4.0)
    return t.plus(total, times)


def test_a_term_leaves_as_often_as_the_mask_admits_it():
    def inside(t: Net) -> Value:
        x, row = t.positive(t.a()), t.positive(t.input(4, 1))
        keep = each(t.b, "gt", lambda e: call("gt", e, const(0, e.dtype)), t.input(4, 4))
        both = each(t.b, "masked", lambda e, c: call("where", c, e, const(0, f32)), t.plus(x, row), keep)
        return reduce.sum_(t.b, both, [1], True)

    graph = square(inside)
    assert agree(graph, square(lambda t: masked_sum(t, True)))
    assert not agree(graph, square(lambda t: masked_sum(t, False)))
    assert all(agree(graph, new) for new in after(graph, "term leaves sum"))


def softmax_without_maximum(t: Net, half: bool) -> Value:
    e = pointwise.exp(t.b, t.a())
    p = t.over(e, reduce.sum_(t.b, e, [1], True))
    return t.matmul(pointwise.to(t.b, p, f16), t.input(t.k, t.n, dtype=f16)) if half else t.matmul(p, t.bb())


def normalised_by_its_sum(t: Net, least: float | None) -> Value:
    x = t.a()
    total = reduce.sum_(t.b, pointwise.abs_(t.b, x), [1], True)
    if least is not None:
        total = each(t.b, "clamp", lambda e: call("maximum", e, const(least, e.dtype)), total)
    return t.matmul(t.over(x, total), t.bb())


def _kept(t: Net, x: Value, otherwise: float) -> Value:
    keep = each(t.b, "gt", lambda e: call("gt", e, const(0, f32)), t.input(t.m, t.k))
    return each(t.b, "where", lambda e, c: call("where", c, e, const(otherwise, f32)), x, keep)


REFUSED: dict[str, tuple[str, float | None, Callable[[Net], Value]]] = {
    "the exponent is not bounded, so half precision overflows": (
        "factor leaves sum of rounded", None, lambda t: softmax_without_maximum(t, True)),
    "the sum of exponentials may be 0": ("factor leaves sum", None, lambda t: softmax_without_maximum(t, False)),
    "a divisor that may be 0": ("factor leaves sum", 8.0, lambda t: normalised_by_its_sum(t, None)),
    "a factor that may be infinite": (
        "factor leaves sum", None, lambda t: t.matmul(t.times(t.a(), t.input(t.m, 1)), t.bb())),
    "the sum without the factor may overflow": (
        "factor leaves sum", None, lambda t: t.matmul(t.times(t.a(), t.positive(t.input(t.m, 1))), t.bb())),
    "a factor that is not positive": (
        "factor leaves maximum", 8.0, lambda t: reduce.amax(t.b, t.times(t.a(), t.input(t.m, 1)), [1])),
    "a negative constant": ("factor leaves maximum", 8.0, lambda t: reduce.amax(t.b, t.scaled(t.a(), -0.3), [1])),
    "a term that may be infinite": (
        "term leaves maximum", None, lambda t: reduce.amax(t.b, t.plus(t.a(), t.input(t.m, 1)), [1])),
    "a factor that may be NaN, under a mask that may admit nothing": (
        "factor leaves sum", 8.0, lambda t: reduce.sum_(t.b, _kept(t, t.times(t.a(), t.input(t.m, 1)), 0.0), [1])),
    "a term that may be NaN, under a mask that may admit nothing": (
        "term leaves maximum", 8.0,
        lambda t: reduce.amax(t.b, _kept(t, t.plus(t.a(), t.input(t.m, 1)), -np.inf), [1])),
    "a factor that may be NaN, into a masked sum": (
        "factor enters sum", 8.0,
        lambda t: t.times(reduce.sum_(t.b, _kept(t, t.times(t.a(), t.a()), 0.0), [1], True), t.input(t.m, 1))),
    "a product with what may be infinite": (
        "sum splits", None, lambda t: t.matmul(t.plus(t.positive(t.a()), t.positive(t.input(1, t.k))),
                                               pointwise.abs_(t.b, t.bb()))),
    "a maximum of masked elements that are 0": (
        "term leaves maximum", 8.0,
        lambda t: reduce.amax(t.b, each(t.b, "masked", lambda x, y: call("where", call("gt", x, const(0, f32)),
                              call("add", x, y), const(0, f32)), t.a(), t.input(t.m, 1)), [1])),
    "a comparison of floats, of which one may be NaN": (
        "comparison leaves any", 8.0,
        lambda t: reduce.any_(t.b, each(t.b, "ge", lambda x, y: call("ge", x, y), t.a(), t.input(t.m, 1)), [1])),
    "a function that is not defined everywhere": (
        "function leaves maximum", 8.0, lambda t: reduce.amax(t.b, pointwise.log(t.b, t.a()), [1])),
    "a function whose elements are read elsewhere": (
        "function leaves maximum", 8.0,
        lambda t: (lambda x: t.times(x, reduce.amax(t.b, x, [1], True)))(pointwise.tanh(t.b, t.a()))),
    "terms that may cancel": ("term leaves sum", 8.0,
                              lambda t: reduce.sum_(t.b, t.plus(t.a(), t.input(t.m, 1)), [1])),
    "products that may cancel": ("sum splits", 8.0, lambda t: t.matmul(t.plus(t.a(), t.input(1, t.k)), t.bb())),
    "a factor that may be infinite on the way in": (
        "factor enters sum", None, lambda t: t.times(t.matmul(t.a(), t.bb()), t.input(t.m, 1))),
    "an operand that would overflow": ("factor enters sum", None, lambda t: t.scaled(t.matmul(t.a(), t.bb()), 300.0)),
    "two sums times what may be infinite": (
        "sums join", None, lambda t: (lambda w: t.plus(t.matmul(t.a(), w), t.matmul(t.a(), w)))(t.bb())),
    "different factors of the terms": (
        "factor stands in exp", 8.0,
        lambda t: pointwise.exp(t.b, t.plus(t.scaled(t.a(), 0.3), t.scaled(t.a(), 0.4)))),
    "a term without the factor": (
        "factor stands in exp", 8.0, lambda t: pointwise.exp(t.b, t.plus(t.scaled(t.a(), 0.3), t.a()))),
    "a mask that is not infinite": (
        "factor leaves maximum", 8.0,
        lambda t: reduce.amax(t.b, each(t.b, "masked", lambda x: call("where", call("gt", x, const(0, f32)),
                              call("mul", x, const(0.001, f32)), const(-3e38, f32)), t.a()), [1])),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_rules_are_refused(reason: str):
    rule, limit, make = REFUSED[reason]
    net = Net()
    net.m = net.n = net.k = 4
    assert not after(net.done(make(net)), rule, limit)


def test_the_same_programs_with_what_was_missing():
    """The conditions above are what decides: with it the rule applies."""
    for rule, limit, make in (
        ("factor leaves sum", 8.0, lambda t: t.matmul(t.times(t.a(), t.input(t.m, 1)), t.bb())),
        ("factor leaves sum", 8.0, lambda t: normalised_by_its_sum(t, 1e-6)),
        ("factor leaves sum", None, lambda t: normalised_by_its_sum(t, 1.0)),
        ("term leaves maximum", 8.0, lambda t: reduce.amax(t.b, t.plus(t.a(), t.input(t.m, 1)), [1])),
        ("factor enters sum", 8.0, lambda t: t.scaled(t.matmul(t.a(), t.bb()), 300.0)),
    ):
        net = Net(dtype=f16 if limit is None else f32)
        graph = net.done(make(net))
        found = after(graph, rule, limit)
        assert found and all(agree(graph, new) for new in found)


def test_rounding_of_intermediates_is_kept_if_it_is_asked_for():
    graph = build(CASES["factor leaves sum of rounded"]["softmax"])
    assert after(graph, "factor leaves sum of rounded")
    assert not after(graph, "factor leaves sum of rounded", round_intermediates=True)


def test_reductions_over_nothing_are_left_alone():
    """The sum over no elements is 0, also of what is divided by 0 elements."""
    b = Builder()
    x = b.value((dims.integer(3), symbol("n")), f32)
    graph = b.finish(
        [x], [reduce.sum_(b, each(b, "scale", lambda e: call("mul", e, const(0.3, f32)), x), [1])]
    )
    assert not after(graph, "factor leaves sum")
    b = Builder()
    x = b.value((dims.integer(3), symbol("n", 1)), f32)
    graph = b.finish(
        [x], [reduce.sum_(b, each(b, "scale", lambda e: call("mul", e, const(0.3, f32)), x), [1])]
    )
    assert after(graph, "factor leaves sum")


def test_statistics_of_norms_leave_products():
    """The deferred scale of RMSNorm and LayerNorm, where inputs are trusted not to be huge. In half precision the
    normalised row is rounded, and without its scale it may overflow."""
    for dtype, make in ((f32, norm.rms_norm), (f32, norm.layer_norm), (f16, norm.rms_norm)):
        net = Net(dtype=dtype)
        net.k = 4
        weight = net.input(4)
        x = make(net.b, net.a(), 1, weight, *([] if make is norm.rms_norm else [None]), 1e-5)[0]  # type: ignore[operator]
        graph = net.done(net.matmul(x, net.bb()))
        found = after(graph, "factor leaves sum", 1e4)
        assert bool(found) is (dtype is f32) and all(agree(graph, new) for new in found)
        assert not after(graph, "factor leaves sum", None) and not after(
            graph, "factor leaves sum of rounded", None
        )


# --- NaN and infinities ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
@pytest.mark.parametrize("rule", CASES)
def test_what_is_not_finite_stays_so(rule: str, dtype: DType):
    """Whatever the inputs are: nothing is trusted here."""
    for case in CASES[rule].values():
        for seed in range(3):
            try:
                graph = build(case, seed, dtype)
            except ValueError:  # a case that mixes its own types
                continue
            for new in after(graph, rule, limit=None):
                for k in range(12):
                    inputs = special_inputs(graph, 100 * seed + k)
                    assert keeps_what_is_not_finite(graph, new, inputs), f"{graph.show()}\n{new.show()}"


def test_a_mistake_would_show():
    """The same check finds a factor that leaves although it may be infinite."""
    before = square(lambda t: t.matmul(t.times(t.a(), t.input(4, 1)), t.bb()))
    after_ = square(lambda t: (lambda a, d, b: t.times(t.matmul(a, b), d))(t.a(), t.input(4, 1), t.bb()))
    assert not all(keeps_what_is_not_finite(before, after_, special_inputs(before, k)) for k in range(60))


def test_rows_that_see_nothing_stay_nan():
    net = Net()
    net.m = net.n = net.k = 4
    scores = net.input(4, 4)
    p = norm.softmax(net.b, net.scaled(scores, 1.7, "div"), -1)
    graph = net.done(net.matmul(p, net.input(4, 4)))
    rng = np.random.default_rng(0)
    s = rng.normal(size=(4, 4)).astype(np.float32)
    s[1], s[2, :3] = -np.inf, -np.inf
    inputs = [s, rng.normal(size=(4, 4)).astype(np.float32)]
    (want,) = run_graph(graph, inputs)
    assert isinstance(want, np.ndarray) and np.isnan(want[1]).all() and np.isfinite(want[[0, 2, 3]]).all()
    for rule in RULES:
        for new in after(graph, rule, limit=None):
            (got,) = run_graph(new, inputs)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize(("limit", "fits"), [(None, False), (12.0, False), (11.0, True)])
def test_casts_to_half_hold_what_they_must(limit: float | None, fits: bool):
    """A rule passes a rounding only if what is left fits: exp(11.09) is the largest half number."""
    net = Net(dtype=f16)
    e = each(net.b, "exp", lambda v: call("exp", cast(v, f32)), net.a())
    total = each(net.b, "some", lambda v: call("maximum", v, const(1, f32)), reduce.sum_(net.b, e, [1], True))
    p = pointwise.to(net.b, net.over(e, total), f16)
    graph = net.done(net.matmul(p, net.bb()))
    assert bool(after(graph, "factor leaves sum of rounded", limit)) is fits
