"""Convolutions of images with few channels in native code: lines of windows as runs of a band with its borders."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import cast

import pytest
import torch
from tests.support.own_products import products, sizes
from torch import Tensor
from torch.nn import functional as F

from tilewright import accuracy
from tilewright.ir.graph import LibraryCall, bind
from tilewright.library.offers.offer import FrozenProduct
from tilewright.runtime.own.form import FusedProduct, NativeMethod
from tilewright.runtime.own.product import ProductCalls

Window = tuple[int, tuple[int, int], tuple[int, int]]
"""Stride, padding, dilation."""


def runs(made: LibraryCall) -> Callable[..., Tensor]:
    return cast(Callable[..., Tensor], bind(made.function))


def call(w: Tensor, bias: Tensor | None, x: Tensor, window: Window, threads: int = 2) -> LibraryCall:
    stride, padding, dilation = window
    want = F.conv2d(x, w, bias, stride, padding, dilation)
    task = FrozenProduct(w, bias, sizes(x), sizes(want), (stride, stride), padding, dilation)
    made = products(threads)(task)
    assert made is not None and isinstance(made.function, FusedProduct)
    assert made.function.way is NativeMethod.FEW_CHANNELS
    return made


def judge(made: Tensor, w: Tensor, bias: Tensor, x: Tensor, window: Window) -> None:
    exact = F.conv2d(x.double(), w.double(), bias.double(), *window)
    verdict = accuracy.compare(made, F.conv2d(x, w, bias, *window), exact)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("kernel", "window"),
    [
        ((3, 3), (2, (1, 1), (1, 1))),
        ((7, 7), (2, (3, 3), (1, 1))),
        ((3, 3), (1, (0, 0), (2, 1))),
        ((1, 3), (3, (0, 1), (1, 1))),
        ((2, 5), (4, (2, 3), (1, 1))),
        ((11, 11), (4, (2, 2), (1, 1))),
    ],
)
@pytest.mark.parametrize("images", [(1, 1, 13), (3, 17, 1), (2, 37, 41)])
def test_it_errs_no_more_than_eager(
    channels: int, kernel: tuple[int, int], window: Window, images: tuple[int, int, int]
) -> None:
    count, height, width = images
    (_, padding, dilation) = window
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    height, width = (max(n, r - 2 * p) for n, r, p in zip((height, width), reach, padding, strict=True))
    x = torch.randn(count, channels, height, width)
    panel = products(1).panel
    for columns in (panel // 2, 2 * panel + 1):  # fewer are the library's
        w, bias = torch.randn(columns, channels, *kernel), torch.randn(columns)
        made = [runs(call(w, bias, x, window, threads))(x) for threads in (1, 2)]
        judge(made[0], w, bias, x, window)
        assert torch.equal(made[0], made[1])


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_numbers_that_are_not_finite_stay_in_their_windows(odd: float) -> None:
    w, x = torch.randn(16, 3, 3, 3), torch.randn(2, 3, 20, 19)
    x[0, 1, 0, 0] = x[1, 2, 19, 18] = x[0, 0, 10, 0] = odd
    made = runs(call(w, None, x, (2, (1, 1), (1, 1))))(x)
    want = F.conv2d(x, w, None, 2, 1)
    assert torch.equal(made.isfinite(), want.isfinite())
    assert torch.allclose(made[want.isfinite()], want[want.isfinite()], atol=1e-4)


def test_images_that_lie_otherwise_are_taken() -> None:
    w, bias, x = torch.randn(24, 3, 3, 3), torch.randn(24), torch.randn(2, 3, 33, 29)
    run = runs(call(w, bias, x, (2, (1, 1), (1, 1))))
    made = run(x)
    assert torch.equal(run(x.contiguous(memory_format=torch.channels_last)), made)
    wide = torch.randn(2, 3, 33, 58)
    wide[..., ::2] = x
    assert torch.equal(run(wide[..., ::2]), made)


def test_an_activation_and_a_sum_are_fused() -> None:
    w, x = torch.randn(16, 3, 3, 3), torch.randn(1, 3, 16, 16)
    fused = call(w, None, x, (1, (1, 1), (1, 1))).function
    assert isinstance(fused, FusedProduct)
    plain, beside = F.conv2d(x, w, None, 1, 1), torch.randn(1, 16, 16, 16)
    for made, want in (
        (fused.activated("clamp")((0.0, 6.0), None), plain.clamp(0, 6)),
        (fused.activated("gelu")((), None), F.gelu(plain)),
    ):
        assert torch.allclose(runs(made)(x), want, atol=1e-4)
    added = next(e for e in fused.epilogues() if e.extra == "equal").make((), None)
    assert torch.allclose(runs(added)(x, beside), plain + beside, atol=1e-4)


def test_without_memory_for_a_band_sums_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    none = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(lambda worker, size: None)
    owner: ProductCalls = products(1)
    monkeypatch.setattr(owner, "scratch", ctypes.cast(none, ctypes.c_void_p).value)
    w, bias, x = torch.randn(33, 3, 3, 3), torch.randn(33), torch.randn(2, 3, 9, 11)
    window = (2, (1, 1), (2, 1))
    judge(runs(call(w, bias, x, window, 1))(x), w, bias, x, window)
