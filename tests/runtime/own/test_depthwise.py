"""Convolutions of each channel on its own: windows in registers and any others, borders, activations."""

from __future__ import annotations

import pytest
import torch
from tests.support.own_products import products, sizes
from torch import Tensor
from torch.nn import functional as F

from tilewright.ir.ops.epilogue import activations
from tilewright.library.offers.offer import FrozenProduct, epilogues_of


@pytest.mark.parametrize("kernel", [(3, 3), (5, 5), (7, 7), (3, 5), (2, 2)])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("channels", [5, 16, 37, 64])
def test_windows_of_any_kind(kernel: tuple[int, int], stride: int, channels: int) -> None:
    w, b = torch.randn(channels, 1, *kernel), torch.randn(channels)
    for shape in ((2, channels, 9, 11), (1, channels, 13, 8)):
        for padding in ((0, 0), (1, 2), (kernel[0] // 2, kernel[1] // 2)):
            x = torch.randn(shape)
            window = (stride, stride), padding, (1, 1), channels
            want = F.conv2d(x.double(), w.double(), b.double(), *window)
            made = products(2)(FrozenProduct(w, b, sizes(x), sizes(want), *window))
            assert made is not None
            torch.testing.assert_close(made.function(x), want.float(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("channels", [5, 40])
def test_every_activation(channels: int) -> None:
    x, w = torch.randn(1, channels, 8, 7), torch.randn(channels, 1, 3, 3)
    x[0, 1, 3, 3] = torch.nan
    window = (1, 1), (1, 1), (1, 1), channels
    plain = F.conv2d(x, w, None, *window)
    call = products(2)(FrozenProduct(w, None, sizes(x), sizes(plain), *window))
    assert call is not None
    by_name = {
        name: e for e in epilogues_of(call) for name, body in activations().items() if e.template is body
    }
    wanted = {
        "relu": plain.relu(),
        "clamp": plain.clamp(0.0, 6.0),
        "silu": F.silu(plain),
        "gelu": F.gelu(plain),
        "tanh": plain.tanh(),
    }
    for name, want in wanted.items():
        made = by_name[name].make((0.0, 6.0) if name == "clamp" else (), None).function(x)
        assert isinstance(made, Tensor)
        torch.testing.assert_close(made, want, rtol=1e-5, atol=1e-5, equal_nan=True)
