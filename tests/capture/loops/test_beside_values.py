"""Steps that do more than make values of values stay apart, and mean what they meant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.capture.loops.part_loops import agrees, loops
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tilewright
from tilewright.capture.loops import rolled

STEPS = 4


@pytest.fixture(autouse=True)
def fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps would be a loop: what stays apart is compiled step by step."""
    tilewright.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(rolled, "LOOPS", replace(rolled.LOOPS, max_unrolled_steps=2))


def operands() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(STEPS, 3, 3), torch.randn(3, 3) / 3, torch.randn(3, 3)


def half(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def hook_on_a_state(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    made: list[Tensor] = []
    for t in range(STEPS):
        h = torch.tanh(x[t] + h @ w)
        made.append(h)
    if h.requires_grad:
        made[1].register_hook(half)
    return h


def hook_on_a_weight(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    w = w * 2
    for t in range(STEPS):
        if w.requires_grad:
            w.register_hook(half)
        h = torch.tanh(x[t] + h @ w)
    return h


def hook_in_each_step(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
    made: list[Tensor] = []
    for t in range(STEPS):
        h = torch.tanh(x[t] + h @ w)
        if h.requires_grad:
            h.register_hook(half)
        made.append(h)
    return torch.stack(made)


@pytest.mark.parametrize(
    ("steps", "count"), [(hook_on_a_state, 0), (hook_on_a_weight, 0), (hook_in_each_step, 2)]
)
def test_hooks_get_whole_gradients(steps: Callable[[Tensor, Tensor, Tensor], Tensor], count: int) -> None:
    given = [t.requires_grad_() for t in operands()]
    have = torch.autograd.grad(torch.compile(steps, backend="tilewright")(*given).square().sum(), given)
    want = torch.autograd.grad(steps(*given).square().sum(), given)
    torch.testing.assert_close(have, want, rtol=5e-5, atol=5e-6)
    assert loops() == count


def test_parts_that_are_read_by_their_place_in_memory() -> None:
    def steps(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        for t in range(STEPS):
            h = torch.tanh(h @ w + x[:, t].as_strided((3, 3), (STEPS * 3, 1)))
        return h

    x, w, h = operands()
    agrees(steps, x.transpose(0, 1).contiguous(), w, h, count=0)


def test_ops_that_may_raise_do() -> None:
    def steps(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        for t in range(STEPS):
            h = torch.linalg.inv(h + x[t] * w)
        return h

    x, w, _ = operands()
    fast = torch.compile(steps, backend="tilewright")
    with torch.no_grad():
        torch.testing.assert_close(fast(x, w, 3 * torch.eye(3)), steps(x, w, 3 * torch.eye(3)))
        if (
            torch.__version__ < "2.12" or torch.__version__ >= "2.13"
        ):  # 2.12 drops the check from what it traces
            with pytest.raises(torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
                fast(x * 0, w, torch.zeros(3, 3))


def test_what_a_called_function_writes_beside_a_loop_is_written() -> None:
    def run(x: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros(3, 3)

        def kept(h: Tensor) -> Tensor:
            with torch.no_grad():
                total.add_(h)
            return torch.tanh(h @ w)

        other = checkpoint(kept, h * 2, use_reentrant=False)
        assert isinstance(other, Tensor)
        for t in range(STEPS):
            h = torch.tanh(x[t] + h @ w)
        return h + other, total

    agrees(run, *operands(), trains=False)
