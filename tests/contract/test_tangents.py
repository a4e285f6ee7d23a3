"""Tangents of forward-mode differentiation: a compiled graph carries none, and says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import tilewright
from tilewright.errors import UnsupportedError


def program(x: Tensor) -> Tensor:
    """Anything that kernels compute."""
    return x.sin() * x


@pytest.mark.parametrize("entry", [tilewright.compile, partial(torch.compile, backend="tilewright")])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_tangent_is_refused_not_lost(entry: Callable[..., Any], warm: bool, dynamic: bool) -> None:
    x, t = torch.randn(2, 5).unbind()
    fast = entry(program)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    if warm:
        fast(x)
    with forward_ad.dual_level():
        with pytest.raises(UnsupportedError, match="forward mode"):
            fast(forward_ad.make_dual(x, t))
        torch.testing.assert_close(fast(x), program(x))
    torch.testing.assert_close(fast(x), program(x))


def test_forward_mode_inside_of_a_program_is_compiled() -> None:
    def both(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(program, (x,), (t,))

    x, t = torch.randn(2, 5).unbind()
    torch.testing.assert_close(torch.compile(both, backend="tilewright")(x, t), both(x, t))


def test_tangents_that_pythons_sum_adds_up() -> None:
    """Its start is a number, which torch copies as if it were a tensor."""

    def laplacian(x: Tensor) -> Tensor:
        def one(z: Tensor) -> Tensor:
            along = torch.func.grad(lambda q: q.tanh().prod())
            return sum(torch.func.jvp(along, (z,), (e,))[1][k] for k, e in enumerate(torch.eye(2)))  # pyright: ignore[reportReturnType]

        return torch.func.vmap(one)(x)

    x = torch.randn(5, 2)
    torch.testing.assert_close(torch.compile(laplacian, backend="tilewright")(x), laplacian(x))
