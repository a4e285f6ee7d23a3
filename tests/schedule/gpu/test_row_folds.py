"""Folds of rows whose columns lie in the lanes: what their parts cost a block, and which kernels that makes."""

from __future__ import annotations

import torch
from tests.support.triton.absent_gpu import compiled
from torch import Tensor

from tilewright.ir.schedule import Role


def pooled(x: Tensor) -> Tensor:
    """The mean over all places, normed."""
    return torch.nn.functional.layer_norm(x.mean((2, 3)), (768,))


def image(batch: int) -> Tensor:
    return torch.randn(batch, 768, 7, 7).half().contiguous(memory_format=torch.channels_last)


def test_a_norm_of_what_one_image_is_pooled_to_is_a_kernel_of_its_own() -> None:
    """One block would fold all rows: on an H200 it took 87 us, 30 of them for each time that it pools."""
    device = compiled(pooled, [image(1)])
    first, second = device.kernels
    assert any(c.role is Role.GRID and c.tile > 1 for c in first.schedule.tiling.classes)
    assert not any(c.role is Role.GRID for c in second.schedule.tiling.classes)
    x = image(1)
    (made,), _ = device.run([x])
    torch.testing.assert_close(made, pooled(x), atol=2e-3, rtol=2e-3)
