"""Numbers that change with the step in ops that take no tensor in their place: opened into arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.capture.loops.part_loops import agrees, fewer
from torch import Tensor
from torch._ops import OpOverload

from tilewright.capture.loops.numbers.openings import rule_of

__all__ = ["fewer"]
STEPS = 9
Step = Callable[[Tensor, Tensor, float], Tensor]

STEPPED: dict[str, Step] = {
    "a threshold": lambda h, y, s: F.softplus(torch.sin(h + y), 1.0, s - 0.3),
    "a power": lambda h, y, s: F.normalize(torch.sin(h + y), p=1 + s, dim=1),
    "distances": lambda h, y, s: 0.5 * h + 0.1 * torch.cdist(h, y, p=1.2 + s),
    "groups": lambda h, y, s: F.group_norm(torch.sin(h + y), 2, eps=s),
    "attention": lambda h, y, s: F.scaled_dot_product_attention(h[None], y[None], h[None], scale=s)[0],
    "margins": lambda h, y, s: torch.sin(h + y + F.multi_margin_loss(h, torch.arange(6), margin=s)),
    "a spread": lambda h, y, s: torch.sin(h + y) + torch.std_mean(y, 1, correction=s, keepdim=True)[0],
    "written again": lambda h, y, s: F.normalize(torch.sin(h + y), eps=s).t().add_(s).t(),
    "numbers alone": lambda h, y, s: torch.sin(h + y * torch.tensor([s, 1, 2, s, 4, 5]) + torch.linspace(0, s, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPPED)
def test_they_are_one_loop(name: str) -> None:
    def run(h: Tensor, y: Tensor) -> Tensor:
        for k in range(STEPS):
            h = STEPPED[name](h, y, 0.1 + 0.05 * k)
        return h

    agrees(run, torch.randn(6, 6) / 2, torch.randn(6, 6) / 2)


EDGES: dict[str, Step] = {
    "points that lie together": lambda h, y, s: h / 2 + torch.cdist(y, y.clone(), p=1.2 + s) / 9,
    "a row of zeros": lambda h, y, s: h / 2 + F.normalize(y, p=1 + s, dim=1),
    "where pieces meet": lambda h, y, s: h / 2 + F.softplus(y, 1.0, round(s)) + F.hardshrink(y, round(s)),
    "a bend below 0": lambda h, y, s: h / 2 + F.celu(-y, alpha=-s) + F.celu(60 * y, alpha=-s),
    "nothing apart": lambda h, y, s: h / 2 + torch.dist(y, y, p=2 + s),
}


@pytest.mark.parametrize("name", EDGES)
def test_gradients_where_the_slope_leaps_are_eager_s(name: str) -> None:
    def run(h: Tensor, y: Tensor) -> Tensor:
        for k in range(STEPS):
            h = EDGES[name](h, y, 0.1 + 0.05 * k)
        return h

    agrees(run, torch.randn(3, 3), torch.tensor([[0.0, 1, 2], [0, 0, 0], [0, 1, 2]]))


def test_operands_of_each_step_stay_its_own() -> None:
    """Also where all steps read one of them besides."""

    def run(h: Tensor, *own: Tensor) -> Tensor:
        for k in range(STEPS):
            h = torch.sin(h) + F.normalize(own[k], p=1.1 + 0.05 * k, dim=1) * own[1]
        return h

    agrees(run, *(torch.randn(6, 6) for _ in range(STEPS + 1)))


def test_what_gets_no_gradient_has_none() -> None:
    def run(h: Tensor, y: Tensor) -> Tensor:
        for k in range(STEPS):
            h = torch.sin(h + F.hinge_embedding_loss(h, y.sign(), margin=0.1 + 0.05 * k))
        return h

    agrees(run, torch.randn(6, 6), torch.randn(6, 6))


def test_a_first_step_that_is_opened_otherwise() -> None:
    """Nothing is added where the factor is zero."""

    def run(h: Tensor, y: Tensor) -> Tensor:
        for k in range(STEPS + 1):
            h = torch.sin(torch.addr(h, y[0], y[1], alpha=0.3, beta=0.1 * k))
        return h

    agrees(run, torch.randn(6, 6), torch.randn(6, 6))


ALONE: dict[str, Step] = {
    "a norm of 1 and others": lambda h, y, s: torch.sin(h + F.normalize(y, p=5 * s, dim=1)),
    "another mode": lambda h, y, s: _in_halves(h @ y, s),
}


def _in_halves(x: Tensor, s: float) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.local_response_norm(x[None], 2, alpha=s)[0].float()


@pytest.mark.parametrize("name", ALONE)
def test_others_stay_apart(name: str) -> None:
    def run(h: Tensor, y: Tensor) -> Tensor:
        for s in (0.1, 0.2, 0.4, 0.3, 0.2, 0.1, 0.4, 0.2, 0.25):
            h = ALONE[name](h, y, s)
        return h

    agrees(run, torch.randn(6, 6), torch.rand(6, 6) + 1, count=0, trains=False)


def test_a_step_whose_images_have_channels_innermost() -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        for k in range(STEPS):
            x = F.group_norm(torch.sin(x + y), 2, eps=0.01 * (k + 1))
        return x

    images = torch.randn(2, 4, 3, 3)
    agrees(run, images.to(memory_format=torch.channels_last), torch.randn(2, 4, 3, 3))


@pytest.mark.parametrize("refused", ["beta", "alpha"])
def test_numbers_that_an_op_refuses_are_refused_in_a_loop(refused: str) -> None:
    def run(x: Tensor) -> Tensor:
        total = torch.zeros(())
        for k in range(STEPS):
            s = 4.0 - k
            total = 0.5 * total + (
                F.smooth_l1_loss(x, -x, beta=s) if refused == "beta" else F.celu(x, s).sum()
            )
        return total

    for f in (run, torch.compile(run, backend="tilewright")):
        with pytest.raises(Exception, match=r"negative values for beta|ZeroDivisionError"):
            f(torch.randn(4))


@pytest.mark.parametrize("steps", [1, STEPS])
def test_a_logit_of_an_eps_below_0_has_no_gradient_beyond_0_and_1(steps: int) -> None:
    def run(h: Tensor, x: Tensor) -> Tensor:
        for k in range(steps):
            h = h / 2 + torch.logit(x, eps=-0.1 * (k + 1))
        return h

    found: list[Tensor] = []
    for f in (run, torch.compile(run, backend="tilewright")):
        x = torch.tensor([-2.0, -0.05, 0.2, 0.5, 1.05, 3.0], requires_grad=True)
        f(torch.zeros(6), x).sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], equal_nan=True)


def test_a_softplus_of_a_beta_of_0_has_the_gradient_of_the_op() -> None:
    def run(h: Tensor, y: Tensor) -> Tensor:
        for k in range(STEPS):
            h = h / 2 + torch.cos(1 / F.softplus(y, float(k % 3)))
        return h

    x = torch.tensor([[0.0, 1, 2], [0.5, -1, 3]])
    agrees(run, torch.zeros(2, 3), x)


@pytest.mark.parametrize("op", [torch.ops.aten.std.correction, torch.ops.aten.var.correction])
def test_a_spread_is_rounded_once_as_torch_s_is(op: OpOverload) -> None:
    rule = rule_of(op)
    assert rule is not None
    for _ in range(50):
        x = torch.randn(6, 6) * 10
        torch.testing.assert_close(rule(x, correction=0.3), op(x, correction=0.3), rtol=0, atol=0)
