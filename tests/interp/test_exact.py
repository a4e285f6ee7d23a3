"""The exact element type: laws that must hold to the bit, and mistakes that must show."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.interp import EXACT, ResidueError, equal, exact_random, modular, run_graph
from tilewright.interp.algebra import Array
from tilewright.interp.evaluate import TensorEvaluator
from tilewright.interp.exact import from_floats
from tilewright.ir import reduction
from tilewright.ir.builder import Builder
from tilewright.ir.dtype import bool_, f16, f32, i64
from tilewright.ir.expr import Axis, axis, integer, read
from tilewright.ir.ops import contract, norm, pointwise, reduce, view
from tilewright.ir.reduction import Reduction
from tilewright.ir.sizes import dims
from tilewright.ir.tensor import TensorExpr


class X:
    """Operators on exact arrays, for readable laws."""

    def __init__(self, a: Array) -> None:
        self.a = a

    def _op(self, op: str, *others: X | float | Fraction) -> X:
        args = [o.a if isinstance(o, X) else EXACT.constant(o, f32) for o in others]
        result = bool_ if op in ("lt", "le", "ge", "eq") else f32
        return X(EXACT.apply(op, [self.a, *args], f32, result))

    def __add__(self, o: X | float | Fraction) -> X:
        return self._op("add", o)

    def __sub__(self, o: X | float | Fraction) -> X:
        return self._op("sub", o)

    def __mul__(self, o: X | float | Fraction) -> X:
        return self._op("mul", o)

    def __truediv__(self, o: X | float | Fraction) -> X:
        return self._op("div", o)

    def __neg__(self) -> X:
        return self._op("neg")

    def __getitem__(self, index: object) -> X:
        return X(self.a[index])

    def __eq__(self, o: object) -> bool:
        assert isinstance(o, X)
        return equal(self.a, o.a)

    __hash__ = None

    def of(self, op: str, *others: X | float) -> X:
        return self._op(op, *others)

    @property
    def exp(self) -> X:
        return self._op("exp")

    @property
    def log(self) -> X:
        return self._op("log")


def fold(op: str, x: X, start: float) -> X:
    """A reduction over the last axis, one element at a time."""
    total = X(np.broadcast_to(EXACT.constant(start, f32), x.a.shape[:-1]))
    for k in range(x.a.shape[-1]):
        total = total.of(op, x[..., k])
    return total


def total(x: X) -> X:
    return fold("add", x, 0.0)


def top(x: X) -> X:
    return fold("maximum", x, -math.inf)


def rnd(*shape: int, seed: int = 3, low: float = -1, high: float = 1) -> X:
    return X(exact_random(shape, seed, low, high))


# --- the field tower ---------------------------------------------------------------------------------------------


def is_prime(n: int) -> bool:
    """Miller and Rabin's test with the bases that decide every n below 3.3e24."""
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41):
        power = pow(base, odd, n)
        if power in (1, n - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % n
            if power == n - 1:
                break
        else:
            return False
    return True


def test_the_primes_form_a_tower():
    assert all(map(is_prime, modular.PRIMES)) and not is_prime(modular.P0 * 3)
    for k in (0, 1):
        prime, order = modular.PRIMES[k + 1], modular.PRIMES[k]
        assert (prime - 1) % order == 0 and pow(modular.generator(k), order, prime) == 1 != modular.generator(
            k
        )


@given(st.lists(st.tuples(*[st.integers(0, 2**60)] * 2), min_size=1, max_size=20), st.integers(0, 2))
def test_modular_arithmetic_against_python(pairs: list[tuple[int, int]], k: int):
    p, q = modular.PRIMES[k], modular.moduli(k)
    a, b = (np.array([pair[j] % p for pair in pairs], np.uint64) for j in (0, 1))
    ints = [(x % p, y % p) for x, y in pairs]
    assert modular.multiply(a, b, q).tolist() == [x * y % p for x, y in ints]
    assert modular.add(a, b, q).tolist() == [(x + y) % p for x, y in ints]
    assert modular.negate(a, q).tolist() == [-x % p for x, y in ints]
    assert modular.inverse(a, k).tolist() == [pow(x, -1, p) if x else 0 for x, y in ints]
    if k < 2:
        g, above = modular.generator(k), modular.PRIMES[k + 1]
        assert modular.exponential(a, k).tolist() == [pow(g, x, above) for x, y in ints]


def test_powers_of_large_arrays_are_those_of_small_ones(monkeypatch: pytest.MonkeyPatch):
    a = exact_random((50,), 1)["w"]
    small = modular.power(a[:, 1], a[:, 0], 1)
    monkeypatch.setattr(modular, "INTERPRETER", replace(modular.INTERPRETER, max_python_power_elements=0))
    assert np.array_equal(modular.power(a[:, 1], a[:, 0], 1), small)


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e200, max_value=1e200), min_size=1)
)
def test_floats_are_the_rationals_that_they_are(xs: list[float]):
    got = from_floats(np.array(xs))["w"]
    for x, words in zip(xs, got, strict=True):
        f = Fraction(x)
        assert words.tolist() == [f.numerator * pow(f.denominator, -1, p) % p for p in modular.PRIMES]


