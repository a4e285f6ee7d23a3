"""Depthwise convolutions, with the products in front and behind as one call: the same bits as one by one."""

from __future__ import annotations

import ctypes
import itertools
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import pytest
import torch
from tests.support.own_products import products, sizes
from torch import Tensor
from torch.nn import functional as F

from tilewright import accuracy
from tilewright.ir.graph import bind
from tilewright.library.offers.offer import FrozenProduct
from tilewright.options import Options
from tilewright.runtime.own import product
from tilewright.runtime.own.form import FusedProduct, NativeMethod
from tilewright.runtime.own.product import ProductCalls
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.target import preset
from tilewright.tuning.runtime_thresholds import OWN_KERNELS

Window = tuple[int, tuple[int, int], int]
"""Stride, padding, dilation."""


@pytest.fixture(autouse=True)
def products_of_any_columns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of few columns, too, of which vectors of some machines would be mostly empty."""
    monkeypatch.setattr(product, "OWN_KERNELS", replace(OWN_KERNELS, min_filled_ratio=0.0))
    yield


def run(chain: FusedProduct, *operands: Tensor) -> Tensor:
    return cast(Callable[..., Tensor], bind(chain.call().function))(*operands)


class Parts:
    """A product, a depthwise convolution of `channels` and a product, and what each makes of an image."""

    def __init__(
        self, image: tuple[int, ...], channels: int, kernel: tuple[int, int], window: Window,
        owner: ProductCalls | None = None,
    ) -> None:  # fmt: skip
        stride, padding, dilation = window
        self.window = (stride, padding, dilation, channels)
        self.x, inner = torch.randn(image), image[1]
        self.weights = (
            torch.randn(channels, inner, 1, 1), torch.randn(channels, 1, *kernel), torch.randn(20, channels, 1, 1),
        )  # fmt: skip
        self.biases = torch.randn(channels), torch.randn(channels), torch.randn(20)
        a, b, c = self.made(self.x, self.weights, self.biases)
        self.added = torch.randn(c.shape)
        owner, one, none = owner or products(2), (1, 1), (0, 0)
        tasks = (
            FrozenProduct(self.weights[0], self.biases[0], sizes(self.x), sizes(a), one, none, one),
            FrozenProduct(
                self.weights[1], self.biases[1], sizes(a), sizes(b), (stride,) * 2, padding, (dilation,) * 2, channels
            ),
            FrozenProduct(self.weights[2], self.biases[2], sizes(b), sizes(c), one, none, one),
        )  # fmt: skip
        first, second, then = (replace(cast(FusedProduct, owner.product(t).function)) for t in tasks)  # type: ignore[union-attr]
        self.first = replace(first, activation="clamp", constants=(0.0, 6.0))
        self.second = replace(second, activation="silu")
        self.then = replace(then, added=True)

    def made(
        self, x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        a = F.conv2d(x, weights[0], biases[0]).clamp(0, 6)
        b = F.silu(F.conv2d(a, weights[1], biases[1], *self.window))
        return a, b, F.conv2d(b, weights[2], biases[2])

    def apart(self) -> tuple[Tensor, Tensor, Tensor]:
        a = run(self.first, self.x)
        b = run(self.second, a)
        return a, b, run(self.then, b, self.added)

    def chain(self, first: bool, then: bool) -> FusedProduct:
        return replace(
            self.second, way=NativeMethod.DEPTHWISE_CHAIN, first=self.first if first else None,
            then=self.then if then else None, added=then,
        )  # fmt: skip

    def check(self) -> None:
        """Each chain makes the bits of its parts."""
        a, b, c = self.apart()
        assert torch.equal(run(self.chain(True, False), self.x), b)
        assert torch.equal(run(self.chain(True, True), self.x, self.added), c)
        assert torch.equal(run(self.chain(False, True), a, self.added), c)

    def check_nearly(self) -> None:
        """The same, but for the order of sums, as exactly as eager."""
        doubles = lambda ts: tuple(t.double() for t in ts)  # noqa: E731
        exact = self.made(self.x.double(), doubles(self.weights), doubles(self.biases))
        eager = self.made(self.x, self.weights, self.biases)
        made = run(self.chain(True, False), self.x), run(self.chain(True, True), self.x, self.added)
        for ours, theirs, want in (
            (made[0], eager[1], exact[1]),
            (made[1], eager[2] + self.added, exact[2] + self.added.double()),
        ):
            verdict = accuracy.compare(ours, theirs, want)
            assert verdict.passed, str(verdict)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("channels", [16, 17, 24, 33, 100])
@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_chains_make_the_bits_of_their_parts(kernel: int, channels: int, threads: int) -> None:
    for side, stride in itertools.product(((1, 1), (3, 17), (13, 11), (37, 29)), (1, 2)):
        padding = kernel // 2, kernel // 2
        parts = Parts((2, 7, *side), channels, (kernel, kernel), (stride, padding, 1), products(threads))
        parts.check_nearly()
        in_registers = kernel == 3 or parts.added.shape[3] >= 3
        if in_registers:
            parts.check()


def test_rows_that_are_wide_are_cut_by_channels() -> None:
    """Of rows that do not stay in a cache, a task has some of the channels; where a product is behind, all."""
    for stride in (1, 2):
        for channels in (65, 72, 73, 81):  # the last part may have fewer than a vector has, or one and a part
            Parts((1, 4, 27, 700), channels, (3, 3), (stride, (1, 1), 1)).check()


@pytest.mark.slow  # it builds all sources once more
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the oldest machine of this kind")
def test_machines_without_sums_that_round_once() -> None:
    """The bits of parts there, too, also in a part of fewer channels than a vector has."""
    options = Options.make({"threads": 2})
    owner = ProductCalls(preset("x86-64"), ContentStore(default_root(options)), options)
    assert owner.lanes == 4
    for channels in (65, 67):
        Parts((1, 4, 27, 700), channels, (3, 3), (1, (1, 1), 1), owner).check()


@pytest.mark.parametrize("padding", [(0, 0), (1, 0), (0, 1)])
def test_borders_that_are_left_out(padding: tuple[int, int]) -> None:
    Parts((3, 5, 26, 31), 40, (3, 3), (1, padding, 1)).check()
    Parts((3, 5, 26, 31), 40, (3, 3), (2, padding, 1)).check()


@pytest.mark.parametrize(
    ("channels", "kernel", "window"),
    [(5, (3, 3), (1, (1, 1), 1)), (6, (3, 3), (2, (1, 1), 1)), (24, (3, 3), (3, (1, 1), 1)),
     (24, (3, 3), (1, (2, 2), 2)), (24, (3, 3), (1, (2, 2), 1)), (33, (2, 5), (1, (0, 2), 1))],
)  # fmt: skip
def test_other_windows_are_done_place_by_place(
    channels: int, kernel: tuple[int, int], window: Window
) -> None:
    Parts((2, 6, 9, 8), channels, kernel, window).check_nearly()


def test_without_memory_sums_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    none = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(lambda worker, size: None)
    owner: ProductCalls = products(1)
    monkeypatch.setattr(owner, "scratch", ctypes.cast(none, ctypes.c_void_p).value)
    for channels in (24, 65):
        Parts((2, 5, 9, 11), channels, (3, 3), (2, (1, 1), 1), owner).check_nearly()


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_numbers_that_are_not_finite_stay_in_their_windows(odd: float) -> None:
    parts = Parts((2, 5, 30, 19), 33, (3, 3), (1, (1, 1), 1))
    parts.first = replace(parts.first, activation="none", constants=())
    parts.x[0, 1, 0, 0] = parts.x[1, 4, 29, 18] = parts.x[0, 0, 14, 0] = odd
    a, b, c = parts.apart()
    assert not a.isfinite().all() and a.isfinite().any()
    for made, want in (
        (run(parts.chain(True, False), parts.x), b),
        (run(parts.chain(True, True), parts.x, parts.added), c),
    ):
        torch.testing.assert_close(made, want, rtol=0, atol=0, equal_nan=True)


def test_which_calls_are_one() -> None:
    """Those around large images, known before; small images, other windows and other ways stay apart."""
    small, large = (Parts((1, 8, side, side), 64, (3, 3), (1, (1, 1), 1)) for side in (8, 400))
    first, second, then = large.first, large.second, large.then
    chain = second.behind(first)
    assert chain is not None
    whole = then.behind(cast(FusedProduct, chain.function))
    assert whole is not None and cast(FusedProduct, whole.function).is_whole
    torch.testing.assert_close(
        cast(FusedProduct, whole.function).bind()(large.x, large.added), large.apart()[2], rtol=0, atol=0
    )
    assert then.behind(second) is not None
    dilated = Parts((1, 8, 400, 400), 64, (3, 3), (1, (2, 2), 2))
    narrow = Parts((1, 8, 700, 700), 5, (3, 3), (1, (1, 1), 1))
    for one, other in (
        (small.first, small.second), (small.second, small.then), (first, then), (replace(first, added=True), second),
        (second, second), (dilated.first, dilated.second), (narrow.first, narrow.second),
        (cast(FusedProduct, whole.function), then), (cast(FusedProduct, whole.function), second),
    ):  # fmt: skip
        assert other.behind(one) is None


def test_chains_of_which_parts_do_not_fit_are_none() -> None:
    parts = Parts((1, 8, 9, 9), 24, (3, 3), (1, (1, 1), 1))
    assert parts.chain(True, True).is_whole and parts.second.is_whole
    for wrong in (
        replace(parts.second, first=parts.first), replace(parts.chain(True, True), first=parts.then),
        replace(parts.chain(True, True), then=parts.first), replace(parts.chain(True, True), first=parts.second),
        replace(parts.chain(True, True), first=None, then=None),
    ):  # fmt: skip
        assert not wrong.is_whole
