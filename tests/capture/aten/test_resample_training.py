"""Resampling is trained at a batch size that was unknown when its backward pass was traced."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

import tilewright

CASES = {
    "linear": (3, 8), "bilinear": (3, 6, 5), "bicubic": (3, 6, 5), "trilinear": (2, 3, 4, 3), "nearest": (3, 6, 5),
    "nearest-exact": (3, 6, 5),
}  # fmt: skip


@pytest.mark.parametrize("mode", CASES)
@pytest.mark.parametrize("last", [False, True])
def test_batches_of_any_size_have_gradients(mode: str, last: bool) -> None:
    shape = CASES[mode]
    if last and len(shape) == 2:
        pytest.skip("no memory format of such tensors has its channels last")

    def loss(x: Tensor) -> Tensor:
        return interpolate(x * 1.5, scale_factor=2, mode=mode).sin().sum()

    torch._dynamo.reset()
    found = torch.compile(loss, backend=tilewright.backend, dynamic=True)
    form = torch.contiguous_format
    if last:
        form = torch.channels_last if len(shape) == 3 else torch.channels_last_3d
    for batch in (2, 5):
        x = torch.randn(batch, *shape).to(memory_format=form).requires_grad_()
        y = x.detach().clone().requires_grad_()
        found(x).backward()
        loss(y).backward()
        torch.testing.assert_close(x.grad, y.grad)
        assert x.grad is not None and y.grad is not None and x.grad.stride() == y.grad.stride()


@pytest.mark.parametrize("mode", ["linear", "bilinear", "trilinear"])
def test_a_dim_that_keeps_its_size_is_copied_whatever_the_scale(mode: str) -> None:
    """As eager does on CPUs; torch's own parts do not."""
    scale = 1.1 if mode == "linear" else (1.1, *([1.4] * (1 if mode == "bilinear" else 2)))

    def resample(x: Tensor) -> Tensor:
        return interpolate(x, scale_factor=scale, mode=mode, recompute_scale_factor=False)

    x = torch.randn(2, *CASES[mode])
    torch._dynamo.reset()
    have = torch.compile(resample, backend=tilewright.backend)(x)
    torch.testing.assert_close(have, resample(x))
    assert have.shape[2] == x.shape[2]