# --- laws --------------------------------------------------------------------------------------------------------

A, B, C = rnd(40, seed=1), rnd(40, seed=2), rnd(40, seed=3)
POSITIVE = rnd(40, seed=4, low=0.1, high=2)

LAWS: dict[str, tuple[X, X]] = {
    "distributive": ((A + B) * C, A * C + B * C),
    "difference of squares": ((A + B) * (A - B), A * A - B * B),
    "field": (A / B + C / B, (A + C) / B),
    "reciprocal": (A / B, A * B.of("reciprocal")),
    "thirds": (A * Fraction(1, 3) + A * Fraction(2, 3), A),
    "exp of a sum": ((A + B).exp, A.exp * B.exp),
    "exp of minus": ((-A).exp, A.exp.of("reciprocal")),
    "exp of zero": ((A - A).exp, A / A),
    "two levels": ((A.exp + B.exp).exp, A.exp.exp * B.exp.exp),
    "exp of log": ((A.exp + B.exp).log.exp, A.exp + B.exp),
    "log of a product": ((A.exp * B.exp).log, A.exp.log + B.exp.log),
    "log of exp": (A.exp.log, A + (A.exp / A.exp).log),
    "log of a quotient": ((POSITIVE / (POSITIVE * POSITIVE)).log, -POSITIVE.log),
    "shift of log-sum-exp": (A + (B.exp + C.exp).log, ((A + B).exp + (A + C).exp).log),
    "weighted log": ((A.exp.log) * Fraction(1, 4) + (A.exp.log) * Fraction(3, 4), A.exp.log * Fraction(2, 2)),
    "twice the log of a sum": ((A.exp + B.exp).log * 2.0, (A.exp + B.exp).log + (A.exp + B.exp).log),
    "max times positive": (A.of("maximum", B) * 0.125, (A * 0.125).of("maximum", B * 0.125)),
    "max plus": (A.of("maximum", B) + C, (A + C).of("maximum", B + C)),
    "sigmoid": (A.of("sigmoid"), A.exp / (A.exp + 1)),
    "rsqrt": (A.of("rsqrt"), A.of("sqrt").of("reciprocal")),
    "expm1": (A.of("expm1") + 1, A.exp),
    "exp2": ((A + 1).of("exp2"), A.of("exp2") * (A - A + 1).of("exp2")),
    "opaque of equals": ((A + B).of("tanh"), (B + A).of("tanh")),
    "square": (A.of("pow", 2.0), A * A),
    "erf is odd": ((-A).of("erf"), -A.of("erf")),
    "erf of nothing": ((A * 0).of("erf"), A * 0),
    "complement of erf": (A.of("erf") + 1, (-A).of("quick_erfc")),
    "coarse complement of erf": (A.of("erf") + 1, (-A).of("coarse_erfc")),
    "mod": (POSITIVE.of("mod", 0.5) + POSITIVE.of("floordiv", 0.5) * 0.5, POSITIVE),
}


