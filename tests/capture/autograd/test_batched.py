"""Gradients of many results at once, as torch.autograd takes them outside of a compiled function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.functional import jacobian


def program(x: Tensor, w: Tensor) -> Tensor:
    """Calls and kernels, and a saved tensor that no gradient depends on."""
    return F.softmax(torch.tanh(x @ w).cumsum(0), -1) * (x[:, :3] > 0)


@pytest.fixture
def fast() -> Callable[[Tensor, Tensor], Tensor]:
    torch._dynamo.reset()
    return torch.compile(program, backend="tilewright")


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 5, requires_grad=True), torch.randn(5, 3, requires_grad=True)


def test_jacobians(fast: Callable[[Tensor, Tensor], Tensor]) -> None:
    given = inputs()
    torch.testing.assert_close(
        jacobian(fast, given, vectorize=True), jacobian(program, given, vectorize=True)
    )


@pytest.mark.parametrize("count", [1, 6])
def test_batches_of_gradients(fast: Callable[[Tensor, Tensor], Tensor], count: int) -> None:
    given, v = inputs(), torch.randn(count, 4, 3)

    def gradients(f: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(f(*given), given, v, is_grads_batched=True)

    for made, want in zip(gradients(fast), gradients(program), strict=True):
        assert made.shape == want.shape
        torch.testing.assert_close(made, want)


def test_batches_within_batches(fast: Callable[[Tensor, Tensor], Tensor]) -> None:
    given, v = inputs(), torch.randn(2, 3, 4, 3)

    def gradients(f: Callable[[Tensor, Tensor], Tensor], inner: bool) -> Tensor:
        y = f(*given)

        def one(g: Tensor) -> Tensor:
            """A batch of gradients for one of a batch, or one that is not of the batch, beside it."""
            if inner:
                return torch.autograd.grad(y, given[0], g, is_grads_batched=True, retain_graph=True)[0]
            return torch.autograd.grad(y, given[0], v[0, 0], retain_graph=True)[0] * g.sum()

        return torch._vmap_internals._vmap(one)(v)

    for inner in (True, False):
        torch.testing.assert_close(gradients(fast, inner), gradients(program, inner))


def test_results_of_which_one_has_no_gradient() -> None:
    x = torch.randn(4, 5, requires_grad=True)

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().cumsum(0), x.exp()

    fast = torch.compile(two, backend="tilewright")
    v = torch.randn(3, 4, 5)
    made, want = (torch.autograd.grad(f(x)[1], x, v, is_grads_batched=True)[0] for f in (fast, two))
    torch.testing.assert_close(made, want)
