"""Ops that move, cut, sum or measure by numbers that change with the step, and steps that come in turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.capture.loops.part_loops import agrees, fewer, loops
from torch import Tensor
from torch.torch_version import TorchVersion

import tilewright

__all__ = ["fewer"]

STEPS = 12
Step = Callable[[Tensor, Tensor, int], Tensor]

STEPPED: dict[str, Step] = {
    "rolled": lambda h, y, k: torch.sin(h.roll(k, 1) + torch.roll(y, (k, -k), (0, 1)) + y.roll(-k)),
    "triangles": lambda h, y, k: torch.sin(h).tril(k - 3) + torch.triu(y, diagonal=3 - k),
    "huber": lambda h, y, k: torch.sin(h + F.huber_loss(h, y, delta=0.1 + 0.05 * k)),
    "smooth l1": lambda h, y, k: torch.sin(h + F.smooth_l1_loss(h, y, reduction="none", beta=0.25 * k)),
    "smoothed labels": lambda h, y, k: torch.sin(
        h + y * F.cross_entropy(h, torch.arange(6) % 4, label_smoothing=k / 20)
    ),
    "smoothed shares": lambda h, y, k: torch.sin(
        h + F.cross_entropy(h, y.softmax(1), label_smoothing=k / 20)
    ),
    "quantiles": lambda h, y, k: torch.sin(h + torch.quantile(y * h, k / 11, dim=1)),
    "norms": lambda h, y, k: torch.sin(h + y / 9 * torch.norm(h, p=0.5 + k, dim=1, keepdim=True)),
    "momentum": lambda h, y, k: (
        F.batch_norm(h, torch.zeros(6), torch.ones(6), training=True, momentum=1 / (k + 1)).sin() + y
    ),
    "in place": lambda h, y, k: F.leaky_relu(F.elu(torch.sin(h + y), 0.1 * k, inplace=True), 0.1 * k, True),
    "added at indices": lambda h, y, k: torch.sin(h).index_add(0, torch.tensor([1, 2]), y[:2], alpha=0.1 * k),
}


@pytest.mark.parametrize("name", STEPPED)
def test_by_numbers_that_change(name: str) -> None:
    if name == "quantiles" and TorchVersion(torch.__version__) < "2.13":
        pytest.skip("older versions of torch cut the graph at quantiles")

    def run(h: Tensor, y: Tensor) -> Tensor:
        for k in range(STEPS):
            h = STEPPED[name](h, y, k)
        return h

    # Eager mode has no gradient of what overwrites a result that it needs again.
    agrees(run, torch.randn(6, 6) / 2, torch.randn(6, 6) / 2, trains=name != "in place")


def test_diagonals() -> None:
    def run(h: Tensor, m: Tensor) -> Tensor:
        for k in range(STEPS):
            h = torch.sin(h + m.diagonal(offset=k) + torch.diagonal(m, 3))
        return h

    agrees(run, torch.randn(6), torch.randn(6, 20))


def test_a_diagonal_that_is_written_stays_one() -> None:
    def run(h: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        for k in range(STEPS):
            shown = m.diagonal(k)
            shown.mul_(0.5)
            h = torch.sin(h + m.mean(1) + shown)
        return h, m * 1

    agrees(run, torch.randn(6), torch.randn(6, 20), count=0, trains=False)


def test_buffers_of_a_norm() -> None:
    """Written without gradients: what training them in a loop would need, torch refuses to trace."""

    def run(h: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for k in range(STEPS):
            h = torch.sin(F.batch_norm(h, mean, var, training=True, momentum=1 / (k + 1)))
        return h, mean * 1, var * 1

    agrees(run, torch.randn(6, 4), torch.zeros(4), torch.ones(4), trains=False)


@pytest.mark.parametrize("last", [False, True])
def test_a_norm_without_a_formula_keeps_steps_apart(last: bool) -> None:
    """The twin knows no norm of order infinity."""

    def run(h: Tensor, y: Tensor) -> Tensor:
        for k in range(STEPS):
            order = float("inf") if last and k == 7 else 1.0 + k
            h = torch.sin(h + y * torch.linalg.vector_norm(h, order))
        return h

    agrees(run, torch.randn(6), torch.randn(6) / 4, count=0 if last else 1)


def test_nothing_of_what_a_triangle_cuts_counts() -> None:
    def run(h: Tensor, y: Tensor) -> Tensor:
        for k in range(STEPS):
            h = y + torch.sin(h).tril(k - STEPS)
        return h

    with torch.no_grad():
        h = torch.full((3, 3), float("nan"))
        have = torch.compile(run, backend="tilewright", fullgraph=True)(h, torch.ones(3, 3))
    assert torch.equal(have, run(h, torch.ones(3, 3)).nan_to_num(7)) and loops() == 1


TURNS: dict[str, Step] = {
    "flips": lambda h, y, k: torch.sin(h.flip(k % 2) + y),
    "of two lengths": lambda h, y, k: torch.sin(torch.cumsum(h, k % 2) / 4 + y.rot90(k % 3)),
    "beside numbers": lambda h, y, k: torch.sin(h.flip(k % 2) + y / (k + 1)).clamp(-0.1 * k, 1),
}


@pytest.mark.parametrize("name", TURNS)
def test_steps_in_turns_are_one(name: str) -> None:
    def run(h: Tensor, y: Tensor) -> Tensor:
        for k in range(50):
            h = TURNS[name](h, y, k)
        return h

    tilewright.reset()
    agrees(run, torch.randn(4, 4) / 2, torch.randn(4, 4) / 2, trains=name == "flips")


def test_a_turn_left_out_keeps_steps_apart() -> None:
    def run(h: Tensor, y: Tensor) -> Tensor:
        for k in range(14):
            h = torch.sin(h.flip(0 if k == 7 else k % 2) + y)
        return h

    agrees(run, torch.randn(4, 4), torch.randn(4, 4), count=0, trains=False)
