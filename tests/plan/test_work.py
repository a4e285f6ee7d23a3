"""What people are told that a kernel or call computes."""

from __future__ import annotations

import pytest
import torch

import tilewright


@pytest.mark.parametrize("padding", [0, 1])
def test_where_a_window_leaves_its_input_is_no_work(padding: int) -> None:
    """A padded convolution was told to do five times the work of one without padding, and stood above the roof."""
    inside = 10 + 2 * padding - 2
    convolution = torch.nn.Conv2d(8, 4, 3, padding=padding, bias=False)
    with torch.no_grad():
        compiled = tilewright.compile(convolution, (torch.randn(1, 8, 10, 10),))
    (record,) = (*compiled.calls, *compiled.kernels)
    assert record.flops == 2 * 4 * 8 * 9 * inside * inside  # type: ignore[attr-defined]


def test_what_data_decide_is_work() -> None:
    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (1, 1)) + 1

    def positive(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x + 1, 0)

    x = torch.randn(8, 8)
    (first,), (second,) = (tilewright.compile(f, (x,)).kernels for f in (padded, positive))
    assert first.flops == 8 * 10 and second.flops == 3 * 64  # type: ignore[attr-defined]
