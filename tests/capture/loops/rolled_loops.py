"""Python loops that are rolled: compiled, counted and compared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import tilewright


def loops() -> int:
    """How many loops the graphs compiled so far hold."""
    return sum("tilewright_loop" in str(call) for c in tilewright.compilations() for call in c.calls)


def close(have: object, want: object) -> None:
    torch.testing.assert_close(have, want, rtol=2e-5, atol=2e-6)


def agrees(f: Callable[..., object], *args: object, count: int = 1) -> None:
    """Results of `f` compiled are eager's, and its graph holds `count` loops."""
    with torch.no_grad():
        close(torch.compile(f, backend="tilewright", fullgraph=True)(*args), f(*args))
    assert loops() == count


def weights(n: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(n, n) / 4, torch.randn(n, n) / 4