@pytest.mark.parametrize("law", LAWS)
def test_laws_hold_exactly(law: str):
    left, right = LAWS[law]
    assert left == right
    finite = np.isfinite(left.a["v"])
    assert np.allclose(left.a["v"][finite], right.a["v"][finite])


MISTAKES: dict[str, tuple[X, X]] = {
    "order of a difference": (A - B, B - A),
    "inverse factor": ((A - B).exp, (B - A).exp),
    "sum of exps": ((A + B).exp, A.exp + B.exp),
    "tanh is not odd here": ((-A).of("tanh"), A.of("tanh")),
    "sin is not cos": (A.of("sin"), A.of("cos")),
    "log sort": (A.exp.log, A),
    "a log counted once more": ((A.exp + B.exp).log * 3.0, (A.exp + B.exp).log + (A.exp + B.exp).log),
    "a count off by one": (A * 64, A * 63),
    "a constant off by an ulp": (A * 0.1, A * float(np.nextafter(0.1, 1))),
    "argument order of an opaque function": (A.of("atan2", B), B.of("atan2", A)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(mistake: str):
    left, right = MISTAKES[mistake]
    assert left != right


def test_powers_of_a_part_are_those_of_the_whole():
    """Whole exponents among others are products, wherever they stand."""
    base, exponents = rnd(6, low=0.5, high=2), X(from_floats(np.array([2.0, 0.3, 2.0, 1.0, -1.7, 3.0])))
    whole = base.of("pow", exponents)
    for k in range(6):
        assert base[k : k + 1].of("pow", exponents[k : k + 1]) == whole[k : k + 1]
    assert whole[5:] == base[5:] * base[5:] * base[5:] and whole[1:2] != base[1:2]


def test_what_is_not_finite():
    nothing = from_floats(np.array([-math.inf, math.inf, math.nan]))
    assert equal(EXACT.apply("exp", [nothing[:1]], f32, f32), from_floats(np.array([0.0])))
    assert equal(nothing, nothing.copy()) and not equal(nothing, nothing[::-1].copy())
    assert not equal(nothing[:1], from_floats(np.array([0.0])))
    one, zero = X(from_floats(np.array([1.0]))), X(from_floats(np.array([0.0])))
    assert (one / zero).a["v"][0] == math.inf and (zero / X(nothing[1:2])) == zero


def test_what_cannot_be_followed_is_an_error():
    with pytest.raises(ResidueError):
        A.exp.log * B.exp.log
    with pytest.raises(ResidueError):
        A.exp.log.log  # noqa: B018
    with pytest.raises(ResidueError):
        A / POSITIVE.log
    lowest = from_floats(np.full(A.a.shape, -3.4028234663852886e38))
    for op in ("maximum", "eq"):  # two numbers whose shadows are the lowest float
        EXACT.apply(op, [lowest, lowest], f32, f32)
        with pytest.raises(ResidueError):
            EXACT.apply(op, [(X(lowest) - A).a, (X(lowest) - B).a], f32, f32)
    three = A.exp.exp.exp
    with pytest.raises(ResidueError):
        equal(three.a, three.a)


@pytest.mark.parametrize("op", ["maximum", "minimum"])
def test_extrema_of_numbers_with_one_shadow_have_no_order(op: str):
    """What is added leaves no trace in shadows of 0.2; a kernel may take its maxima in parts."""
    some = X(from_floats(np.full(A.a.shape, 0.2))) + A * 1e-30
    others = X(from_floats(np.full(A.a.shape, 0.2))) + B * 1e-30
    assert np.array_equal(some.a["v"], others.a["v"]) and not equal(some.a, others.a)
    assert equal(some.of(op, others).a, others.of(op, some).a)
    turned = "minimum" if op == "maximum" else "maximum"
    assert equal((-some).of(turned, -others).a, (-some.of(op, others)).a)


def test_one_number_added_up_in_two_orders_is_compared_as_one() -> None:
    terms = [rnd(40) / (k + 3.0) for k in range(9)]
    there, back = functools.reduce(operator.add, terms), functools.reduce(operator.add, terms[::-1])
    assert not np.array_equal(there.a["v"], back.a["v"])
    assert there.of("le", back).a.all() and not there.of("lt", back).a.any() and there.of("eq", back).a.all()


def test_what_the_order_of_additions_decides_is_left_undecided() -> None:
    rows = X(from_floats(np.ones(A.a.shape)))
    for op in ("le", "maximum"):
        with pytest.raises(ResidueError, match="too near"):
            rows.of(op, rows + B * 1e-15)


def test_control_follows_the_shadow_and_float_casts_do_nothing():
    x = rnd(20)
    assert np.array_equal(x.of("lt", 0.0).a, x.a["v"] < 0)
    half = EXACT.apply("cast", [x.a], f32, f16)
    assert equal(half, x.a)
    whole = EXACT.apply("cast", [(x * 10).a], f32, i64)
    assert np.array_equal(whole, np.trunc(x.a["v"] * 10).astype(np.int64))
    assert equal(EXACT.apply("cast", [whole], i64, f32), from_floats(whole.astype(np.float64)))
    assert (x * 10).of("floor") == X(from_floats(np.floor(x.a["v"] * 10)))
    assert x.of("abs").of("maximum", 0.25) == X(
        np.where(abs(x.a["v"]) > 0.25, x.of("abs").a, from_floats(np.array(0.25)))
    )


# --- programs ----------------------------------------------------------------------------------------------------


def causal_scores(n: int = 9) -> X:
    s = rnd(n, n, seed=5).a.copy()
    s[np.triu_indices(n, 1)] = from_floats(np.array(-math.inf))
    return X(s)


def softmax(s: X) -> tuple[X, X]:
    m = top(s)[..., None]
    e = (s - m).exp
    z = total(e)[..., None]
    return e / z, m + z.log


def test_columns_of_a_masked_softmax_from_another_reference():
    """The column sum of P from the log-sum-exp taken with the first element instead of the maximum."""
    s = causal_scores()
    p, _ = softmax(s)
    first = s[:, :1]
    lse = first + total((s - first).exp)[..., None].log
    again = (s - lse).exp
    turn = lambda x: X(np.swapaxes(x.a, 0, 1))  # noqa: E731
    assert total(turn(p)) == total(turn(again))
    dropped = X(again.a[1:])
    assert total(turn(dropped)) != total(turn(p))


def online(s: X, v: X, step: int, rescale: Callable[[X, X], X]) -> X:
    """One pass over columns in steps, with a running maximum and rescaled sums."""
    n, width = s.a.shape[-1], v.a.shape[-1]
    m = X(np.broadcast_to(EXACT.constant(-math.inf, f32), s.a.shape[:1]))
    z = X(np.broadcast_to(EXACT.constant(0.0, f32), s.a.shape[:1]))
    o = X(np.broadcast_to(EXACT.constant(0.0, f32), (s.a.shape[0], width)))
    for low in range(0, n, step):
        tile, values = s[:, low : low + step], v[low : low + step]
        new = m.of("maximum", top(tile))
        factor = rescale(m, new)
        e = (tile - new[..., None]).exp
        z = z * factor + total(e)
        o = o * factor[..., None] + total(X((e[:, None, :] * X(np.swapaxes(values.a, 0, 1)[None])).a))
        m = new
    return o / z[..., None]


def test_online_softmax_and_its_typical_mistakes():
    s, v = causal_scores(), rnd(9, 4, seed=6)
    p, _ = softmax(s)
    want = total(X((p[:, None, :] * X(np.swapaxes(v.a, 0, 1)[None])).a))
    right = lambda old, new: (old - new).exp  # noqa: E731
    assert all(online(s, v, step, right) == want for step in (1, 2, 4, 9))
    assert online(s, v, 3, lambda old, new: new - new + 1) != want
    assert online(s, v, 3, lambda old, new: (new - old).exp) != want
    assert online(s[:, :8], v[:8], 4, right) != want


def test_chans_merge_and_a_wrong_weight():
    x = rnd(2, 64)
    state = lambda y: (total(y) / float(y.a.shape[-1]), y)  # noqa: E731

    def spread(y: X) -> X:
        d = y - (total(y) / float(y.a.shape[-1]))[..., None]
        return total(d * d)

    a, b = x[:, :24], x[:, 24:]
    d = state(b)[0] - state(a)[0]
    merged = lambda w: spread(a) + spread(b) + d * d * w  # noqa: E731
    assert merged(Fraction(24 * 40, 64)) == spread(x)
    assert merged(Fraction(24 * 40, 63)) != spread(x)


def run_reduction(kind: Reduction, x: Array) -> list[Array]:
    i, r = Axis("i", integer(x.shape[0])), Axis("r", integer(x.shape[1]))
    element = read(0, (axis(i), axis(r)), f32)
    body = (element, axis(r)) if len(kind.elements) == 2 else (element,)
    return TensorEvaluator(TensorExpr((i,), body, (r,), kind), EXACT, [x], {}).run()


def test_reductions_with_state():
    x = rnd(3, 13, seed=8)
    count, mean, spread = map(X, run_reduction(reduction.moments(f32), x.a))
    assert mean == total(x) / 13.0 and count.a["v"].tolist() == [13.0] * 3
    assert spread == total(x * x) - mean * mean * 13.0
    (lse,) = map(X, run_reduction(reduction.logsumexp(f32), x.a))
    assert lse == total(x.exp).log
    value, place = run_reduction(reduction.argmax(f32), x.a)
    assert np.array_equal(place, x.a["v"].argmax(1)) and X(value) == top(x)


def test_label_smoothing_and_linear_means():
    x, eps = rnd(1, 64, seed=9), 0.1
    lse = top(x)[..., None] + total((x - top(x)[..., None]).exp)[..., None].log
    n = 64
    left = total(x - lse) * Fraction(eps) * Fraction(1, n)
    right = (total(x) - lse[..., 0] * float(n)) * Fraction(eps) * Fraction(1, n)
    wrong = (total(x) - lse[..., 0] * float(n - 1)) * Fraction(eps) * Fraction(1, n)
    assert left == right and left != wrong


def attention(naive: bool) -> object:
    b = Builder()
    q, k, v = (b.value((integer(2), integer(5), integer(4)), f32) for _ in range(3))
    s = contract.matmul(b, q, view.transpose(b, k, 1, 2))
    if naive:
        e = pointwise.exp(b, s)
        p = pointwise.div(b, e, reduce.sum_(b, e, (2,), keepdim=True))
    else:
        p = norm.softmax(b, s, -1)
    return b.finish([q, k, v], [contract.matmul(b, p, v)])


def test_graphs_run_over_exact_elements():
    inputs = [exact_random((2, 5, 4), seed) for seed in (1, 2, 3)]
    (safe,), (naive,) = (run_graph(attention(kind), inputs, EXACT) for kind in (False, True))
    assert equal(safe, naive)
    swapped = run_graph(attention(True), [inputs[1], inputs[0], inputs[2]], EXACT)[0]
    assert not equal(safe, swapped)
    assert dims.ONE.dtype is i64


@pytest.mark.parametrize("op", ["sqrt", "erf", "tanh"])
def test_opaque_functions_keep_the_rank(op: str) -> None:
    """A value without dims stays one."""
    assert X(exact_random((), 1, 0.5, 2.0)).of(op).a.shape == ()
