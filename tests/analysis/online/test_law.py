"""The online law: ranks and refusals of known programs, rescales proved on random instances by the exact oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tilewright.analysis.online.law import Law, Refusal, derive
from tilewright.analysis.online.running import Upstream
from tilewright.interp import EXACT, FLOATS, equal, exact_random
from tilewright.interp.evaluate import Evaluator
from tilewright.ir.dtype import f32, i64
from tilewright.ir.expr import Axis, Expr, Slot, axis, call, cast, const, leaves, make, read, slot, where
from tilewright.ir.reduction import Reduction, all_, any_, argmax, maximum, product, sum_
from tilewright.ir.sizes import dims

N = 8
J = Axis("j", dims.integer(N))
C, V, W, D = (read(k, (axis(J),), f32) for k in range(4))
MASK = call("gt", read(4, (axis(J),), f32), const(0, f32))
SINK = read(5, (), f32)


def value(number: int) -> Expr:
    return make("value", (), f32, (number, 0))


M, L, S, T, Q = (value(k) for k in range(5))
"""Results that bodies read: a maximum, the sum of exponentials, a sum, a sum of squares, another sum."""
MEAN = call("div", S, const(N, f32))
U, X = call("sub", C, M), call("sub", C, MEAN)
E = call("exp", U)
UP = (
    Upstream(M, maximum(f32), (C,)),
    Upstream(L, sum_(f32), (E,)),
    Upstream(S, sum_(f32), (C,)),
    Upstream(T, sum_(f32), (call("mul", X, X),)),
    Upstream(Q, sum_(f32), (call("mul", C, C),)),
)


def mul(*factors: Expr) -> Expr:
    first, *rest = factors
    for f in rest:
        first = call("mul", first, f)
    return first


def num(x: float) -> Expr:
    return const(x, f32)


def law(body: Expr, reduction: Reduction | None = None) -> Law | Refusal:
    return derive(reduction or sum_(body.dtype), (body,), UP, (J,))


P = call("div", E, L)
LOG_P = call("sub", U, call("log", L))
GUARDED = where(call("eq", call("abs", M), num(float("inf"))), num(0), M)
FLOORED = call("maximum", M, num(0))
SUNK = call("maximum", M, SINK)
DEVIATION = call("rsqrt", call("add", mul(T, num(1 / N)), num(1e-5)))

FINITE: dict[str, tuple[Expr, int]] = {
    "softmax denominator": (E, 1),
    "guarded logsumexp": (call("exp", call("sub", C, GUARDED)), 1),
    "temperature": (call("exp", call("div", U, num(1.5))), 1),
    "base two, folded scale": (call("exp2", call("sub", mul(C, num(0.125)), mul(M, num(0.125)))), 1),
    "softmax times values": (mul(P, V), 1),
    "through a cast": (mul(cast(cast(P, f32), f32), V), 1),
    "log softmax inside": (mul(call("exp", LOG_P), V), 1),
    "softpick numerator": (
        call(
            "maximum",
            call("sub", call("exp", call("sub", C, FLOORED)), call("exp", call("neg", FLOORED))),
            num(0),
        ),
        1,
    ),
    "softpick denominator": (
        call("abs", call("sub", call("exp", call("sub", C, FLOORED)), call("exp", call("neg", FLOORED)))),
        1,
    ),
    "sink logit": (call("exp", call("sub", C, SUNK)), 1),
    "squares of exponentials": (mul(E, E), 1),
    "two rates": (call("add", E, mul(E, E)), 2),
    "variance": (mul(X, X), 3),
    "variance as a power": (call("pow", X, num(2)), 3),
    "skewness": (mul(X, X, X), 4),
    "entropy, unnormalised": (mul(U, E), 2),
    "entropy": (mul(P, LOG_P), 2),
    "relative entropy": (mul(P, call("sub", LOG_P, V)), 2),
    "expected score": (mul(P, U), 2),
    "norm then product": (mul(C, W, call("rsqrt", Q)), 1),
    "scale from the largest": (mul(call("div", C, M), W), 1),
    "layer norm then product": (mul(X, DEVIATION, W), 2),
    "layer norm then product, expanded": (call("sub", mul(C, W), mul(MEAN, W)), 2),
    "softmax backward": (mul(P, call("sub", D, S), V), 2),
    "masked": (where(MASK, mul(U, E), num(0)), 2),
    "nothing to follow": (mul(C, W), 1),
}

REFUSED: dict[str, tuple[Expr, Reduction]] = {
    "mean absolute deviation": (call("abs", X), sum_(f32)),
    "count above a threshold": (cast(call("ge", P, num(0.1)), i64), sum_(i64)),
    "share above a threshold": (where(call("ge", C, S), num(1), num(0)), sum_(f32)),
    "sparsemax": (call("maximum", call("sub", C, S), num(0)), sum_(f32)),
    "entmax": (mul(*(call("maximum", call("sub", C, S), num(0)),) * 2), sum_(f32)),
    "sigmoid of a shift": (call("sigmoid", U), sum_(f32)),
    "tanh of a shift": (call("tanh", U), sum_(f32)),
    "quantised": (mul(call("round", call("div", C, M)), W), sum_(f32)),
    "a rate per element": (call("exp", mul(U, V)), sum_(f32)),
    "a divisor that mixes": (call("div", V, call("add", E, num(1))), sum_(f32)),
    "a product of sums": (E, product(f32)),
    "an order that changes": (mul(X, X), maximum(f32)),
}


@pytest.mark.parametrize("name", FINITE)
def test_rank(name: str) -> None:
    body, rank = FINITE[name]
    found = law(body)
    assert isinstance(found, Law), found
    assert found.rank == rank


@pytest.mark.parametrize("name", REFUSED)
def test_refusal(name: str) -> None:
    body, reduction = REFUSED[name]
    found = law(body, reduction)
    assert isinstance(found, Refusal), found
    assert found.law in ("finite rank", "homomorphism") and found.reason


def test_a_state_of_several_values_is_refused() -> None:
    found = derive(argmax(f32), (U, axis(J)), UP, (J,))
    assert isinstance(found, Refusal) and found.law == "homomorphism"


def test_raw_moments_are_called_a_hazard() -> None:
    found = law(FINITE["softmax backward"][0])
    assert isinstance(found, Law) and "cancel" in found.hazard


def test_exponentials_without_a_maximum_are_called_a_hazard() -> None:
    found = law(call("exp", call("sub", C, S)))
    assert isinstance(found, Law) and "held down" in found.hazard


def test_only_what_is_written_is_safe() -> None:
    for name in (
        "softmax times values",
        "entropy",
        "relative entropy",
        "layer norm then product",
        "variance",
    ):
        found = law(FINITE[name][0])
        assert isinstance(found, Law) and not found.hazard, name


@dataclass
class Instance:
    """Random elements and two values of each result that moves."""

    seed: int

    def __post_init__(self) -> None:
        self.operands = [exact_random((N,), self.seed + k) for k in range(5)]
        self.operands += [exact_random((), self.seed + 9)]
        self.old = {
            leaf: exact_random((1,), self.seed + 20 + k, 0.5, 2) for k, leaf in enumerate((M, L, S, T, Q))
        }
        self.new = {
            leaf: exact_random((1,), self.seed + 40 + k, 2, 3) for k, leaf in enumerate((M, L, S, T, Q))
        }

    def at(self, e: Expr, moved: bool) -> np.ndarray:
        slots = self.new if moved else self.old
        made = Evaluator(EXACT, self.operands, axes={J: np.arange(N)}, slots=slots).value(e)
        return np.broadcast_to(made, (N,))


def rescaled(found: Law, state: int, on: Instance, wrong: bool = False) -> np.ndarray:
    names = [make("var", (), f32, k) for k in range(found.rank + len(found.statistics))]
    gaps = names[found.rank :]
    e = found.rescaled(state, names[: found.rank], gaps)
    slots = {n: on.at(s.body, False) for n, s in zip(names, found.states, strict=False)}
    for n, g in zip(gaps, found.statistics, strict=True):
        ends = [on.at(g.through, moved) for moved in (False, True)]
        slots[n] = EXACT.apply("sub", ends[::-1] if wrong else ends, f32, f32)
    return np.broadcast_to(Evaluator(EXACT, slots=slots).value(e), (N,))


@pytest.mark.parametrize("name", FINITE)
def test_repair_moves_every_element(name: str) -> None:
    found = law(FINITE[name][0])
    assert isinstance(found, Law)
    for seed in (0, 100):
        on = Instance(seed)
        for k, state in enumerate(found.states):
            assert equal(rescaled(found, k, on), on.at(state.body, True))
            if found.statistics and (state.rates or len(state.row) > 1):
                assert not equal(rescaled(found, k, on, wrong=True), on.at(state.body, True))


@pytest.mark.parametrize("name", FINITE)
def test_the_states_make_the_result(name: str) -> None:
    body, _ = FINITE[name]
    found = law(body)
    assert isinstance(found, Law)
    on = Instance(7)
    table = {slot("a", s.index, f32): on.at(found.states[s.index].body, True) for s in slots_of(found.finish)}
    finished = Evaluator(EXACT, slots=table | on.new).value(found.finish)
    assert equal(np.broadcast_to(finished, (N,)), on.at(body, True)), "of one element, hence of a sum"


def slots_of(e: Expr) -> list[Slot]:
    return [x.value for x in leaves(e, "slot") if isinstance(x.value, Slot)]


@pytest.mark.parametrize(
    ("body", "moved"),
    [
        (call("sub", C, call("add", M, call("log", L))), False),
        (call("div", call("abs", C), M), True),
        (call("exp", U), False),
        (call("neg", U), False),
        (call("round", call("div", C, L)), False),
        (call("fma", call("exp", L), C, M), False),
        (call("fma", L, M, C), False),
        (where(MASK, U, num(float("-inf"))), False),
    ],
)
def test_a_maximum_of_a_monotone_function(body: Expr, moved: bool) -> None:
    found = law(body, maximum(f32))
    up = UP if not moved else (Upstream(M, maximum(f32), (call("abs", C),)),)
    found = derive(maximum(f32), (body,), up, (J,))
    assert isinstance(found, Law) and found.rank == 1 and not found.statistics
    on = Instance(3)
    top = {"maximum": np.argmax, "minimum": np.argmin}[found.states[0].reduction.combiner or ""]
    data = on.at(found.states[0].body, True)
    best = data[top(data["v"])]
    (only,) = [slot("a", s.index, f32) for s in slots_of(found.finish)]
    made = Evaluator(EXACT, slots={only: np.asarray([best])} | on.new).value(found.finish)
    whole = on.at(body, True)
    assert made["v"] == whole["v"].max() and equal(made, whole[[np.argmax(whole["v"])]])


def test_a_maximum_scaled_by_what_moves() -> None:
    found = law(mul(V, E), maximum(f32))
    assert isinstance(found, Law) and found.rank == 1 and found.statistics
    on = Instance(5)
    assert equal(rescaled(found, 0, on), on.at(mul(V, E), True))


def at_floats(e: Expr, operands: list[np.ndarray], slots: Mapping[Expr, Any]) -> np.ndarray:
    return np.broadcast_to(Evaluator(FLOATS, operands, axes={J: np.arange(N)}, slots=slots).value(e), (N,))


@pytest.mark.parametrize("reduction", [any_(), all_()])
@pytest.mark.parametrize("op", ["ge", "gt", "le", "lt"])
def test_quantifiers_are_extremes(reduction: Reduction, op: str) -> None:
    body = call(op, P, num(0.2))
    found = law(body, reduction)
    assert isinstance(found, Law) and not found.statistics
    rng = np.random.default_rng(0)
    outcomes = set()
    for trial in range(40):
        c = rng.normal(size=N) * (0.1 if trial % 2 else 1)
        if trial % 4 == 0:
            c[rng.integers(N)] = np.nan
        if trial % 20 == 0:
            c[:] = np.nan
        operands = [c.astype(np.float32)] * 6
        slots = {
            M: np.float32(np.nanmax(c) if not np.isnan(c).all() else 0),
            L: np.float32(3 + 6 * (trial % 3 == 0)),
        }
        states: dict[Expr, Any] = {}
        for k, s in enumerate(found.states):
            of = {"maximum": np.maximum, "minimum": np.minimum, "or": np.logical_or}[
                s.reduction.combiner or ""
            ]
            states[slot("a", k, s.body.dtype)] = of.reduce(at_floats(s.body, operands, slots))
        made = bool(at_floats(found.finish, operands, slots | states)[0])
        want = bool((np.any if reduction.combiner == "or" else np.all)(at_floats(body, operands, slots)))
        assert made == want, (trial, c)
        outcomes.add(want)
    assert outcomes == {True, False}


def test_rows_of_nothing_are_told_from_rows_of_zeros() -> None:
    plain, guarded = law(E), law(FINITE["guarded logsumexp"][0])
    assert isinstance(plain, Law) and plain.states[0].lost
    assert isinstance(guarded, Law) and not guarded.states[0].lost
    masked = law(FINITE["masked"][0])
    assert isinstance(masked, Law) and not masked.states[0].lost
