"""Ops whose kernels in eager round a product and a sum once: so do ours, and no other op does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright

Program = Callable[[Tensor, Tensor, Tensor], Tensor]

ROUNDED_ONCE: dict[str, Program] = {
    "addcmul": lambda x, a, b: torch.addcmul(x, a, b),
    "addcmul, scaled": lambda x, a, b: torch.addcmul(x, a * 1.5, b, value=1 / 1.5),
    "lists": lambda x, a, b: torch.ops.aten._foreach_addcmul.Scalar([x], [a], [b], 1.0)[0],
    "lerp": lambda x, a, b: torch.lerp(x, x + a * 16, 0.0625),
    "lerp from the end": lambda x, a, b: torch.lerp(a, x, 1 - 0.3 * b),
    "tanh_backward": lambda x, a, b: torch.ops.aten.tanh_backward(x, a / (a + 1e-3)),
}
SCALED: dict[str, Program] = {
    "add": lambda x, a, b: torch.add(x, a, alpha=0.7),
    "sub": lambda x, a, b: torch.sub(x, a, alpha=-0.7),
    "rsub": lambda x, a, b: torch.rsub(a, x, alpha=1 / 0.7) * 0.7,
    "add_": lambda x, a, b: x.clone().add_(a, alpha=0.7),
}
ROUNDED_TWICE: dict[str, Program] = {
    "sum of a product": lambda x, a, b: x + a * b,
    "difference": lambda x, a, b: x - a * -b,
}
SIZE = 1003  # vectors, and a rest
FUSES = torch.backends.cpu.get_cpu_capability() != "DEFAULT"


def operands(dtype: torch.dtype, scaled: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x, a and b, where x + a * b (or x + 0.7 * a, if `scaled`) nearly cancel."""
    made = torch.Generator().manual_seed(0)
    a, b = (torch.rand(SIZE, generator=made, dtype=dtype) + 0.5 for _ in range(2))
    near = 1 + torch.randn(SIZE, generator=made, dtype=dtype) * 1e-6
    return -a * (0.7 if scaled else b) * near, a, b


@pytest.mark.skipif(not FUSES, reason="eager has no instruction for it here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [*ROUNDED_ONCE, *SCALED, *ROUNDED_TWICE])
def test_bits_are_those_of_eager(name: str, dtype: torch.dtype) -> None:
    program = (ROUNDED_ONCE | SCALED | ROUNDED_TWICE)[name]
    given = operands(dtype, name in SCALED)
    with torch.no_grad():
        made = torch.compile(program, backend=tilewright.backend, dynamic=False)(*given)
    torch.testing.assert_close(made, program(*given), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_dynamo_writes_for_sums_in_place(dtype: torch.dtype) -> None:
    """`prims.fma`, of a tensor or a number; no library call, whose sum rounds twice."""

    def run(x: Tensor, a: Tensor, b: Tensor, s: Any) -> Tensor:
        return x.clone().addcmul_(a, b, value=0.7).addcdiv_(a, b, value=-0.3).add_(b, alpha=s)

    x, a, b = (t.to(dtype) for t in operands(torch.float64, False))
    step = torch.tensor(0.3)
    with torch.no_grad():
        made = torch.compile(run, backend=tilewright.backend, dynamic=False)(x, a, b, step)
        exact = run(x.double(), a.double(), b.double(), step.double())
    assert "library" not in str(tilewright.compilations()[-1])
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(made.double(), exact, rtol=unit, atol=3 * unit)


@pytest.mark.skipif(not FUSES, reason="eager has no instruction for it here")
def test_gradients_beside_a_cancelled_sum() -> None:
    def run(x: Tensor, a: Tensor) -> Tensor:
        return torch.addcmul(x, a, a, value=0.5).abs() ** 0.7

    a = torch.rand(SIZE, generator=torch.Generator().manual_seed(1)) + 0.5
    x = (-0.5 * a * a * (1 + torch.linspace(-1e-6, 1e-6, SIZE))).requires_grad_()
    want, made = (
        torch.autograd.grad(f(x, a).sum(), x)[0]
        for f in (run, torch.compile(run, backend=tilewright.backend, dynamic=False))
    )
    torch.testing.assert_close(made, want, rtol=3e-6, atol=0, equal_nan=True)
