"""The fp64 rule passes honest results and refuses the others."""

from __future__ import annotations

import copy
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch.utils._pytree import tree_leaves

from tilewright.accuracy import (
    FLOAT64_ULPS,
    Deciding,
    compare,
    compare_trees,
    default_k,
    float64_mode,
    in_float64,
)

NAN, INF = math.nan, math.inf


def softmax_case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Ours (another order of the same sums), eager, fp64."""
    x = torch.randn(64, 1000).to(dtype)
    e = torch.softmax(x, -1)
    wide = x.float()
    y = (torch.exp2((wide - wide.amax(-1, keepdim=True)) * math.log2(math.e))).flip(-1)
    y = (y / y.sum(-1, keepdim=True)).flip(-1).to(dtype)
    return y, e, in_float64(lambda t: torch.softmax(t, -1))(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_honest_result_passes(dtype: torch.dtype) -> None:
    y, e, r = softmax_case(dtype)
    assert r.dtype == torch.float64
    verdict = compare(y, e, r)
    assert verdict.passed and 0 < verdict.smallest_k <= verdict.k == default_k(dtype), str(verdict)
    assert str(verdict).startswith("PASS smallest k")


def test_eager_against_itself_passes() -> None:
    _, e, r = softmax_case()
    verdict = compare(e, e, r)
    assert verdict.passed and verdict.smallest_k <= 2 and verdict.rms_ours == verdict.rms_eager


def heavy_tail(seed: int, exponent: float, zeros: float, size: int) -> tuple[Tensor, Tensor]:
    """Eager and fp64: few elements carry the error, many values are 0, magnitudes differ by much."""
    g = torch.Generator().manual_seed(seed)
    r = torch.randn(size, generator=g).double() * torch.rand(size, generator=g).double().pow(8)
    error = (
        1e-6 * torch.randn(size, generator=g).double() * torch.rand(size, generator=g).double().pow(-exponent)
    )
    error[torch.rand(size, generator=g) < zeros] = 0
    r[torch.rand(size, generator=g) < zeros] = 0
    return (r + error).float(), r


@given(
    st.integers(0, 10**6),
    st.floats(0, 4),
    st.sampled_from([0.0, 0.5, 0.9995, 1.0]),
    st.sampled_from([1, 7, 1000, 5000]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(max_examples=60, deadline=None)
def test_eager_against_itself_always_passes(
    seed: int, exponent: float, zeros: float, size: int, dtype: torch.dtype
) -> None:
    e, r = heavy_tail(seed, exponent, zeros, size)
    e = e.to(dtype)
    verdict = compare(e, e, r)
    assert verdict.passed and math.isfinite(verdict.eager_k), str(verdict)
    assert verdict.smallest_k <= max(1.0, verdict.eager_k)


def tail_case() -> tuple[Tensor, Tensor, Tensor, float]:
    """Values of 1 with small errors but for three; eager, fp64, the wide errors, and what (c) forgives."""
    r = torch.ones(10_000, dtype=torch.float64)
    error = torch.full_like(r, 2.0**-22)
    error[[5, 50, 500]] = torch.tensor([2.0**-12, 2.0**-11, 2.0**-10], dtype=torch.float64)
    return (r + error).float(), r, error, 2.0**-24


def test_twice_eagers_own_worst_element_passes_and_more_fails() -> None:
    e, r, error, free = tail_case()
    worst = float(error.max()) - free
    for factor, passed in ((1.0, True), (1.99, True), (2.1, False)):
        y = e.clone()
        y[500] = float(r[500]) + factor * worst + free
        verdict = compare(y, e, r)
        assert verdict.eager_k > 1000
        assert verdict.passed == passed, str(verdict)
        assert verdict.relative_k == pytest.approx(factor, rel=1e-2)
        assert f"of 2 x eager's {verdict.eager_k:.3g} (" in str(verdict)


def test_an_element_beyond_eagers_worst_fails_wherever_it_is() -> None:
    e, r, error, _ = tail_case()
    y = e.clone()
    y[7] = 1 + 3 * float(error.max())
    verdict = compare(y, e, r)
    assert not verdict.passed and verdict.worst_element == (7,) and "one element" in verdict.reason


def test_the_mean_error_is_not_excused_by_eagers_worst_element() -> None:
    e, r, error, _ = tail_case()
    verdict = compare((r + float(error.max())).float(), e, r)
    assert verdict.smallest_k <= 2 * verdict.eager_k
    assert not verdict.passed and verdict.relative_k == verdict.rms_k and "rms" in verdict.reason


def test_errors_where_the_value_is_zero_and_eager_is_mostly_exact() -> None:
    r = torch.ones(10_000, dtype=torch.float64)
    r[3] = 0
    e = r.float()
    e[3] = 1e-3
    assert compare(e, e, r).passed
    y = e.clone()
    y[3] = 1e-2
    assert not compare(y, e, r).passed


def test_one_blown_element_fails() -> None:
    y, e, r = softmax_case()
    y[3, 7] *= 1.001
    verdict = compare(y, e, r)
    assert not verdict.passed and verdict.worst_element == (3, 7) and "one element" in verdict.reason
    assert f"ours {float(y[3, 7]):.9g}" in str(verdict)


def test_a_small_error_everywhere_fails_by_rms() -> None:
    y, e, r = softmax_case()
    assert not compare(y * (1 + 2e-6), e, r).passed


def test_less_precision_than_eager_fails() -> None:
    x = torch.randn(256, 256)
    e, r = x.exp(), x.double().exp()
    verdict = compare(x.bfloat16().float().exp(), e, r)
    assert not verdict.passed and verdict.smallest_k > 100


@pytest.mark.parametrize(
    ("ours", "eager", "exact", "passed"),
    [
        (NAN, NAN, NAN, True),
        (INF, INF, INF, True),
        (-INF, INF, INF, False),
        (NAN, INF, INF, False),
        (1.0, NAN, NAN, False),
        (NAN, 1.0, 1.0, False),
        (INF, 1.0, 1.0, False),
        (1.0, INF, 1.0, True),  # eager overflowed on the way
        (1.0, NAN, 1.0, True),
        (3.0, INF, 1.0, False),  # finite, but wrong
        (1.0, 1.0, INF, True),  # float64 overflowed: eager stands in
        (2.0, 1.0, NAN, False),
    ],
)
def test_places_of_nan_and_infinity(ours: float, eager: float, exact: float, passed: bool) -> None:
    y, e, r = (torch.cat([torch.ones(20), torch.tensor([v])]) for v in (ours, eager, exact))
    verdict = compare(y, e, r.double())
    assert verdict.passed == passed, str(verdict)
    assert verdict.rescued == (math.isfinite(ours) and not math.isfinite(eager) and math.isfinite(exact))
    if not passed:
        assert verdict.worst_element == (20,)


@pytest.mark.parametrize(
    ("ours", "eager", "exact", "passed"),
    [
        (INF, NAN, 70000.0, True),  # eager took infinities from each other
        (-INF, NAN, 70000.0, False),
        (INF, NAN, 60000.0, False),
        (INF, 60000.0, 70000.0, False),
        (INF, NAN, INF, False),
        (NAN, INF, 70000.0, False),
    ],
)
def test_infinity_where_the_exact_number_is_beyond_the_type(
    ours: float, eager: float, exact: float, passed: bool
) -> None:
    y, e, r = (torch.cat([torch.ones(20), torch.tensor([v])]) for v in (ours, eager, exact))
    verdict = compare(y.half(), e.half(), r.double())
    assert verdict.passed == passed and not verdict.rescued, str(verdict)


def test_only_non_finite_and_empty_tensors() -> None:
    full = torch.full((3,), NAN)
    assert compare(full, full, full.double()).passed
    empty = torch.empty(0, 4)
    assert compare(empty, empty, empty.double()).passed


def test_an_exact_eager_grants_rounding_only() -> None:
    e = torch.arange(1, 1001, dtype=torch.float32)
    assert compare(e, e, e.double()).smallest_k == 0
    one_ulp = e.clone()
    one_ulp[5] = torch.nextafter(e[5], torch.tensor(INF))
    assert compare(one_ulp, e, e.double()).passed
    assert not compare(e * (1 + 1e-6), e, e.double()).passed


def test_huge_and_tiny_values_do_not_overflow_the_rule() -> None:
    for scale in (1e300, 1e-300):
        r = torch.rand(100, dtype=torch.float64) * scale
        verdict = compare(r.clone(), r, r)
        assert verdict.passed and math.isfinite(verdict.rms_ours)


def test_float64_outputs_have_a_floor() -> None:
    r = torch.randn(1000, dtype=torch.float64)
    assert compare(r * (1 + FLOAT64_ULPS * 2**-54), r, r).passed
    assert not compare(r * (1 + 1e-12), r, r).passed


def test_complex_is_judged_by_parts() -> None:
    e = torch.randn(50, dtype=torch.complex64)
    r = e.to(torch.complex128)
    assert compare(e, e, r).passed
    assert not compare(e * 1.01, e, r).passed


def test_shape_and_dtype_must_agree() -> None:
    x = torch.zeros(3)
    assert "shape" in compare(torch.zeros(3, 1), x, x.double()).reason
    assert "dtype" in compare(x.double(), x, x.double()).reason


def test_integers_must_be_equal() -> None:
    e = torch.tensor([[1, 2], [3, 4]])
    assert compare(e.clone(), e, e).passed
    y = e.clone()
    y[1, 0] = 9
    verdict = compare(y, e, e)
    assert not verdict.passed and verdict.worst_element == (1, 0) and verdict.smallest_k == INF


def test_integers_near_a_tie_are_counted() -> None:
    logits = torch.tensor([[1.0, 1.0 + 1e-7, 0.0], [5.0, 0.0, 0.0]])
    exact = logits.double()
    e, y = torch.tensor([1, 0]), torch.tensor([0, 0])
    gap = (exact.gather(1, y[:, None]) - exact.gather(1, e[:, None]))[:, 0]
    near = compare(y, e, e, deciding=Deciding(logits, exact, gap))
    assert near.passed and near.near_ties == 1 and "1 near ties" in str(near)
    far = torch.tensor([2, 0])
    gap = (exact.gather(1, far[:, None]) - exact.gather(1, e[:, None]))[:, 0]
    assert not compare(far, e, e, deciding=Deciding(logits, exact, gap)).passed
    assert compare(far, e, far, deciding=Deciding(logits, exact, gap)).passed  # it is eager that erred


def test_eager_itself_on_the_wrong_side_of_a_tie() -> None:
    y, e = torch.tensor([True, False]), torch.tensor([False, False])
    verdict = compare(y, e, torch.tensor([True, False]))
    assert verdict.passed and verdict.near_ties == 1
    assert not compare(y, e, e).passed


def test_trees() -> None:
    x = torch.randn(8)
    tree = {"a": x, "b": [torch.tensor(3), 2, 0.5, None]}
    exact = {"a": x.double(), "b": [torch.tensor(3), 2, 0.5, None]}
    verdict = compare_trees(tree, tree, exact)
    assert verdict.passed and verdict.smallest_k <= 2 and "['a']" in str(verdict)
    wrong = compare_trees({"a": x + 1, "b": [torch.tensor(3), 2, 0.5, None]}, tree, exact)
    assert not wrong.passed and [p for p, v in wrong.leaves if not v.passed] == ["['a']"]
    assert "structure" in compare_trees((x,), tree, exact).leaves[0][1].reason
    assert not compare_trees([None], [x], [x.double()]).passed
    assert not compare_trees(["s"], ["t"], ["t"]).passed


class HalfNorm(nn.Module):
    """A half model that widens inside by hand, with a weight, a factory and an in-place step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64).half())

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        out = (wide * scale).to(x.dtype) * self.weight
        ramp = torch.arange(64, dtype=torch.float32) / 3
        x.add_(1)
        return out + ramp + x


