"""Halves multiplied and divided by a tensor without dims of a wider type, which eager does not round first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilewright

PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "times": lambda h, s: h * s,
    "by": lambda h, s: h / s,
    "times, then summed": lambda h, s: (h.abs() * s).sum(),
    "times in place": lambda h, s: h.clone().mul_(s),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_number_is_not_rounded(name: str, dtype: torch.dtype) -> None:
    h = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    s = torch.tensor(0.12345678)
    eager = PROGRAMS[name](h, s)
    got = tilewright.compile(PROGRAMS[name], (h, s))(h, s)
    assert isinstance(got, Tensor) and got.dtype == eager.dtype
    assert torch.equal(got, eager)


def test_its_gradient_is_not_off_in_one_direction() -> None:
    def run(h: Tensor, s: Tensor) -> Tensor:
        return torch.addcdiv(h, s, s.abs() + 1)

    def gradient(f: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        s = torch.tensor(0.7, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
        s.requires_grad_(True)
        f(torch.zeros(weights.shape, dtype=dtype), s).backward(weights.to(dtype))
        assert s.grad is not None
        return s.grad

    weights = torch.rand(1 << 14, generator=torch.Generator().manual_seed(0)).half() / 64
    compiled = torch.compile(run, backend=tilewright.backend)
    exact = gradient(run, torch.float64)
    assert abs(gradient(compiled, torch.float16) - exact) <= 2.0**-11 * exact


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_compared_with_a_number_is_rounded(dtype: torch.dtype) -> None:
    """Unlike factors: `h > 0.3` is false where h is what the type holds of 0.3."""

    def run(h: Tensor) -> tuple[Tensor, ...]:
        return h > 0.3, h == 0.1, h <= 0.1, 0.7 > h, torch.nn.functional.hardshrink(h, 0.3)

    h = torch.linspace(-1, 1, 21).to(dtype)
    torch.testing.assert_close(tilewright.compile(run, (h,))(h), run(h), rtol=0, atol=0)
