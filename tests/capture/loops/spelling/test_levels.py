"""Steps within functions of torch's that take functions (`torch.func`) are loops too, of the ops that these run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.capture.loops.part_loops import agrees, fewer, loops
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vmap  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["fewer"]
STEPS = 14
Program = Callable[[Tensor, Tensor], object]


def steps(h: Tensor, y: Tensor) -> Tensor:
    for k in range(STEPS):
        h = torch.tanh(h @ y * (0.5 + k / STEPS) + h / 2)
    return h


def total(h: Tensor, y: Tensor) -> Tensor:
    return steps(h, y).square().sum()


def descended(h: Tensor, y: Tensor) -> Tensor:
    for _ in range(STEPS):
        h = h - 0.1 * grad(lambda h: torch.cos(h @ y).sum())(h)
    return h


PROGRAMS: dict[str, tuple[int, Program]] = {
    "a gradient": (2, lambda h, y: grad(total)(h, y)),
    "of both operands": (2, lambda h, y: grad(total, argnums=(0, 1))(h, y)),
    "of each row": (2, lambda h, y: vmap(grad(total), in_dims=(0, None))(h, y)),
    "each row": (1, lambda h, y: vmap(steps, in_dims=(0, None))(h, y)),
    "forward": (1, lambda h, y: jvp(lambda h: steps(h, y), (h,), (y,))),
    "a matrix of them": (2, lambda h, y: jacrev(lambda h: steps(h, y))(h[0])),
    "steps down": (1, descended),
    "of a plain loop's result": (2, lambda h, y: grad(total)(steps(h, y), y)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_they_are_loops(name: str) -> None:
    count, run = PROGRAMS[name]
    agrees(run, torch.randn(3, 3) / 2, torch.randn(3, 3) / 2, count=count, trains=False)


@pytest.mark.parametrize("name", ["of each row", "steps down"])
def test_gradients_of_them_are_eager_s(name: str) -> None:
    count, run = PROGRAMS[name]
    agrees(run, torch.randn(3, 3) / 4, torch.randn(3, 3) / 4, count=count)


def test_weights_that_are_operands() -> None:
    layer = torch.nn.Linear(3, 3)

    def run(h: Tensor, y: Tensor) -> Tensor:
        def loss(weights: dict[str, Tensor]) -> Tensor:
            x = h
            for _ in range(STEPS):
                x = torch.tanh(functional_call(layer, weights, (x,)) + y)
            return x.sum()

        return grad(loss)({n: w.detach() for n, w in layer.named_parameters()})["weight"]

    agrees(run, torch.randn(3, 3), torch.randn(3, 3), count=2, trains=False)


def test_what_is_drawn_and_written_is_eager_s() -> None:
    def run(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found = grad(lambda h: total(h * torch.rand_like(h), y))(h)
        y.add_(found)
        return found, torch.rand(3)

    made: list[object] = []
    given = torch.randn(3, 3), torch.randn(3, 3) / 2
    for f in (run, torch.compile(run, backend="tilewright", fullgraph=True)):
        h, y = (t.clone() for t in given)
        torch.manual_seed(0)
        made.append((f(h, y), y))
    torch.testing.assert_close(made[1], made[0], rtol=2e-5, atol=2e-6)
    assert loops() == 2


def test_other_sizes_are_other_sizes() -> None:
    """What a trace learns of a size is asked of each call."""
    fast = torch.compile(PROGRAMS["of each row"][1], backend="tilewright", dynamic=True)
    for rows in (4, 5, 7):
        h, y = torch.randn(rows, 3), torch.randn(3, 3) / 2
        torch.testing.assert_close(fast(h, y), PROGRAMS["of each row"][1](h, y), rtol=2e-5, atol=2e-6)
    assert loops() == 2


def test_they_are_cast_once_under_autocast() -> None:
    """Ahead of the loop, and not again as its graph is traced."""

    def run(h: Tensor, y: Tensor) -> Tensor:
        return grad(lambda h: steps(h, y).float().sum())(h)

    h, y = torch.randn(3, 3) / 2, torch.randn(3, 3) / 2
    with torch.autocast("cpu", torch.bfloat16):
        have, want = torch.compile(run, backend="tilewright")(h, y), run(h, y)
    torch.testing.assert_close(have, want, rtol=5e-2, atol=2e-3)
    assert loops() == 2


def test_what_autograd_is_to_see_stays_apart() -> None:
    """Who is without gradients is known above the ops that a transform runs, and lost among them."""

    def run(h: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            scale = y.abs().sum()
        return grad(total)(h, y / scale)

    given = [torch.randn(3, 3, requires_grad=True) for _ in range(2)]
    have = torch.autograd.grad(torch.compile(run, backend="tilewright")(*given).sum(), given)
    torch.testing.assert_close(have, torch.autograd.grad(run(*given).sum(), given), rtol=5e-5, atol=5e-6)
    assert loops() == 0


def test_a_trace_that_fails_leaves_no_level_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("tilewright.capture.loops.spelling.flat.as_programs_do", failing)
    agrees(PROGRAMS["a gradient"][1], torch.randn(3, 3), torch.randn(3, 3) / 2, count=0, trains=False)
