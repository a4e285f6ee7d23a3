"""Products in loops of what is sliced are done for all steps at once; others stay in the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.capture.loops.rolled_loops import agrees, loops
from torch import Tensor

import tilewright
from tilewright.capture.loops import rolled
from tilewright.capture.loops.scanned import Scan

STEPS = 20
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Fewer steps than usual are a loop. What each body that is made calls."""
    monkeypatch.setattr(rolled, "LOOPS", replace(rolled.LOOPS, max_unrolled_steps=16))
    found: list[list[str]] = []
    plain = Scan.__init__

    def made(self: Scan, body: torch.fx.GraphModule, carried: int, sliced: int) -> None:
        found.append([getattr(n.target, "__name__", str(n.target)) for n in body.graph.nodes])
        plain(self, body, carried, sliced)

    monkeypatch.setattr(Scan, "__init__", made)
    tilewright.reset()
    torch.manual_seed(0)
    return found


LIFTED: dict[str, Product] = {
    "matmul": lambda x, w, b: x @ w,
    "method": lambda x, w, b: x.matmul(w),
    "mm": lambda x, w, b: torch.mm(x, w) + b,
    "linear": lambda x, w, b: F.linear(x, w, b),
    "a keyword": lambda x, w, b: F.linear(x, w, bias=b),
}
KEPT: dict[str, Product] = {
    "a matrix in front": lambda x, w, b: w[:3, :3] @ x,
    "addmm": lambda x, w, b: torch.addmm(b, x, w),
    "a part of a slice": lambda x, w, b: x[0] @ w,
    "of what is made": lambda x, w, b: x.exp() @ w,
}


@pytest.mark.parametrize("name", [*LIFTED, *KEPT])
def test_products_of_slices(name: str, bodies: list[list[str]]) -> None:
    product = (LIFTED | KEPT)[name]

    def run(x: Tensor, w: Tensor, b: Tensor, u: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        made: list[Tensor] = []
        for t in range(x.shape[1]):
            h = torch.tanh(product(x[:, t], w, b) + h @ u)
            made.append(h)
        return torch.stack(made), h

    agrees(
        run,
        torch.randn(3, STEPS, 8),
        torch.randn(8, 8) / 3,
        torch.randn(8),
        torch.randn(8, 8) / 3,
        torch.randn(3, 8),
    )
    (body,) = bodies
    products = sum(body.count(s) for s in ("matmul", "linear", "mm", "addmm"))
    assert products == (1 if name in LIFTED else 2)


def test_what_is_read_elsewhere_stays(bodies: list[list[str]]) -> None:
    """The slice itself is read as well; a product that leaves its step is made there."""

    def run(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left: list[Tensor] = []
        for t in range(x.shape[0]):
            seen = x[t] @ w
            h = torch.tanh(x[t] @ w.mT * h + x[t] + seen)
            left.append(seen)
        return torch.stack(left), h, x @ w

    agrees(run, torch.randn(STEPS, 3, 8), torch.randn(8, 8) / 3, torch.randn(3, 8))
    assert bodies[0].count("matmul") >= 1


def test_batches_of_matrices_stay(bodies: list[list[str]]) -> None:
    """Their dims in front would meet the steps."""

    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] @ w + h)
        return h

    agrees(run, torch.randn(STEPS, STEPS, 3, 8), torch.randn(STEPS, 8, 8) / 3, torch.randn(STEPS, 3, 8))
    assert bodies[0].count("matmul") == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_lifted_products(dynamic: bool, bodies: list[list[str]]) -> None:
    def run(x: Tensor, w: Tensor, b: Tensor, u: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 8)
        for t in range(STEPS):
            h = torch.tanh(F.linear(x[:, t], w, b) + h @ u)
        return h

    def grads(f: Callable[..., Tensor], batch: int) -> list[Tensor]:
        torch.manual_seed(batch)
        given = [torch.randn(s) / 2 for s in ((batch, STEPS, 8), (8, 8), (8,), (8, 8))]
        for t in given:
            t.requires_grad_()
        f(*given).square().sum().backward()
        return [t.grad for t in given if t.grad is not None]

    compiled = torch.compile(run, backend="tilewright", dynamic=dynamic)
    for batch in (3, 5):
        for have, want in zip(grads(compiled, batch), grads(run, batch), strict=True):
            torch.testing.assert_close(have, want, rtol=2e-5, atol=2e-5)
    assert loops() == 2 * (1 if dynamic else 2)
    assert all("linear" not in body for body in bodies)