def test_in_float64_widens_casts_weights_and_factories() -> None:
    model, x = HalfNorm(), torch.randn(4, 64).half()
    before = x.clone()
    got = in_float64(model)(x)
    assert torch.equal(x, before) and model.weight.dtype == torch.float16
    w, v = model.weight.detach().double(), x.double()
    ramp = (torch.arange(64, dtype=torch.float64)) / 3
    wanted = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6) * w + ramp + (v + 1)
    assert got.dtype == torch.float64 and torch.allclose(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("left", "right"),
    [((8, 16), (3, 16, 8)), ((3, 8, 16), (16, 8)), ((8, 8), (8, 8)), ((3, 8, 16), (3, 16, 8))],
)
def test_grouped_products_have_a_float64_form(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = torch.randn(left), torch.randn(right)
    ends = None if len(left) == len(right) == 3 else torch.tensor([2, 5, 8], dtype=torch.int32)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(a, b, offs=ends).sin()

    wide = in_float64(product)(a, b)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), product(a, b), rtol=1e-4, atol=1e-5)


def test_functions_of_integers_are_computed_in_float64() -> None:
    exact = in_float64(torch.atan)(torch.tensor([True, False]))
    assert exact.dtype is torch.float64 and float(exact[0]) == math.pi / 4
    assert torch.get_default_dtype() is torch.float32


