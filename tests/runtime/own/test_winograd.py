"""Convolutions with fewer products in native code: the numbers are those of the law, and rounding is held to the
rule."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from tests.support.own_products import products, sizes
from torch import Tensor
from torch.nn import functional as F

from tilewright import accuracy
from tilewright.ir.graph import LibraryCall
from tilewright.library.offers.offer import FrozenProduct
from tilewright.rewrite.winograd import THREE, TWO
from tilewright.runtime.own import product


def test_the_native_code_computes_with_these_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With turned weights that are small integers all is exact in floats: what comes back must be what the matrices
    say."""
    columns = channels = 16
    turned = torch.randint(-2, 3, (20, channels, columns)).double()

    def given(weight: Tensor, panel: int) -> Tensor:
        packed = torch.zeros(-(-columns // panel), 20, channels, panel)
        packed.view(-1, 20, channels, panel)[0, :, :, :columns] = turned
        return packed

    monkeypatch.setattr(product, "pack", given)
    x = torch.randint(-2, 3, (1, channels, 12, 12)).float()
    call = winograd(torch.randn(columns, channels, 3, 3), x)
    matrices = [
        [torch.tensor([[float(f) for f in r] for r in m]).double() for m in (s.image, s.back)]
        for s in (TWO, THREE)
    ]
    (down, down_back), (across, across_back) = matrices
    tiles = F.pad(x, (1, 1, 1, 1)).double().unfold(2, 4, 2).unfold(3, 5, 3)
    numbers = torch.einsum("ai,bj,nchwij->nchwab", down, across, tiles).flatten(4)
    sums = torch.einsum("fco,nchwf->nohwf", turned, numbers).unflatten(4, (4, 5))
    want = torch.einsum("ia,jb,nohwab->nohiwj", down_back, across_back, sums).reshape(1, columns, 12, 12)
    made = call.function(x)
    assert isinstance(made, Tensor) and torch.equal(made.double(), want)


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
def test_what_is_not_like_the_rest_stays_where_its_windows_are(odd: float) -> None:
    w, x = weight(40, 32), torch.randn(1, 32, 17, 19)
    x[0, 3, 8, 9] = odd
    eager, exact = F.conv2d(x, w, None, 1, 1), F.conv2d(x.double(), w.double(), None, 1, 1)
    made = winograd(w, x).function(x)
    assert isinstance(made, Tensor)
    far = torch.ones(17, 19, dtype=torch.bool)
    far[7:10, 8:11] = False
    verdict = accuracy.compare(made[..., far], eager[..., far], exact[..., far])
    assert verdict.passed, str(verdict)
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