def test_what_a_step_hands_to_the_next_is_carried(bodies: list[list[str]]) -> None:
    """A product of a slice that the next step reads, and a slice that it reads."""

    def run(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        before, last = h, h
        for t in range(x.shape[0]):
            seen = x[t] @ w
            h = torch.tanh(before + h * last)
            before, last = seen, x[t]
        return h, before

    agrees(run, torch.randn(STEPS, 3, 8), torch.randn(8, 8) / 3, torch.randn(3, 8))
    assert bodies[0].count("matmul") == 1


def test_products_without_gradient_have_none() -> None:
    """Under `no_grad` in the step, a product as well as a slice that is only read there."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        h = torch.zeros(3, 8)
        for t in range(STEPS):
            with torch.no_grad():
                seen = x[t] @ w
                part = x[t]
            h = torch.tanh(seen + part * w[:1] + h * 0.5)
        return h * w.sum()

    found: list[list[Tensor | None]] = []
    for f in (torch.compile(run, backend="tilewright"), run):
        torch.manual_seed(0)
        given = [torch.randn(s).requires_grad_() for s in ((STEPS, 3, 8), (8, 8))]
        made = f(*given)
        found.append([made.detach(), *torch.autograd.grad(made.sum(), given, allow_unused=True)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def test_products_under_another_precision_stay_in_it(bodies: list[list[str]]) -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        h = h.bfloat16()
        for t in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16):
                seen = x[t] @ w
            h = torch.tanh(seen + h * 0.5)
        return h

    x, w, h = torch.randn(STEPS, 3, 8), torch.randn(8, 8) / 3, torch.randn(3, 8)
    with torch.no_grad():
        made = torch.compile(run, backend="tilewright")(x, w, h)
        torch.testing.assert_close(made, run(x, w, h), rtol=0.02, atol=0.02)
    assert made.dtype == torch.bfloat16 and all("matmul" in body for body in bodies)


def test_products_into_a_tensor_of_the_caller_happen() -> None:
    """Beside a loop, and in one."""

    def run(x: Tensor, w: Tensor, h: Tensor, into: Tensor, beside: Tensor) -> Tensor:
        for t in range(STEPS):
            torch.mm(x[t], w, out=into)
            h = torch.tanh(into + h * 0.5)
        torch.mm(w, w, out=beside)
        return h + beside.sum()

    def apart(x: Tensor, w: Tensor, h: Tensor, into: Tensor, beside: Tensor) -> Tensor:
        for t in range(STEPS):
            h = torch.tanh(x[t] @ w + h * 0.5)
        torch.mm(w, w, out=beside)
        return h + beside.sum()

    for f in (run, apart):
        results: list[list[Tensor]] = []
        for g in (torch.compile(f, backend="tilewright"), f):
            torch.manual_seed(0)
            given = [torch.randn(s) / 3 for s in ((STEPS, 3, 8), (8, 8), (3, 8), (3, 8), (8, 8))]
            with torch.no_grad():
                results.append([g(*given), *given])
        torch.testing.assert_close(results[0], results[1])


def test_products_that_widen_stay(bodies: list[list[str]]) -> None:
    """For all steps at once they would take memory that no step needs."""

    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        for t in range(STEPS):
            h = torch.tanh((x[t] @ w).sum(-1, keepdim=True) + h)
        return h

    agrees(run, torch.randn(STEPS, 3, 4), torch.randn(4, 64) / 8, torch.randn(3, 1))
    assert bodies[0].count("matmul") == 1
