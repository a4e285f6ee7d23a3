"""The fp64 rule passes honest results and refuses the others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

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


def test_float64_mode_keeps_integers_and_writes_buffers_back() -> None:
    buffer = torch.zeros(3)
    with float64_mode():
        assert torch.arange(3).dtype == torch.int64
        buffer.add_(torch.ones(3))
        assert torch.nn.functional.scaled_dot_product_attention(
            *(torch.randn(1, 2, 4, 8) for _ in range(3))
        ).dtype == (torch.float64)
    assert buffer.tolist() == [1, 1, 1]
