"""What each step of a loop saves alike for its backward pass is saved once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

import tilewright
from tilewright.capture.loops import rolled
from tilewright.ir.graph import Loop, Value
from tilewright.ir.sizes import dims
from tilewright.pipeline.backends.cpu import CpuBackend
from tilewright.runtime.loops.call import LoopRunner
from tilewright.tuning.thresholds import LOOPS

STEPS, WIDTH = 20, 24


@pytest.fixture(autouse=True)
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int | None, ...]]]:
    """The shapes of what each step of a loop stacks, by loop in the order in which they are compiled."""
    monkeypatch.setattr(rolled, "LOOPS", replace(rolled.LOOPS, max_unrolled_steps=16))
    found: list[list[tuple[int | None, ...]]] = []
    plain = CpuBackend.loop_runner

    def looked(self: CpuBackend, loop: Loop, *args: Any, **named: Any) -> LoopRunner:
        parts = [v for v in loop.body.outputs if isinstance(v, Value)][loop.carried :]
        found.append([tuple(map(dims.static, v.shape)) for v in parts])
        return plain(self, loop, *args, **named)

    monkeypatch.setattr(CpuBackend, "loop_runner", looked)
    tilewright.reset()
    torch.manual_seed(0)
    return found


def gradients(f: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    given = [t.detach().clone().requires_grad_() for t in inputs]
    made = f(*given)
    return [made.detach(), *torch.autograd.grad(made.square().sum(), given)]


def agrees(f: Callable[..., Tensor], *inputs: Tensor, dynamic: bool = False) -> None:
    compiled = torch.compile(f, backend="tilewright", dynamic=dynamic)
    for have, want in zip(gradients(compiled, *inputs), gradients(f, *inputs), strict=True):
        torch.testing.assert_close(have, want, rtol=2e-4, atol=2e-4)


def cell(x: Tensor, u: Tensor, gate: Tensor) -> Tensor:
    """Reads a weight, what is made of another one in each step, and a number."""
    h = x.new_zeros(x.shape[1:])
    for row in x:
        h = torch.tanh(h @ u * gate.sigmoid() + row * gate.sum())
    return h


SHAPES = ((STEPS, 3, WIDTH), (WIDTH, WIDTH), (WIDTH,))


def test_a_free_size_that_a_step_saves_is_not_stacked(stacks: list[list[tuple[int | None, ...]]]) -> None:
    agrees(cell, *(torch.randn(s) / 5 for s in SHAPES), dynamic=True)
    assert len(stacks) == 2


def test_no_weight_is_saved_for_each_step(stacks: list[list[tuple[int | None, ...]]]) -> None:
    agrees(cell, *(torch.randn(s) / 5 for s in SHAPES))
    forward, _ = stacks
    assert forward and not any(shape[-2:] in ((WIDTH, WIDTH), (WIDTH,)) for shape in forward)


def test_a_layer_of_torchs(stacks: list[list[tuple[int | None, ...]]]) -> None:
    layer = nn.GRU(8, WIDTH)
    x = torch.randn(LOOPS.max_unrolled_steps + 6, 3, 8)
    found: list[list[Tensor]] = []
    with torch._dynamo.config.patch(allow_rnn=True):
        for f in (torch.compile(layer, backend="tilewright"), layer):
            made = f(x)[0]
            found.append([made.detach(), *torch.autograd.grad(made.square().sum(), list(layer.parameters()))])
    for have, want in zip(*found, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
    assert stacks[0] and not any(WIDTH in shape[:1] or 3 * WIDTH in shape[:1] for shape in stacks[0])


def test_steps_whose_number_is_not_known(stacks: list[list[tuple[int | None, ...]]]) -> None:
    def run(x: Tensor, u: Tensor) -> Tensor:
        def step(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(h @ u + row)
            return h, h.clone()

        return scan(step, x[0] * u.sum(), x)[1]

    def plain(x: Tensor, u: Tensor) -> Tensor:
        h, made = x[0] * u.sum(), []
        for row in x:
            h = torch.tanh(h @ u + row)
            made.append(h)
        return torch.stack(made)

    compiled = torch.compile(run, backend="tilewright", dynamic=True)
    for n in (7, 12, 5):
        x, u = torch.randn(n, 3, WIDTH), torch.randn(WIDTH, WIDTH) / 5
        for have, want in zip(gradients(compiled, x, u), gradients(plain, x, u), strict=True):
            torch.testing.assert_close(have, want, rtol=2e-4, atol=2e-4)
    assert stacks[0] and (WIDTH, WIDTH) not in stacks[0]


def test_what_is_drawn_is_saved_of_each_step() -> None:
    """Steps that draw stay apart; a scan that only reads weights keeps one slice, which says how many steps it has."""

    def run(w: Tensor, u: Tensor) -> Tensor:
        h = w[0]
        for _ in range(STEPS):
            h = torch.sin(h @ u) * w.sigmoid()[0]
        return h

    agrees(run, torch.randn(3, WIDTH), torch.randn(WIDTH, WIDTH) / 5)


def test_what_the_caller_gets_of_each_step_lies_as_before() -> None:
    """A result that is the same in each step is still one for each: writes to one show in no other."""

    def run(h: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return scan(lambda h, part: (torch.tanh(h @ w + part), w.sin()), h, x)

    h, x, w = torch.randn(3, 4), torch.randn(5, 3, 4), torch.randn(4, 4).requires_grad_()
    last, made = torch.compile(run, backend="tilewright")(h, x, w)
    assert made.stride() == (16, 4, 1)
    (last.sum() + made.sum()).backward()
    assert w.grad is not None
    with torch.no_grad():
        made[0].add_(1)
        torch.testing.assert_close(made[1:], w.sin().expand(4, 4, 4))


def test_what_fails_in_us_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what torch cannot trace is compiled without its loops."""

    def broken(*_: object, **__: object) -> LoopRunner:
        raise AssertionError("a defect of ours")

    monkeypatch.setattr(CpuBackend, "loop_runner", broken)
    with pytest.raises(Exception, match="a defect of ours"):
        agrees(cell, *(torch.randn(s) / 5 for s in SHAPES))
