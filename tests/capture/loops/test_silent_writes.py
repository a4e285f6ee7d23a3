"""Python loops whose steps write, or draw, or branch, in ways that torch's scans do not know by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from tests.capture.loops.part_loops import agrees, fewer, gradients, loops
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tilewright
from tilewright.capture.loops.recurrent import SCANS_DIFFERENTIATE
from tilewright.capture.modes import kept_modes

__all__ = ["fewer"]
STEPS = 12


def operands() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(STEPS, 3, 8), torch.randn(8, 8) / 3, torch.randn(3, 8)


def test_parts_that_are_written_without_gradients() -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.zeros(STEPS, 3, 8)
        for t in range(STEPS):
            h = torch.tanh(x[t] + h @ w)
            with torch.no_grad():
                kept[t] = h * 2
        return h, kept

    agrees(run, *operands())


def test_parts_of_what_asks_for_gradients_that_are_written_without() -> None:
    """Its gradient passes the write by, as if nothing had been written."""

    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        kept = torch.sin(x)
        for t in range(STEPS):
            h = torch.tanh(x[t] + h @ w)
            with torch.no_grad():
                kept[t] = h
        return h + kept.sum(0)

    agrees(run, *operands())


def test_parts_of_what_asks_for_gradients_that_are_read_again() -> None:
    """The gradient of what is read there goes to what made the tensor, not to what was written."""

    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        kept = torch.sin(x)
        for t in range(STEPS - 1):
            h = torch.tanh(x[t] + kept[t] * 0.3 + h @ w)
            with torch.no_grad():
                kept[t + 1] = h
        return h

    given = operands()
    have = gradients(torch.compile(run, backend="tilewright"), given)
    torch.testing.assert_close(have, gradients(run, given), rtol=5e-5, atol=5e-6)


def test_what_is_first_read_in_inference_mode_keeps_its_gradient() -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        made: list[Tensor] = []
        for t in range(STEPS):
            h = torch.tanh(x[t] + h @ w)
            made.append(h)
        with torch.inference_mode():
            made[2].sum()
        return h, made[2] * 2

    agrees(run, *operands())


def test_modes_that_a_failing_trial_entered_are_left() -> None:
    """Then the steps stay apart, with gradients and in their own precision."""
    with pytest.raises(ZeroDivisionError), kept_modes():
        torch.autocast("cpu", dtype=torch.float16).__enter__()
        torch.inference_mode().__enter__()
        torch.set_grad_enabled(False)
        raise ZeroDivisionError
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert not torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
    with torch.autocast("cpu"):
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("branches", [True, False])
def test_what_is_first_read_without_gradients_keeps_its_own(branches: bool) -> None:
    """What a loop left is copied where it is first read."""
    if branches and not SCANS_DIFFERENTIATE:
        pytest.skip("this torch trains no branches of a step")

    def run(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made: list[Tensor] = []
        for t in range(STEPS):
            if branches:
                h = torch.cond(h.sum() > 0, lambda h: h * 0.5, lambda h: h * 0.7, (h,))
            h = torch.tanh(x[t] + h @ w)
            made.append(h)
        with torch.no_grad():
            scale = made[2].sum() + h.abs().max()
        return h * scale, made[2] * 2, scale

    def both(f: Callable[..., Sequence[Tensor]]) -> list[object]:
        leaves = [t.clone().requires_grad_() for t in given]
        a, b, scale = f(*leaves)
        asks = [t.requires_grad for t in (a, b, scale)]
        return [asks, a.detach(), b.detach(), scale, *torch.autograd.grad(a.sum() + b.sum(), leaves)]

    given = operands()
    have = both(torch.compile(run, backend="tilewright"))
    torch.testing.assert_close(have, both(run), rtol=5e-5, atol=5e-6)
    assert loops() == 2


def test_a_mean_that_is_kept_without_gradients() -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        mean = torch.zeros(8)
        for t in range(STEPS):
            h = torch.tanh(x[t] + h @ w - mean)
            with torch.no_grad():
                mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return h, mean

    agrees(run, *operands(), trains=False)
    tilewright.reset()
    given = operands()
    have = gradients(torch.compile(run, backend="tilewright"), given)
    torch.testing.assert_close(have, gradients(run, given), rtol=5e-5, atol=5e-6)


@pytest.mark.skipif(
    not SCANS_DIFFERENTIATE, reason="this torch fails where a step differentiates nothing of a state"
)
def test_batch_norm_in_training() -> None:
    def trained(compiled: bool) -> list[Tensor]:
        torch.manual_seed(1)
        norm, (x, w, h) = nn.BatchNorm1d(8), operands()
        w.requires_grad_()

        def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
            for t in range(STEPS):
                h = torch.tanh(norm(x[t] + h @ w))
            return h

        f = torch.compile(run, backend="tilewright", fullgraph=True) if compiled else run
        made = f(x, w, h)
        (made * torch.linspace(-1, 1, made.numel()).view_as(made)).sum().backward()
        return [
            made.detach(),
            *(p.grad for p in (w, *norm.parameters()) if p.grad is not None),
            *norm.buffers(),
        ]

    torch.testing.assert_close(trained(compiled=True), trained(compiled=False), rtol=2e-4, atol=2e-5)
    assert loops() == 2


@pytest.mark.parametrize("conjugates", [True, False])
def test_complex_states_and_their_gradients(conjugates: bool) -> None:
    def run(x: Tensor, w: Tensor, decay: Tensor) -> Tensor:
        h = x[0]
        made: list[Tensor] = []
        for t in range(STEPS):
            h = torch.polar(torch.sigmoid(decay), decay) * (h.conj() if conjugates else h) @ w + x[t]
            made.append(h.abs())
        return torch.stack(made) + torch.view_as_real(h).sum()

    given = torch.randn(STEPS, 3, 8, dtype=torch.complex64), torch.randn(8, 8, dtype=torch.complex64) / 6
    found: list[Sequence[Tensor]] = []
    for f in (torch.compile(run, backend="tilewright", fullgraph=True), run):
        leaves = [t.clone().requires_grad_() for t in (*given, torch.linspace(0, 1, 8))]
        made = f(*leaves)
        found.append([made.detach(), *torch.autograd.grad(made.square().sum(), leaves)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    assert loops() == 2


def test_random_numbers_of_checkpointed_steps_are_kept() -> None:
    """Computed again they would be others."""

    def run(h: Tensor, w: Tensor) -> Tensor:
        for _ in range(STEPS):
            made = checkpoint(
                lambda h: F.dropout(torch.tanh(h @ w), 0.3) + torch.rand_like(h), h, use_reentrant=False
            )
            assert isinstance(made, Tensor)
            h = made
        return h

    given = torch.randn(3, 8), torch.randn(8, 8) / 3
    found: list[list[Tensor | None]] = []
    for f in (torch.compile(run, backend="tilewright"), run):
        torch.manual_seed(5)
        found.append([*gradients(f, given), torch.rand(3)])
    torch.testing.assert_close(found[0], found[1], rtol=2e-5, atol=2e-6)
    assert loops() == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_branches_that_the_state_decides() -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        for t in range(STEPS):
            h = torch.cond(
                h.sum() > 0, lambda a, h: torch.tanh(a + h @ w), lambda a, h: torch.sin(a - h), (x[t], h)
            )
        return h

    agrees(run, *operands(), trains=SCANS_DIFFERENTIATE)
