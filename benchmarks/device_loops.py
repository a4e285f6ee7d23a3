"""Loops on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import tilewright
from benchmarks.device_cases import host_microseconds


def walked(x: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A recurrence over the parts of x."""

    def step(h: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(part + h @ w)
        return h, h * 2

    return scan(step, h, x)


def grown(x: Tensor) -> tuple[Tensor, ...]:
    """As many steps as data say, at most 90."""

    def goes(i: Tensor, x: Tensor) -> Tensor:
        return (i < 90) & (x.sum() < 1000)

    def step(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, x * 1.1 + 0.1

    return while_loop(goes, step, (torch.zeros((), dtype=torch.int64, device=x.device), x))


def loops() -> str:
    """Loops without Python between steps: for any number of steps, where data end them, inside a larger graph,
    backwards, with weights that move; what eager gives, and how long a step takes."""
    w = torch.randn(64, 64, device="cuda") / 8
    said: list[str] = []
    for graphs in (False, True):
        run = torch.compile(walked, backend=tilewright.backend, dynamic=True, options={"cuda_graphs": graphs})
        with torch.no_grad():
            for n in (100, 100, 100, 7, 7, 300, 64, 64):
                x, h = torch.randn(n, 3, 64, device="cuda"), torch.randn(3, 64, device="cuda")
                moved = w.clone() if n == 300 else w
                torch.testing.assert_close(run(x, h, moved), walked(x, h, moved), rtol=1e-4, atol=1e-4)
            x, h = torch.randn(256, 3, 64, device="cuda"), torch.randn(3, 64, device="cuda")
            for _ in range(4):
                run(x, h, w)
            us = host_microseconds(lambda run=run, x=x, h=h: run(x, h, w)[0].sum().item(), 20) / 256
            said.append(f"{us:.1f} us a step{' in a graph of the whole' if graphs else ''}")
    eager = host_microseconds(lambda: walked(x, h, w)[0].sum().item(), 3) / 256
    grow = torch.compile(grown, backend=tilewright.backend)
    with torch.no_grad():
        for x in (
            torch.rand(50, device="cuda"),
            torch.rand(50, device="cuda") - 3,
            torch.rand(50, device="cuda") + 90,
        ):
            for _ in range(3):
                torch.testing.assert_close(grow(x), grown(x))
    layer, x = torch.nn.GRU(32, 48, bidirectional=True).cuda(), torch.randn(150, 4, 32, device="cuda")
    singles = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    with torch._dynamo.config.patch(allow_rnn=True), torch.no_grad(), singles:
        fast = torch.compile(layer, backend=tilewright.backend)
        for _ in range(3):
            torch.testing.assert_close(fast(x)[0], layer(x)[0], rtol=1e-4, atol=1e-5)
        held = sum(c.name == "loop" for made in tilewright.compilations() for c in made.calls)
        ours = host_microseconds(lambda: fast(x)[0].sum().item(), 20)
        library = host_microseconds(lambda: layer(x)[0].sum().item(), 20)
    return f"{', '.join(said)}, eager {eager:.1f}; {held} loops; GRU {ours:.0f} us, cuDNN {library:.0f}"
