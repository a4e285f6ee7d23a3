"""Products where nothing may be timed: kernels where the table of measured products says so, else the library's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.support.normal_graph import capture
from tests.support.triton.absent_gpu import Device, compiled
from torch import Tensor

from tilewright.ir.schedule import Schedule
from tilewright.options import Options
from tilewright.pipeline.product_ways import proposals_of, tasks_of
from tilewright.pipeline.tabled_products import measured_first
from tilewright.schedule.product_table import (
    FastestProduct,
    MeasuredBlocks,
    ProductShape,
    ProductTable,
    blocks_of,
)
from tilewright.schedule.solver import Solver
from tilewright.target import preset

LINEAR = ProductShape("contraction", 2, 1, False, 1, "kkn", 1, 64, 256, 128, 64 * 128)
BLOCKS = MeasuredBlocks((32, 64), 64, 4, 3)
DEPTHWISE = ProductShape("depthwise", 2, 1, False, 9, "n-n", 1, 2 * 8 * 8, 64, 9, 2 * 64 * 8 * 8)
LINES = MeasuredBlocks((4, 16), 1, 2, 1, unrolled=(2,))
WINDOWS = ProductShape("convolution", 2, 1, False, 9, "kkn", 1, 2 * 8 * 8, 64, 64 * 9, 2 * 64 * 8 * 8)

Program = tuple[Callable[..., Tensor], Sequence[Sequence[int]]]


def linear(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def activated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(x @ w.t()) * (x @ v.t())


def convolved(x: Tensor, w: Tensor, stride: int = 1, groups: int = 1) -> Tensor:
    return F.conv2d(x, w, None, stride, w.shape[-1] // 2, 1, groups)


def rectified(x: Tensor, w: Tensor) -> Tensor:
    return convolved(x, w).relu()


def spread(x: Tensor, w: Tensor) -> Tensor:
    return F.conv_transpose2d(x, w, padding=1, stride=2, output_padding=1)


SHAPES: dict[str, Program] = {
    "linear": (linear, [(64, 128), (256, 128)]),
    "activated": (activated, [(2, 32, 128), (256, 128), (256,)]),
    "gated": (gated, [(64, 128), (256, 128), (256, 128)]),
    "convolved": (convolved, [(2, 64, 8, 8), (64, 64, 3, 3)]),
    "rectified": (rectified, [(2, 64, 8, 8), (64, 64, 3, 3)]),
    "every second place": (partial(convolved, stride=2), [(2, 64, 16, 16), (64, 64, 3, 3)]),
    "spread": (spread, [(2, 64, 4, 4), (64, 64, 3, 3)]),
    "in groups": (partial(convolved, groups=2), [(2, 128, 8, 8), (64, 64, 3, 3)]),
    "depthwise": (partial(convolved, groups=64), [(2, 64, 8, 8), (64, 1, 3, 3)]),
    "odd channels": (convolved, [(2, 60, 8, 8), (64, 60, 3, 3)]),
    "batch of one": (torch.matmul, [(1, 64, 128), (1, 128, 256)]),
    "odd rows": (linear, [(64, 127), (256, 127)]),
    "odd results": (linear, [(64, 128), (255, 128)]),
    "later rows": (lambda x, w: x[:, 1:129] @ w.t(), [(64, 136), (256, 128)]),
    "untransposed": (torch.mm, [(64, 128), (128, 256)]),
    "of itself": (lambda x: x @ x.t(), [(64, 128)]),
}


def made(name: str, *entries: FastestProduct, laid: int = 2) -> tuple[Device, list[Tensor]]:
    """What is compiled with a table of these entries, and its inputs, of which so many are `laid` with channels
    innermost."""
    run, shapes = SHAPES[name]
    inputs = [torch.randn(shape).half() / 4 for shape in shapes]
    last = torch.channels_last
    inputs = [
        x.contiguous(memory_format=last) if x.ndim == 4 and n < laid else x for n, x in enumerate(inputs)
    ]
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
        ("linear", replace(LINEAR, m=80, n=200, k=150, image=80 * 150)),
        ("batch of one", replace(LINEAR, runs="knn")),
        ("untransposed", replace(LINEAR, runs="knn")),
        ("of itself", replace(LINEAR, n=64)),
        ("activated", replace(LINEAR, fused=True)),
        ("gated", replace(LINEAR, fused=True, count=2)),
        ("convolved", WINDOWS),
        ("every second place", replace(WINDOWS, image=4 * WINDOWS.image)),
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
        ("rectified", entry(WINDOWS, 0.9)),
        ("every second place", entry(WINDOWS)),
        ("spread", entry(WINDOWS)),
        ("in groups", entry(WINDOWS)),
        ("depthwise", entry(WINDOWS)),
        ("odd channels", entry(WINDOWS)),
        ("batch of one", entry(replace(LINEAR, runs="knn"), 1.0)),
        ("odd rows", entry(LINEAR)),
        ("odd results", entry(LINEAR)),
        ("later rows", entry(LINEAR)),
        ("untransposed", entry(LINEAR)),
    ],
    ids=[
        "as fast",
        "far",
        "no such blocks",
        "the library won",
        "with more behind",
        "no windows",
        "a product",
        "a library takes it into its call",
        "windows that skip places",
        "windows that meet zeros",
        "groups",
        "depthwise",
        "channels in odd numbers",
        "a view behind it is no pass",
        "rows that begin anywhere",
        "results that begin anywhere",
        "rows that begin later",
        "other operands",
    ],
)
def test_the_library_keeps_the_rest(name: str, found: FastestProduct) -> None:
    with pytest.raises(AssertionError, match="a library call is left"):
        made(name, found)


@pytest.mark.parametrize("blocks", [LINES, replace(LINES, rows=4)], ids=str)
def test_windows_have_the_lines_of_the_table(blocks: MeasuredBlocks) -> None:
    """What is no matrix has blocks of channels and places; taps are written out line by line."""
    device, inputs = made("depthwise", entry(DEPTHWISE, blocks=blocks))
    assert only_blocks(device).are_like(blocks)
    results, _ = device.run(inputs)
    right = SHAPES["depthwise"][0](*(x.double() for x in inputs))
    torch.testing.assert_close(results[0].double(), right, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    "other",
    [
        entry(replace(DEPTHWISE, taps=49, k=49), blocks=LINES),
        entry(replace(DEPTHWISE, n=256), blocks=LINES),
        entry(DEPTHWISE, 0.99, LINES),
        entry(replace(DEPTHWISE, image=4 * DEPTHWISE.image), blocks=LINES),
        entry(DEPTHWISE, blocks=replace(LINES, unrolled=(5,))),
        entry(DEPTHWISE, blocks=replace(LINES, rows=5)),
        entry(DEPTHWISE),
    ],
    ids=[
        "other taps",
        "more channels",
        "no faster",
        "every second place",
        "uneven",
        "uneven rows",
        "a matrix",
    ],
)
def test_other_windows_are_the_library_s(other: FastestProduct) -> None:
    with pytest.raises(AssertionError, match="a library call is left"):
        made("depthwise", other)


def test_windows_that_are_not_proposed_any_more_are_the_model_s() -> None:
    """Where what was measured was so much faster that another kernel is, too."""
    device, inputs = made("depthwise", entry(DEPTHWISE, 0.7, blocks=replace(LINES, rows=5)))
    (kernel,) = device.kernels
    first, *_ = Solver(preset("sm_90"), Options()).proposals(kernel.kernel, device.cover.layouts)
    assert only_blocks(device) == blocks_of(first.schedule)
    results, _ = device.run(inputs)
    right = SHAPES["depthwise"][0](*(x.double() for x in inputs))
    torch.testing.assert_close(results[0].double(), right, rtol=4e-3, atol=4e-3)


def test_weights_whose_channels_lie_apart_are_the_library_s() -> None:
    with pytest.raises(AssertionError, match="a library call is left"):
        made("convolved", entry(WINDOWS), laid=1)


def test_without_a_table_nothing_is_asked_of_products() -> None:
    with mock.patch("tilewright.pipeline.tabled_products.product_shape") as asked:
        with pytest.raises(AssertionError, match="a library call is left"):
            made("linear")
        assert not asked.called
        asked.return_value = None
        with pytest.raises(AssertionError, match="a library call is left"):
            made("linear", entry(LINEAR))
        assert asked.called


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


def unpacked(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    return x @ (packed.half() * scale).t()


@pytest.mark.parametrize(("run", "first"), [(linear, True), (unpacked, False)], ids=["halves", "packed"])
def test_what_is_timed_first_was_measured_of_such_products(run: Callable[..., Tensor], first: bool) -> None:
    """Of products whose operands lie in memory, not of those that unpack them."""
    packed, scale = torch.randint(-9, 9, (256, 128), dtype=torch.int8), torch.rand(256, 1).half()
    weight = [packed, scale] if run is unpacked else [packed.half()]
    inputs = [torch.randn(64, 128).half(), *weight]
    solver = Solver(preset("sm_90"), Options())
    (task,) = tasks_of(capture(run, inputs), lambda g: g, solver.hints)
    proposals = proposals_of(task, solver)
    wanted = blocks_of(proposals[-1].solution.schedule)
    table = ProductTable((entry(LINEAR, blocks=wanted),))
    found = measured_first(task, proposals, solver, table)
    assert blocks_of(found[0].solution.schedule).are_like(wanted) is first


def test_sizes_that_are_not_known_are_the_library_s() -> None:
    run, shapes = SHAPES["linear"]
    table = ProductTable((entry(LINEAR), entry(replace(LINEAR, m=1, image=128))))
    with (
        mock.patch("tilewright.pipeline.products.product_table", lambda target: table),
        pytest.raises(AssertionError, match="a library call is left"),
    ):
        inputs = [torch.randn(shape).half() for shape in shapes]
        compiled(run, inputs, [(0,), ()], contractions="modelled", tune_seconds=0)
