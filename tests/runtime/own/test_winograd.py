"""Convolutions with fewer products in native code: the numbers are those of the law, and rounding is held to the
rule."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import torch
from tests.support.own_products import products, sizes
from torch import Tensor
from torch.nn import functional as F

from tilewright import accuracy
from tilewright.ir.graph import LibraryCall, bind
from tilewright.ir.sizes import dims
from tilewright.library.offers.offer import FrozenProduct
from tilewright.options import Options
from tilewright.rewrite.winograd import THREE, TWO
from tilewright.runtime.own import product
from tilewright.runtime.own import winograd as winograd_weights
from tilewright.runtime.own.form import FusedProduct
from tilewright.runtime.own.product import ProductCalls
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.target import preset
from tilewright.tuning.runtime_thresholds import OWN_KERNELS


class Given:
    """A convolution whose turned weights are small integers, so that all is exact in floats, whatever its sizes: what
    comes back must be what the matrices say. Few channels of each column are not zero: all sums stay short."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, image: tuple[int, ...], columns: int,
        before: tuple[int, int] = (1, 1), behind: tuple[int, int] = (1, 1), owner: ProductCalls | None = None,
    ) -> None:  # fmt: skip
        channels = image[1]
        any_size = replace(OWN_KERNELS, min_winograd_channels=1, min_winograd_tiles=1)
        monkeypatch.setattr(winograd_weights, "OWN_KERNELS", any_size)
        monkeypatch.setattr(product, "pack", self.pack)
        self.turned = torch.zeros(20, channels, columns)
        for column in range(columns):
            some = torch.randperm(channels)[:4]
            self.turned[:, some, column] = torch.randint(-2, 3, (20, len(some))).float()
        self.x = torch.randint(-2, 3, image).float()
        self.pads = before[1], behind[1], before[0], behind[0]
        height, width = (n + p + q - 2 for n, p, q in zip(image[2:], before, behind, strict=True))
        self.shape = image[0], columns, height, width
        self.bias = torch.randint(-2, 3, (columns,)).float()
        self.added = torch.randint(-2, 3, self.shape).float()
        self.owner = owner or products(2)
        even = min(before[0], behind[0]), min(before[1], behind[1])
        uneven = tuple((p - n, q - n) for p, q, n in zip(before, behind, even, strict=True))
        task = FrozenProduct(
            torch.randn(columns, channels, 3, 3), self.bias, sizes(self.x), tuple(map(dims.integer, self.shape)),
            (1, 1), even, (1, 1), fewer_products=True, uneven=uneven,
        )  # fmt: skip
        call = self.owner(task)
        assert call is not None
        self.call = cast(FusedProduct, call.function)

    def pack(self, weight: Tensor, panel: int) -> Tensor:
        """The turned weights in panels."""
        columns, channels = weight.shape[:2]
        panels = -(-columns // panel)
        packed = torch.zeros(20, channels, panels * panel)
        packed[..., :columns] = self.turned
        return packed.unflatten(2, (panels, panel)).permute(2, 0, 1, 3).contiguous()

    def want(self) -> Tensor:
        """What the matrices say."""
        images, columns, height, width = self.shape
        high, wide = -(-height // 2), -(-width // 3)
        left, right, top, bottom = self.pads
        x = F.pad(self.x, (left, right + wide * 3 - width, top, bottom + high * 2 - height)).double()
        (down, down_back), (across, across_back) = (
            [torch.tensor([[float(f) for f in r] for r in m]).double() for m in (s.image, s.back)]
            for s in (TWO, THREE)
        )
        tiles = x.unfold(2, 4, 2).unfold(3, 5, 3)
        numbers = torch.einsum("ai,bj,nchwij->nchwab", down, across, tiles).flatten(4)
        sums = torch.einsum("fco,nchwf->nohwf", self.turned.double(), numbers).unflatten(4, (4, 5))
        made = torch.einsum("ia,jb,nohwab->nohiwj", down_back, across_back, sums)
        made = made.reshape(images, columns, high * 2, wide * 3)[..., :height, :width]
        return made + self.bias.double()[:, None, None]

    def check(self) -> None:
        """Sums, sums that are cut at zero behind what is added, and sums that another function follows."""
        want, added = self.want(), self.added
        assert torch.equal(_run(self.call, self.x), want)
        cut = replace(self.call, added=True, activation="relu")
        assert torch.equal(_run(cut, self.x, added), (want + added.double()).relu())
        leaky = replace(self.call, activation="leaky_relu", constants=(0.25,))
        assert torch.equal(_run(leaky, self.x), F.leaky_relu(want, 0.25))


def _run(call: FusedProduct, *operands: Tensor) -> Tensor:
    return cast(Callable[..., Tensor], bind(call.call().function))(*operands).double()


@pytest.mark.parametrize("columns", [1, 8, 16, 17, 24, 33, 64])
@pytest.mark.parametrize("channels", [1, 3, 16, 17, 24, 33, 100])
def test_the_native_code_computes_with_these_numbers(
    channels: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for threads in (1, 2):
        Given(monkeypatch, (1, channels, 12, 12), columns, owner=products(threads)).check()


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 7), (2, 2), (3, 5), (13, 11), (29, 31), (40, 3)])
@pytest.mark.parametrize(
    ("before", "behind"), [((1, 1), (1, 1)), ((2, 1), (1, 3)), ((0, 2), (2, 0)), ((2, 2), (2, 2))]
)
def test_images_of_any_size_with_borders_of_any(
    height: int, width: int, before: tuple[int, int], behind: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for images in (1, 3):
        Given(monkeypatch, (images, 20, height, width), 24, before, behind).check()


def test_sums_over_many_channels_and_blocks_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of sums of chains, some of which are short; more tiles than are turned together, images that begin within
    a block; and many channels, of which few tiles are."""
    for channels in (65, 80, 129, 144, 700):
        Given(monkeypatch, (3, channels, 21, 22), 40).check()


@pytest.mark.slow  # it builds all sources once more
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the oldest machine of this kind")
def test_machines_of_shorter_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options.make({"threads": 2})
    owner = ProductCalls(preset("x86-64"), ContentStore(default_root(options)), options)
    assert owner.lanes == 4
    for channels, columns in ((3, 4), (16, 12), (33, 24), (100, 33)):
        Given(monkeypatch, (2, channels, 13, 11), columns, (1, 1), (1, 2), owner).check()


def winograd(
    w: Tensor, x: Tensor, padding: int = 1, bias: Tensor | None = None, threads: int = 2
) -> LibraryCall:
    task = FrozenProduct(
        w, bias, sizes(x), sizes(F.conv2d(x, w, bias, 1, padding)), (1, 1), (padding,) * 2, (1, 1)
    )
    made = products(threads)(replace(task, fewer_products=True))
    assert made is not None
    return made


@functools.cache
def weight(columns: int, channels: int) -> Tensor:
    return torch.randn(columns, channels, 3, 3) * (2 / 9 / channels) ** 0.5


@pytest.mark.parametrize(
    ("images", "channels", "columns", "height", "width", "padding"),
    [
        (1, 64, 64, 24, 24, 1),
        (2, 37, 50, 9, 11, 1),
        (3, 16, 33, 12, 7, 0),
        (1, 100, 17, 8, 13, 2),
        (1, 300, 40, 14, 14, 1),
    ],
)
def test_it_errs_no_more_than_eager(
    images: int, channels: int, columns: int, height: int, width: int, padding: int
) -> None:
    w, b, x = (
        weight(columns, channels),
        torch.randn(columns),
        torch.randn(images, channels, height, width).relu(),
    )
    exact = F.conv2d(x.double(), w.double(), b.double(), 1, padding)
    made = winograd(w, x, padding, b).function(x)
    assert isinstance(made, Tensor)
    verdict = accuracy.compare(made, F.conv2d(x, w, b, 1, padding), exact)
    assert verdict.passed, str(verdict)
    for threads in (1, 3):
        assert torch.equal(winograd(w, x, padding, b, threads).function(x), made)  # type: ignore[arg-type]


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize(("y", "x"), [(8, 9), (0, 0), (0, 18), (16, 0), (16, 18), (16, 7)])
def test_what_is_not_like_the_rest_stays_where_its_windows_are(odd: float, y: int, x: int) -> None:
    """In the image, and beside its borders."""
    w, given = weight(40, 35), torch.randn(1, 35, 17, 19)
    given[0, 33, y, x] = odd
    eager, exact = F.conv2d(given, w, None, 1, 1), F.conv2d(given.double(), w.double(), None, 1, 1)
    made = winograd(w, given).function(given)
    assert isinstance(made, Tensor)
    far = torch.ones(17, 19, dtype=torch.bool)
    far[max(0, y - 1) : y + 2, max(0, x - 1) : x + 2] = False
    verdict = accuracy.compare(made[..., far], eager[..., far], exact[..., far])
    assert verdict.passed, str(verdict)
    assert torch.equal(made.isnan(), eager.isnan()) and torch.equal(made.isinf(), eager.isinf())


@pytest.mark.parametrize("usual", [1e18, 3e18, 1e19])
def test_what_is_not_finite_is_found_where_squares_of_the_rest_are_not_either(usual: float) -> None:
    w, given = weight(40, 35) * 1e-3, torch.randn(1, 35, 17, 19) * usual
    given[0, 33, 8, 9] = torch.inf
    eager, made = F.conv2d(given, w, None, 1, 1), winograd(w, given).function(given)
    assert isinstance(made, Tensor) and eager.isinf().sum() == 40 * 9
    assert torch.equal(made.isnan(), eager.isnan()) and torch.equal(made.isinf(), eager.isinf())


def test_convolutions_of_other_kinds_are_refused() -> None:
    x, w = torch.randn(1, 32, 16, 16), weight(32, 32)
    for stride, dilation, groups, kernel in ((2, 1, 1, 3), (1, 2, 1, 3), (1, 1, 2, 3), (1, 1, 1, 5)):
        w = torch.randn(32, 32 // groups, kernel, kernel)
        want = F.conv2d(x, w, None, stride, 1, dilation, groups)
        task = FrozenProduct(w, None, sizes(x), sizes(want), (stride,) * 2, (1, 1), (dilation,) * 2, groups)
        assert products(2)(replace(task, fewer_products=True)) is None
    few = FrozenProduct(weight(8, 8), None, sizes(x), sizes(x), (1, 1), (1, 1), (1, 1), fewer_products=True)
    small = FrozenProduct(
        weight(32, 32), None, sizes(x[..., :7, :7]), sizes(x[..., :7, :7]), (1, 1), (1, 1), (1, 1)
    )
    infinite = replace(few, weight=torch.full((32, 32, 3, 3), torch.inf))
    assert all(products(2)(task) is None for task in (few, replace(small, fewer_products=True), infinite))