def test_float64_mode_keeps_integers_and_writes_buffers_back() -> None:
    buffer = torch.zeros(3)
    with float64_mode():
        assert torch.arange(3).dtype == torch.int64
        buffer.add_(torch.ones(3))
        assert torch.nn.functional.scaled_dot_product_attention(
            *(torch.randn(1, 2, 4, 8) for _ in range(3))
        ).dtype == (torch.float64)
    assert buffer.tolist() == [1, 1, 1]


X = torch.linspace(-2, 2, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
MODULES: dict[str, tuple[nn.Module, Tensor]] = {
    "Conv2d": (nn.Conv2d(3, 4, 3), X),
    "ConvTranspose2d": (nn.ConvTranspose2d(3, 4, 3), X),
    "BatchNorm2d": (nn.BatchNorm2d(3), X),
    "Conv2d, BatchNorm2d, PReLU": (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU()).eval(),
        X,
    ),
    "LSTM": (nn.LSTM(8, 5, 2), X[:, :, 0]),
    "Linear": (nn.Linear(8, 5), X),
    "half Linear": (nn.Linear(8, 5).half(), X.half()),
}


def floats(result: object) -> list[Tensor]:
    return [t for t in tree_leaves(result) if isinstance(t, Tensor)]


@pytest.mark.parametrize("name", MODULES)
def test_modules_in_float64(name: str) -> None:
    module, x = MODULES[name]
    before = {key: value.clone() for key, value in module.state_dict().items()}
    got = floats(in_float64(module)(x))
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    wanted = floats(copy.deepcopy(module).double()(x.double()))
    assert all(t.dtype == torch.float64 and not t.requires_grad for t in got)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_functions_that_refuse_mixed_dtypes_in_float64() -> None:
    conv = nn.Conv2d(3, 4, 3)
    wanted = copy.deepcopy(conv).double()(X.double())
    assert torch.equal(in_float64(F.conv2d)(X, conv.weight, conv.bias), wanted)
    assert torch.equal(in_float64(lambda x: F.conv2d(x, conv.weight, conv.bias))(X), wanted)
    assert torch.equal(in_float64(lambda x: conv(x))(X), wanted)


