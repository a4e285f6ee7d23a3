"""Products where nothing may be timed: kernels where the table of measured products says so, else the library's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.support.triton.absent_gpu import Device, compiled
from torch import Tensor

from tilewright.ir.schedule import Schedule
from tilewright.schedule.product_table import (
    FastestProduct,
    MeasuredBlocks,
    ProductShape,
    ProductTable,
    blocks_of,
)

LINEAR = ProductShape("contraction", 2, 1, False, 1, 1, 64, 256, 128)
BLOCKS = MeasuredBlocks((32, 64), 64, 4, 3)
WINDOWS = ProductShape("convolution", 2, 1, False, 9, 1, 2 * 8 * 8, 64, 64 * 9)

Program = tuple[Callable[..., Tensor], Sequence[Sequence[int]]]


def linear(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def activated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(x @ w.t()) * (x @ v.t())


def convolved(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1)


SHAPES: dict[str, Program] = {
    "linear": (linear, [(64, 128), (256, 128)]),
    "activated": (activated, [(2, 32, 128), (256, 128), (256,)]),
    "gated": (gated, [(64, 128), (256, 128), (256, 128)]),
    "convolved": (convolved, [(2, 64, 8, 8), (64, 64, 3, 3)]),
}


def made(name: str, *entries: FastestProduct) -> tuple[Device, list[Tensor]]:
    run, shapes = SHAPES[name]
    inputs = [torch.randn(shape).half() / 4 for shape in shapes]
    inputs = [x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in inputs]
    table = ProductTable(entries)
    with mock.patch("tilewright.pipeline.products.product_table", lambda target: table):
        return compiled(run, inputs, contractions="modelled", tune_seconds=0), inputs


def entry(shape: ProductShape, ratio: float = 0.8, blocks: MeasuredBlocks = BLOCKS) -> FastestProduct:
    return FastestProduct(shape, blocks, 10 * ratio, 10.0, "results.json#some/place")


def only_blocks(device: Device) -> MeasuredBlocks:
    (kernel,) = device.kernels
    assert isinstance(kernel.schedule, Schedule)
    return blocks_of(kernel.schedule)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("linear", LINEAR),
        ("linear", replace(LINEAR, m=80, n=200, k=150)),
        ("activated", replace(LINEAR, fused=True)),
        ("gated", replace(LINEAR, fused=True, count=2)),
        ("convolved", WINDOWS),
    ],
    ids=str,
)
def test_a_kernel_has_the_blocks_of_the_table(name: str, shape: ProductShape) -> None:
    device, inputs = made(name, entry(shape))
    found = only_blocks(device)
    assert replace(found, stages=BLOCKS.stages) == BLOCKS and found.stages >= BLOCKS.stages
    results, _ = device.run(inputs)
    right = SHAPES[name][0](*(x.double() for x in inputs))
    torch.testing.assert_close(results[0].double(), right, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("linear", entry(LINEAR, 0.99)),
        ("linear", entry(replace(LINEAR, m=200))),
        ("linear", entry(LINEAR, blocks=replace(BLOCKS, tiles=(8, 8)))),
        ("linear", entry(LINEAR, blocks=MeasuredBlocks((), 1, 1, 1))),
        ("linear", entry(replace(LINEAR, fused=True))),
        ("convolved", entry(replace(WINDOWS, taps=1))),
        ("convolved", entry(replace(WINDOWS, kind="contraction"))),
    ],
    ids=[
        "as fast",
        "far",
        "no such blocks",
        "the library won",
        "with more behind",
        "no windows",
        "a product",
    ],
)
def test_the_library_keeps_the_rest(name: str, found: FastestProduct) -> None:
    with pytest.raises(AssertionError, match="a library call is left"):
        made(name, found)


def test_what_stands_behind_counts_as_what_the_library_takes_for_it() -> None:
    """A product alone that is no faster than the library's is, with what a library computes in a further pass."""
    device, _ = made("activated", entry(LINEAR, 1.0))
    assert only_blocks(device) == BLOCKS
    with pytest.raises(AssertionError, match="a library call is left"):
        made("activated", entry(LINEAR, 3.0))
    with pytest.raises(
        AssertionError, match="a library call is left"
    ):  # measured with more behind: nearer than alone
        made("activated", entry(LINEAR, 1.0), entry(replace(LINEAR, fused=True), 1.0))


def test_sizes_that_are_not_known_are_the_library_s() -> None:
    run, shapes = SHAPES["linear"]
    table = ProductTable((entry(LINEAR),))
    with (
        mock.patch("tilewright.pipeline.products.product_table", lambda target: table),
        pytest.raises(AssertionError, match="a library call is left"),
    ):
        inputs = [torch.randn(shape).half() for shape in shapes]
        compiled(run, inputs, [(0,), ()], contractions="modelled", tune_seconds=0)
