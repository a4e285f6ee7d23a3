"""Convolutions of each channel on its own: windows in registers and any others, borders, activations."""

from __future__ import annotations

import pytest
import torch
from tests.support.own_products import products, sizes
from torch import Tensor
from torch.nn import functional as F

from tilewright.ir.ops.epilogue import activations
from tilewright.library.offers.offer import FrozenProduct, epilogues_of

Window = tuple[tuple[int, int], tuple[int, int], tuple[int, int], int]
"""Stride, padding, dilation, groups."""


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


def convolved(x: Tensor, w: Tensor, b: Tensor | None, window: Window, threads: int = 2) -> Tensor:
    """What code of our own makes of `x`."""
    want = F.conv2d(x, w, b, *window)
    made = products(threads)(FrozenProduct(w, b, sizes(x), sizes(want), *window))
    assert made is not None
    y = made.function(x)
    assert isinstance(y, Tensor)
    return y


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("channels", [2, 3, 17, 24, 33, 200])
@pytest.mark.parametrize("side", [(1, 1), (1, 4), (2, 3), (5, 5), (7, 7), (13, 11), (23, 6)])
def test_any_image_is_as_exact_as_eager(side: tuple[int, int], channels: int, threads: int) -> None:
    for kernel, stride, padding, dilation in (
        (3, 1, 1, 1), (3, 2, 1, 1), (5, 1, 2, 1), (5, 2, 2, 1), (7, 1, 3, 1), (3, 5, 1, 1), (3, 1, 2, 2), (3, 1, 2, 1),
        (5, 1, 4, 1), (3, 2, 0, 1),
    ):  # fmt: skip
        if min(side) + 2 * padding < dilation * (kernel - 1) + 1:
            continue
        x, w, b = (
            torch.randn(3, channels, *side),
            torch.randn(channels, 1, kernel, kernel),
            torch.randn(channels),
        )
        window = (stride, stride), (padding, padding), (dilation, dilation), channels
        want = F.conv2d(x.double(), w.double(), b.double(), *window)
        eager = (F.conv2d(x, w, b, *window) - want).square().mean().sqrt()
        ours = (convolved(x, w, b, window, threads) - want).square().mean().sqrt()
        assert ours <= 2 * eager + 1e-7, (kernel, stride, padding, dilation)


@pytest.mark.parametrize("channels", [3, 24, 40])
def test_more_padding_behind_than_in_front(channels: int) -> None:
    x, w = torch.randn(2, channels, 10, 9), torch.randn(channels, 1, 3, 3)
    for uneven in (((0, 1), (0, 1)), ((1, 0), (0, 2)), ((0, 3), (2, 0))):
        (top, bottom), (left, right) = uneven
        want = F.conv2d(F.pad(x, (left, right, top, bottom)), w, None, 2, 0, 1, channels)
        task = FrozenProduct(w, None, sizes(x), sizes(want), (2, 2), (0, 0), (1, 1), channels, uneven=uneven)
        made = products(2)(task)
        assert made is not None
        torch.testing.assert_close(made.function(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_what_is_not_finite_reaches_its_own_windows_only(kernel: int, value: float) -> None:
    """Neither borders nor lanes that are filled up multiply it with zero."""
    for channels, side, stride in ((24, 9, 1), (17, 6, 2), (5, 7, 1), (40, 4, 1)):
        w = torch.rand(channels, 1, kernel, kernel) + 0.5
        window = (stride, stride), (kernel // 2, kernel // 2), (1, 1), channels
        for y, x in ((0, 0), (0, side - 1), (side - 1, 0), (side - 1, side - 1), (side // 2, side // 2)):
            image = torch.randn(2, channels, side, side)
            image[1, channels - 1, y, x] = value
            want = F.conv2d(image, w, None, *window)
            torch.testing.assert_close(
                convolved(image, w, None, window), want, rtol=1e-5, atol=1e-5, equal_nan=True
            )


def test_cuts_at_nan_are_as_eager_has_them() -> None:
    x, w = torch.randn(1, 40, 6, 6), torch.randn(40, 1, 3, 3)
    window = (1, 1), (1, 1), (1, 1), 40
    plain = F.conv2d(x, w, None, *window)
    call = products(1)(FrozenProduct(w, None, sizes(x), sizes(plain), *window))
    assert call is not None
    clamp = next(e for e in epilogues_of(call) if e.template is activations()["clamp"])
    for low, high in ((0.0, 6.0), (-1.0, torch.inf), (-torch.inf, 0.5), (torch.nan, 1.0), (0.0, torch.nan)):
        made = clamp.make((low, high), None).function(x)
        torch.testing.assert_close(made, plain.clamp(low, high), rtol=1e-5, atol=1e-5, equal_nan=True)