class Tied(nn.Module):
    """One weight under two names, a float buffer, an integer buffer that counts, and a lock where asked for."""

    def __init__(self, lock: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.tensor(0))
        self.scale = torch.tensor([1 / 3])
        self.lock = threading.Lock() if lock else None

    def forward(self, x: Tensor) -> Tensor:
        assert self.first.weight is self.second.weight
        self.calls.add_(1)
        return self.second(self.first(x)) * self.scale


@pytest.mark.parametrize("lock", [False, True])
def test_tied_weights_stay_tied_and_integers_stay_integers(lock: bool) -> None:
    module, x = Tied(lock), torch.randn(2, 4)
    got = in_float64(module)(x)
    w = module.first.weight.detach().double()
    assert torch.allclose(got, x.double() @ w.T @ w.T * module.scale.double(), rtol=1e-14)
    assert module.calls.dtype == torch.int64 and int(module.calls) == int(lock)  # uncopied modules see writes


class Branching(nn.Module):
    """A branch and a loop that cast to singles."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.cond(x.sum() > 0, lambda t: self.linear(t).float() / 3, lambda t: t.float() / 7, (x,))
        _, grown = while_loop(
            lambda i, a: i < 4, lambda i, a: (i + 1, (a / 3).float() + 1), (torch.tensor(0), x)
        )
        return chosen, grown


def test_float64_reaches_into_branches_and_loops() -> None:
    model, x = Branching(), torch.randn(4, 6).abs()
    chosen, grown = in_float64(model)(x)
    wide, wanted = x.double(), x.double()
    for _ in range(4):
        wanted = wanted / 3 + 1
    weight, bias = model.linear.weight.double(), model.linear.bias.double()
    torch.testing.assert_close(chosen, (wide @ weight.T + bias) / 3, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(grown, wanted, rtol=1e-14, atol=1e-15)
    assert chosen.dtype == grown.dtype == torch.float64
