"""Integers from data that wrapped around are divided as they are: by the sum, not term by term."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewright
from tilewright.ir.expr import Axis, axis, symbol
from tilewright.ir.sizes import dims
from tilewright.ir.sizes.linear_form import may_wrap

HUGE = torch.tensor([2**63 - 1, -(2**63), 2**62, 2**61 + 3, -(2**62) - 7, 5])


def _quotients(i: Tensor) -> tuple[Tensor, ...]:
    return (i * 4 + 3) % 90000, (i * 3) // 3, (i * 6 + 1) // 4, (i * 4) % 2, (i * 10 + 4) % 6


def test_quotients_and_rests_of_wrapped_integers() -> None:
    got = torch.compile(_quotients, backend=tilewright.backend)(HUGE)
    for ours, eagers in zip(got, _quotients(HUGE), strict=True):
        assert torch.equal(ours, eagers)


def test_places_made_of_wrapped_integers() -> None:
    def hashed(x: Tensor, i: Tensor) -> Tensor:
        for k in range(3):
            i = (i ^ (i >> 16)) * 73244475 + k
        return x[i % x.shape[0]]

    x, i = torch.randn(9000), torch.arange(500)
    assert torch.equal(torch.compile(hashed, backend=tilewright.backend)(x, i), hashed(x, i))


def test_the_larger_of_integers_that_may_have_wrapped() -> None:
    def extrema(i: Tensor) -> tuple[Tensor, ...]:
        return torch.maximum(i, i + 1), torch.minimum(i, i - 1), torch.maximum(i + 1, i + 3)

    got = torch.compile(extrema, backend=tilewright.backend)(HUGE)
    for ours, eagers in zip(got, extrema(HUGE), strict=True):
        assert torch.equal(ours, eagers)


def test_comparisons_of_integers_that_may_have_wrapped() -> None:
    def ordered(i: Tensor) -> tuple[Tensor, ...]:
        return i + 1 > i, i < i + 3, i - 1 < i, i + 1 >= i - 1, i + 1 == i + 1, torch.where(i + 1 > i, i, 7)

    got = torch.compile(ordered, backend=tilewright.backend)(HUGE)
    for ours, eagers in zip(got, ordered(HUGE), strict=True):
        assert torch.equal(ours, eagers)


@pytest.mark.parametrize("dynamic", [None, True])
def test_places_that_exceed_an_integer(dynamic: bool | None) -> None:
    def far(x: Tensor) -> tuple[Tensor, ...]:
        i = torch.arange(x.shape[0])
        squares = i * i
        i, high = i * 2**62 + 3, squares * squares * squares * squares * squares * squares
        quotients = i // 2 + x, i % 5 + x, (i % 1000 * 2**61) // 2
        return *quotients, i > 2, torch.maximum(i, i * 2), (high * 2 + 1) // 2, high % 7, high >= 0

    x = torch.zeros(900, dtype=torch.int64)
    got = torch.compile(far, backend=tilewright.backend, dynamic=dynamic)(x)
    for ours, eagers in zip(got, far(x), strict=True):
        assert torch.equal(ours, eagers)


def test_narrow_data_times_a_large_number() -> None:
    def far(x: Tensor) -> tuple[Tensor, ...]:
        i = x.long() * 2**42 + 3
        return i // 2, i % 5, i > 2, torch.maximum(i, i * 2)

    x = torch.tensor([0, 1, 2**30, 2**31 - 1, -(2**31), 12345678, 3, -7], dtype=torch.int32)
    got = torch.compile(far, backend=tilewright.backend)(x)
    for ours, eagers in zip(got, far(x), strict=True):
        assert torch.equal(ours, eagers)


def test_constants_that_exceed_an_integer_on_the_way() -> None:
    def far(i: Tensor) -> tuple[Tensor, ...]:
        big = torch.full_like(i, 2**62)
        chosen = (
            torch.where(i > 1, 2**62, 0) * 2 // 2,
            torch.where(torch.arange(8) > 1, 2**62, 0) * 2 // 2 + i,
        )
        least = torch.full_like(i, -(2**63)) * -1
        return (
            *chosen,
            big * 2 // 2,
            big * 2 // 2 + i,
            big * 2 % 7,
            least // 3 + i,
            big * 2 > i,
            (big * 2).abs(),
            -least,
        )

    i = torch.arange(-2, 6)
    got = torch.compile(far, backend=tilewright.backend)(i)
    for ours, eagers in zip(got, far(i), strict=True):
        assert torch.equal(ours, eagers)


def test_sizes_times_more_sizes_than_a_tensor_has() -> None:
    def far(x: Tensor) -> tuple[Tensor, ...]:
        n, i = x.shape[0], torch.arange(x.shape[0])
        stepwise = i
        for _ in range(6):
            stepwise = stepwise * n
        same = torch.full((5,), n)
        return (
            i * n**6 * 2 // 2,
            i * n**5 * 2000 // 2000,
            stepwise * 2 // 2,
            same**6 * 20 // 20,
            i * n**6 * 3 > i,
        )

    x = torch.zeros(1000)
    got = torch.compile(far, backend=tilewright.backend, dynamic=True)(x)
    for ours, eagers in zip(got, far(x), strict=True):
        assert torch.equal(ours, eagers)


def test_places_of_tensors_with_sizes_stay_places() -> None:
    n, m = symbol("n"), symbol("m")
    places = [axis(Axis(f"a{k}", n)) for k in range(3)]
    flat = dims.add(*(dims.mul(a, *([n] * k)) for k, a in enumerate(places)))
    assert dims.mod(flat, n) is places[0] and not may_wrap(dims.mul(flat, m, symbol("k")))
    assert may_wrap(dims.mul(places[0], *([n] * 6)))
    four = dims.add(*(dims.mul(a, *([n] * k)) for k, a in enumerate((*places, axis(Axis("a3", n))))))
    assert dims.mod(four, n) is places[0]


def test_sizes_times_large_numbers() -> None:
    def far(x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[0]
        same, i = torch.full((5,), n), torch.arange(n)
        return (
            same * 2**60 // 2**60,
            same * 2**60 >= 0,
            (same * 2**60).clamp(min=0),
            same * 2**60 % 1000,
            torch.maximum(same * 2**60, same),
            (torch.arange(5) + n) * 2**60 // 2**60,
            torch.full((3,), x.numel()) * 2**50 // 2**50,
            i * 2**40 * n // n,
        )

    x = torch.zeros(30_000, 7)
    got = torch.compile(far, backend=tilewright.backend, dynamic=True)(x)
    for ours, eagers in zip(got, far(x), strict=True):
        assert torch.equal(ours, eagers)


def test_sums_and_products_of_a_program_that_few_sizes_make_too_large() -> None:
    def far(x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[0]
        i = torch.arange(n)
        cubes = i * n**2 * 2
        return (
            cubes // 2,
            cubes % 7,
            cubes >= 0,
            cubes.clamp(min=0),
            torch.maximum(-cubes, i),
            torch.relu(cubes),
            (cubes + n) // n,
            torch.div(cubes, 2, rounding_mode="trunc"),
            i * i * i * 2 // 2,
        )

    x = torch.empty(1, dtype=torch.int8).expand(3_000_000)
    torch._dynamo.mark_dynamic(x, 0)
    got = torch.compile(far, backend=tilewright.backend)(x)
    for ours, eagers in zip(got, far(x), strict=True):
        assert torch.equal(ours, eagers)


def test_products_of_the_sizes_of_one_tensor() -> None:
    def far(x: Tensor) -> tuple[Tensor, ...]:
        a = x.shape[0]
        product = torch.arange(3) + a
        for size in x.shape[1:]:
            product = product * size
        return product * 4 // 4, product * a // a, product * a % a, product * 5000 > product

    x = torch.empty(1, dtype=torch.int8).expand(1500, 1400, 1301, 1200, 1100, 2)
    got = torch.compile(far, backend=tilewright.backend, dynamic=True)(x)
    for ours, eagers in zip(got, far(x), strict=True):
        assert torch.equal(ours, eagers)


def test_what_a_program_computes_of_sizes_is_divided_as_it_is() -> None:
    n, few = symbol("n"), symbol("few", 0, 1000)
    i = axis(Axis("i", n))
    square = dims.of_program("mul", i, n)
    assert not may_wrap(square) and dims.floordiv(square, n) is i
    cube = dims.of_program("mul", square, n)
    twice = dims.of_program("mul", cube, dims.add(dims.ONE, dims.ONE))
    assert may_wrap(twice) and dims.floordiv(twice, n).op == "floordiv" and not dims.at_least(twice, 0)
    j = axis(Axis("j", few))
    assert dims.floordiv(dims.of_program("mul", dims.of_program("mul", j, few), few), few) is dims.mul(j, few)
    # What the compiler makes is a place of a tensor.
    assert dims.floordiv(dims.mul(i, n, n, n), n) is dims.mul(i, n, n)
